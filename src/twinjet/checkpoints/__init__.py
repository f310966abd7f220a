"""Model files: find, fetch, read, check."""
