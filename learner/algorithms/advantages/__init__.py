"""Advantages of actions over what was expected."""
