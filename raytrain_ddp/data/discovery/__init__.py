"""Which files a source is, and which splits they form."""
