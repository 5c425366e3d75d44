"""Rollout servers: an inference engine, the episodes it plays, and the weights it receives while playing."""
