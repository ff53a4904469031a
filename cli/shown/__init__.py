"""Results as text, and as rows."""
