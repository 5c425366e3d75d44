"""Playing of episodes: single-turn, multi-turn."""
