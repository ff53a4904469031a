"""The stages loss.policy and loss.value."""
