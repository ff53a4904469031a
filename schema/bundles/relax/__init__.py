"""Relax replay bundles: verified, read into records, and written."""

from trajreplay.schema.bundles.relax.bundle import read_bundle
from trajreplay.schema.bundles.relax.seal import bundle_folders

__all__ = ["bundle_folders", "read_bundle"]
