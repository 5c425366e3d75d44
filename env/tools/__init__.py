"""Tools that a policy may call in an episode."""
