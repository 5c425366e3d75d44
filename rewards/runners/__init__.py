"""Execution of rewards: in the rollout server, or in worker processes."""
