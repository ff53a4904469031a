"""Captures to Parquet, each whole or absent."""

from trajreplay.writer.builder import CaptureBuilder
from trajreplay.writer.events import Event, commit_events

__all__ = ["CaptureBuilder", "Event", "commit_events"]
