"""Captures to Parquet, each whole or absent."""
