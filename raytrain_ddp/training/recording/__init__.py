"""The log of a run and the sessions that write it, on rank 0."""
