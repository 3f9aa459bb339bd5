"""Which sample is in which step and slot, and the random numbers that belong to it."""
