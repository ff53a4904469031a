"""The stages advantage.kl and advantage.estimate."""
