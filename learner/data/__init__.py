"""From token sequences to packed micro-batches."""
