"""The off-policy correction: importance weights, rejections, and metrics of the mismatch."""
