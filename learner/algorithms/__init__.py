"""Advantages, losses, corrections and their objective."""
