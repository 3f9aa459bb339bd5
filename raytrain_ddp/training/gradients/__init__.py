"""From the gradients of all slots to those of the step."""
