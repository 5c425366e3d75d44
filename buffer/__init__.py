"""The replay buffer: a ledger in Redis, and the service that guards it."""
