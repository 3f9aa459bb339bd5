"""Atomic checkpoints: storage, manifest and store (without torch), and snapshots of tensors."""
