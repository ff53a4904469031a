"""Publishing a snapshot: entries that none holds yet into new segments, then a root over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq

from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.filedigest import bytes_digest
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.layout import SNAPSHOTS, entry_path, root_path, segment_path
from trajreplay.schema.snapshot import (
    SEGMENT_BYTES,
    SEGMENT_ENTRIES,
    SEGMENT_SCHEMA,
    Root,
    Segment,
    dump_root,
    rollout_of,
)
from trajreplay.schema.store import Store

_Entries = Iterable[tuple[CaptureKey, bytes]]


def publish_snapshot(store: Store, previous: Root, entries: _Entries) -> Root | None:
    """Publish what comes after a snapshot: its segments, and new ones with more entries.

    Args:
        store: The lake.
        previous: The newest snapshot; a `Root()` where there is none.
        entries: The entries that it does not hold, verified, in the order of their keys.

    Returns:
        The new root; None, with nothing left behind, if another was published meanwhile.

    Raises:
        CaptureError: It would name more segments than a root has room for.
    """
    added: list[Segment] = []
    try:
        for piece in _pieces(entries):
            added.append(_write_segment(store, piece))  # noqa: PERF401 - kept if one fails
        root = Root(previous.number + 1, (*previous.segments, *added))
        data = dump_root(root)
        if len(data) > MAX_BYTES:
            raise CaptureError(
                f"a snapshot of {len(root.segments)} segments takes {len(data)} bytes, expected "
                f"at most {MAX_BYTES}",
                hint=f"Remove the folder {SNAPSHOTS} and make one snapshot of all, and fewer "
                "snapshots from then on.",
            )
        published = store.publish_if_absent(root_path(root.number), data)
    except BaseException:
        _remove(store, added)
        raise
    if not published:
        _remove(store, added)
        return None
    return root


def _remove(store: Store, segments: Iterable[Segment]) -> None:
    for segment in segments:
        store.remove(segment.path)


def _pieces(entries: _Entries) -> Iterator[list[tuple[CaptureKey, bytes]]]:
    """Entries of one attempt each, as many as a segment takes."""
    for _, of_attempt in groupby(entries, lambda pair: (pair[0].run_id, pair[0].attempt)):
        piece: list[tuple[CaptureKey, bytes]] = []
        size = 0
        for key, data in of_attempt:
            if piece and (len(piece) == SEGMENT_ENTRIES or size + len(data) > SEGMENT_BYTES):
                yield piece
                piece, size = [], 0
            piece.append((key, data))
            size += len(data)
        yield piece


def _write_segment(store: Store, piece: list[tuple[CaptureKey, bytes]]) -> Segment:
    keys = [key for key, _ in piece]
    columns = [[entry_path(key) for key in keys], [data for _, data in piece]]
    arrays = [
        pa.array(column, field.type) for column, field in zip(columns, SEGMENT_SCHEMA, strict=True)
    ]
    sink = pa.BufferOutputStream()
    table = pa.Table.from_arrays(arrays, schema=SEGMENT_SCHEMA)
    pq.write_table(table, sink, compression="zstd", use_dictionary=False, write_statistics=False)
    data = sink.getvalue().to_pybytes()
    path = segment_path()
    store.publish_if_absent(path, data)
    rollouts = [rollout_of(key) for key in keys]
    return Segment(
        path,
        len(data),
        bytes_digest(data),
        len(piece),
        keys[0].run_id,
        keys[0].attempt,
        min(rollouts),
        max(rollouts),
    )
