"""The newest snapshot of a manifest: entries many to a file, instead of a file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import pyarrow as pa
import pyarrow.parquet as pq

from trajreplay.query.files.footers import check_chunks
from trajreplay.query.files.page_headers import check_claims
from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.claim import CLAIM_SUFFIX
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.filedigest import bytes_digest
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.layout import SEGMENTS, SNAPSHOTS, entry_path, number_of_root, root_path
from trajreplay.schema.snapshot import SEGMENT_BYTES, SEGMENT_SCHEMA, Root, Segment, load_root
from trajreplay.schema.store import Store

_FILE_BYTES = SEGMENT_BYTES + (1 << 20)  # zstd makes what it cannot compress a little larger
_KEPT_SEGMENTS = 4
_HINT = (
    f"Remove the folder {SNAPSHOTS} and make a snapshot anew: the manifest's entries hold all "
    "that it held."
)


@dataclass(frozen=True)
class Snapshot:
    """The entries that a snapshot holds, by key; a segment is read when one of its own is asked."""

    store: Store
    root: Root = field(default_factory=Root)

    @classmethod
    def newest(cls, store: Store) -> Snapshot:
        """The newest snapshot of a lake; an empty one where none was made.

        Raises:
            DatasetError: Its root is damaged, or a file beside it has a name of no snapshot.
        """
        numbers = [
            number_of_root(one.path)
            for one in store.list(SNAPSHOTS)
            if not one.path.startswith(f"{SEGMENTS}/") and not one.path.endswith(CLAIM_SUFFIX)
        ]
        if not numbers:
            return cls(store)
        path = root_path(max(numbers))
        return cls(store, load_root(store.read(path, MAX_BYTES), path))

    def find(self, key: CaptureKey) -> bytes | None:
        """The bytes of an entry, None where the snapshot does not hold it.

        Raises:
            DatasetError: A segment that may hold it is damaged.
        """
        path = entry_path(key)
        for segment in self.root.segments:
            if segment.may_hold(key) and (found := self.entries(segment).get(path)) is not None:
                return found
        return None

    @cached_property
    def entries(self) -> Callable[[Segment], Mapping[str, bytes]]:
        """The entries of a segment by path; of the latest few segments they are kept."""

        def read(segment: Segment) -> Mapping[str, bytes]:
            return _read(self.store, segment)

        return lru_cache(maxsize=_KEPT_SEGMENTS)(read)


def _read(store: Store, segment: Segment) -> Mapping[str, bytes]:
    """Read a segment whose bytes, schema, size and number of entries are verified first."""
    data = store.read(segment.path, _FILE_BYTES)
    if (len(data), bytes_digest(data)) != (segment.bytes, segment.digest):
        raise _broken(segment, "its bytes do not have the digest that the snapshot's root names")
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            if not file.schema_arrow.equals(SEGMENT_SCHEMA):
                raise _broken(segment, f"its columns are {file.schema_arrow}")
            groups = range(file.metadata.num_row_groups)
            check_chunks(file, groups)
            for place in range(len(SEGMENT_SCHEMA)):
                chunks = [file.metadata.row_group(group).column(place) for group in groups]
                check_claims(data, len(data), chunks, is_text=True)
            table = file.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _broken(segment, f"cannot be read: {error}") from error
    if table.num_rows != segment.entries:
        raise _broken(segment, f"holds {table.num_rows} entries, expected {segment.entries}")
    return dict(zip(table["path"].to_pylist(), table["entry"].to_pylist(), strict=True))


def _broken(segment: Segment, problem: str) -> DatasetError:
    return DatasetError(f"{segment.path}: {problem}", hint=_HINT, path=segment.path)
