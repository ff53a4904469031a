"""The lake as DuckDB views: reads, selection, closure."""
