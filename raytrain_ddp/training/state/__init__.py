"""The training state: in memory, in checkpoints, and when it is saved."""
