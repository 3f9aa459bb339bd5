"""The optimizer, its parameter groups and learning rate, and the average of the weights."""
