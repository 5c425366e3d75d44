"""Trainers, and the loop that they share."""
