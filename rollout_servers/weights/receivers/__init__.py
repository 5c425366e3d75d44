"""The receiving ends of the weight transports."""
