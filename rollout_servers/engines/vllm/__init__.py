"""vLLM: in a thread of this process (`inline`), with its core in another (`process`), or as its own `server`."""
