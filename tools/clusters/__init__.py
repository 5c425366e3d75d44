"""Runs on clusters: one table of roles, and what Slurm, Ray, Kubernetes and SkyPilot are given by it."""
