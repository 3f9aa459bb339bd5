"""Stands in for the package."""
