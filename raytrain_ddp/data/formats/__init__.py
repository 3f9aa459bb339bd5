"""Folders and files of images and labels, and the cache of what is read from them."""
