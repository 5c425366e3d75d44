"""The rollout server's side of weight updates."""
