"""From encoded images to augmented batches."""
