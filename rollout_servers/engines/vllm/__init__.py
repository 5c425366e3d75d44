"""vLLM: stepped in a thread of this process (`inline`), or with its engine core in a process of its own (`process`)."""
