"""Validation of snapshots: whether they hold what the manifest's entries hold."""

from __future__ import annotations

from collections.abc import Iterator

from trajreplay.query.manifest.catalog import Catalog
from trajreplay.query.manifest.snapshots import Snapshot
from trajreplay.query.validating.findings import ValidationFinding, finding_of
from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.claim import CLAIM_SUFFIX
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.layout import SEGMENTS, SNAPSHOTS, key_of_entry
from trajreplay.schema.snapshot import Segment
from trajreplay.schema.store import Store

_GONE = "is in a snapshot and no longer in the manifest: captures were removed or lost"
_OTHER = "is not what the manifest's entry of that name holds"


def snapshot_findings(catalog: Catalog) -> Iterator[ValidationFinding]:
    """What is wrong with the newest snapshot of a lake, held against the files of the entries.

    Args:
        catalog: The manifest, listed without snapshots.
    """
    try:
        snapshot = Snapshot.newest(catalog.store)
    except DatasetError as error:
        yield finding_of("snapshot", SNAPSHOTS, error)
        return
    listed = frozenset(catalog.keys)
    for segment in snapshot.root.segments:
        try:
            yield from _of_segment(catalog.store, listed, snapshot, segment)
        except DatasetError as error:
            yield finding_of("snapshot", segment.path, error)
    named = {segment.path for segment in snapshot.root.segments}
    for one in catalog.store.list(SEGMENTS):
        if one.path not in named and not one.path.endswith(CLAIM_SUFFIX):
            message = "the newest snapshot does not name it: ignored"
            yield ValidationFinding("info", "snapshot", one.path, message)


def _of_segment(
    store: Store, listed: frozenset[CaptureKey], snapshot: Snapshot, segment: Segment
) -> Iterator[ValidationFinding]:
    for path, data in snapshot.entries(segment).items():
        key = key_of_entry(path)
        if not segment.may_hold(key):
            yield _error(segment, f"{path} does not belong to the rollouts of this segment")
        elif key not in listed:
            yield _error(segment, f"{path} {_GONE}")
        elif store.read(path, MAX_BYTES) != data:
            yield _error(segment, f"{path} {_OTHER}")


def _error(segment: Segment, message: str) -> ValidationFinding:
    return ValidationFinding("error", "snapshot", segment.path, message)
