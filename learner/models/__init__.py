"""Loading models, and what packing asks of them."""
