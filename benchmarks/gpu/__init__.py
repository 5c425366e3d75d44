"""A check of one GPU in less than 8 minutes: see README.md."""
