"""How much better than expected each action was."""
