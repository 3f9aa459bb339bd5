"""Sources of rows, and what loads batches of them in threads or processes."""
