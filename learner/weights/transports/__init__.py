"""The learner's side of the transports of weights."""
