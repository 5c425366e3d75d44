"""Inference engines behind one seam."""
