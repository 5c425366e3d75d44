"""Rewards that ship with the project."""
