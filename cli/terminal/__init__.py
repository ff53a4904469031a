"""What reaches a terminal or a file: results, errors, progress."""
