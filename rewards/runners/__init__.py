"""Where rewards run: in the rollout server, or in worker processes."""
