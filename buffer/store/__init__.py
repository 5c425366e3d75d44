"""The ledger in Redis: scripts, keys, records."""
