"""Decides which processes are the workers of a run, and which process replaces which.

- `Member`: a process that trains or wants to, as the roster knows it.
- `Seat`: what a member has in one generation: its rank there, and the store to meet at.
- `Place`: what a member has in its own process, to join one generation after another.
- `training.runtime.world.World`: what the training needs to know of a seat, and the device.
- `checkpoint.lease.Owner`: a process and its host, however it takes part; it can be looked for.
"""
