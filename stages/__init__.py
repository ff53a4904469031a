"""The stages from reward to loss, and the replay that feeds them."""
