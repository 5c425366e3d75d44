"""transformers' own forward pass as an engine: slow, and there for every model that transformers knows."""
