"""Where the time goes, and who blocks the others."""
