"""The verbs of the command, loaded when they are named."""
