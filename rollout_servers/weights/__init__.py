"""How a rollout server receives weights."""
