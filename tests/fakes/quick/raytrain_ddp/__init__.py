"""Stands for the package."""
