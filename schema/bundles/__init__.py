"""Formats of other tools, read into records of captures and written from them."""

from trajreplay.schema.bundles.record import CaptureRecord, Scalars

__all__ = ["CaptureRecord", "Scalars"]
