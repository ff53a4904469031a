"""What a user asked for, and what it cannot be judged without."""
