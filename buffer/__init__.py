"""The replay buffer: a ledger in Redis, and the service in front of it."""
