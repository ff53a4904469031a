"""Data files: opened only as their entries say, and read column by column."""
