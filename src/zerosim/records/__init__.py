"""File formats: what a command writes and what is read back. Below everything that reads them."""
