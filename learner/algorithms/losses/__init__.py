"""Losses of the policy and of the critic."""
