"""How captures reach the lake beside a training, and what becomes of those that cannot."""
