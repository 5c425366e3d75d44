"""RL training: groups from a buffer, updates of a policy, and its weights back to the rollout servers."""
