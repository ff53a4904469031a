"""The stages reward.raw and reward.post_process."""
