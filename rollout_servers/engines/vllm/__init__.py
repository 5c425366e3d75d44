"""vLLM, with its engine core in a thread of this process (`inline`) or in another process (`process`)."""
