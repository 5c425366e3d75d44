"""Token sequences, and the packed micro-batches that are made of them."""
