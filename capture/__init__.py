"""Recorders inside a trainer, and readers of other tools' files."""
