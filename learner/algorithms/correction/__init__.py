"""The off-policy correction: importance weights, rejections, and figures of the mismatch."""
