"""The off-policy correction: the proximal policy, the behaviour weights, and what is left out."""
