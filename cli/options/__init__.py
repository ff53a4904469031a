"""Options of verbs: what they share, the types of their values, and the form of a help."""
