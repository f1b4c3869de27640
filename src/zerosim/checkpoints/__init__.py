"""Training runs on disk: one file per rank and an index, loaded under any row and any number of ranks."""
