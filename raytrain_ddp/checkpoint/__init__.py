"""Checkpoints which are whole or not there: storage, manifest, store (no torch) and snapshot."""
