"""Captures to Parquet, each whole or absent."""

from trajreplay.writer.builder import CaptureBuilder
from trajreplay.writer.events import Event, commit_events
from trajreplay.writer.packing import Promoted

__all__ = ["CaptureBuilder", "Event", "Promoted", "commit_events"]
