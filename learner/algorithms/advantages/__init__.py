"""Advantages of actions."""
