"""The demo: a small asynchronous GRPO training, captured, replayed, and its fault found."""
