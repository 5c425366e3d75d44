"""What the policy descends."""
