"""How a rollout server gets the bytes of a version into its staging memory."""
