"""Cohorts under other settings than those in force, and what that changes."""
