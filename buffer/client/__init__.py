"""The learner's connection to the buffer."""
