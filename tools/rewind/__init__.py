"""Commands that compare runs, redo their steps, and find what broke them."""
