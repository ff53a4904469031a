"""Which captures are wanted, and what the ranks agree on at start."""
