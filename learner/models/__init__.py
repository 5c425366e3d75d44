"""Models for training: loading, packed attention, scores of actions, identity, saved form, optimizer."""
