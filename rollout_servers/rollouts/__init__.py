"""How episodes are played."""
