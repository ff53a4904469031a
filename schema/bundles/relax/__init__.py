"""Relax replay bundles: verified, read into records, and written."""

from trajreplay.schema.bundles.relax.bundle import read_bundle
from trajreplay.schema.bundles.relax.cohort import bundle_folders
from trajreplay.schema.bundles.relax.write import Written, write_bundle

__all__ = ["Written", "bundle_folders", "read_bundle", "write_bundle"]
