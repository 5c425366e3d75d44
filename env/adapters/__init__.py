"""Adapters to packages of envs; each package is an extra and is imported when its env is built."""
