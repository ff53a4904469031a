"""Captures as whole cohorts in memory, and what must hold of them before any arithmetic."""
