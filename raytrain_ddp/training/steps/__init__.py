"""One step: its samples, its passes, its update, and the decisions after it."""
