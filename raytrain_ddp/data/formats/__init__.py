"""Folders and files of images and labels, and the memory of what is read of them."""
