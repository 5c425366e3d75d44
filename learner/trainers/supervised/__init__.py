"""Trainings on rows of files, such as supervised fine-tuning: neither buffer nor rollout servers."""
