"""What is taken of a training at the moment it is handed over."""
