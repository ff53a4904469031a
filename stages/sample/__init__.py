"""The stage sample: lengths, masks, and what steps took over from rollouts."""
