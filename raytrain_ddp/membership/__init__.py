"""Which processes are the workers of a run, and which replaces which."""
