"""Whether a lake is whole, without recomputing anything."""
