"""Envs that ship with the project."""
