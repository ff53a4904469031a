"""Captures to Parquet, each whole or absent."""

from trajreplay.writer.builder import CaptureBuilder

__all__ = ["CaptureBuilder"]
