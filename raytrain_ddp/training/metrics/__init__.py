"""Evaluation, and the metrics of all ranks."""
