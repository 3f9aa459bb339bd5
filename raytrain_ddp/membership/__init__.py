"""Decides which processes are the workers of a run, and which process replaces which."""
