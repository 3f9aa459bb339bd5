"""What the processes of a run share: their process group, seeds and torch's settings."""
