"""`slipstream bench weights`: how fast versions travel, and what they cost learner and generation."""
