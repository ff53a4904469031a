"""Snapshots of the manifest: a root that names segments, each the entries of a range of rollouts.

A snapshot spares a reader the opening of every entry's file. It adds nothing: what it holds are
the bytes of entries that are in the manifest too, each with its own digest.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from trajreplay.schema import exact
from trajreplay.schema.canonical import dump_signed, load_signed
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import CaptureKey, check_id
from trajreplay.schema.layout import root_path

SEGMENT_BYTES = 32 << 20  # of entries, before they are compressed
SEGMENT_ENTRIES = 1024
SEGMENT_SCHEMA = pa.schema(
    [pa.field("path", pa.string(), nullable=False), pa.field("entry", pa.binary(), nullable=False)]
)
_FORMAT = 1


class Segment(NamedTuple):
    """A Parquet file with the entries of some rollouts of one attempt.

    Args:
        path: The file, relative to the lake.
        bytes: Its size.
        digest: BLAKE3 of all its bytes, 64 hexadecimal digits.
        entries: How many it holds.
        run_id, attempt: Whose they are.
        first_rollout, last_rollout: Between which they lie; -1 is what belongs to no rollout.
    """

    path: str
    bytes: int
    digest: str
    entries: int
    run_id: str
    attempt: int
    first_rollout: int
    last_rollout: int

    def may_hold(self, key: CaptureKey) -> bool:
        """Whether the entry of a key lies in its range."""
        return (self.run_id, self.attempt) == (key.run_id, key.attempt) and (
            self.first_rollout <= rollout_of(key) <= self.last_rollout
        )


class Root(NamedTuple):
    """One snapshot: its number, and the segments that it names."""

    number: int = 0
    segments: tuple[Segment, ...] = ()


def rollout_of(key: CaptureKey) -> int:
    """The rollout of a key as segments count them."""
    return -1 if key.rollout_id is None else key.rollout_id


def dump_root(root: Root) -> bytes:
    """The root as the bytes of its file."""
    segments = [segment._asdict() for segment in root.segments]
    return dump_signed({"format": _FORMAT, "number": root.number, "segments": segments})


def load_root(data: bytes, path: str) -> Root:
    """Read the bytes of a root's file.

    Raises:
        DatasetError: Damaged, of a newer format, or not the root that its path names.
    """
    tree = load_signed(data, path)
    try:
        version = exact.whole(tree["format"])
        if version > _FORMAT:
            raise DatasetError(
                f"{path}: format {version}, expected at most {_FORMAT}",
                hint="Upgrade trajreplay to read this lake.",
                path=path,
            )
        segments = tuple(_segment(exact.tree(one)) for one in exact.array(tree["segments"]))
        root = Root(exact.whole(tree["number"]), segments)
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{path}: no root of a snapshot: {error!r}", path=path) from error
    if root_path(root.number) != path:
        raise DatasetError(
            f"{path}: holds the root of snapshot {root.number}",
            hint="The file was renamed or copied; remove it: the manifest's entries hold it all.",
            path=path,
        )
    return root


def _segment(tree: dict[str, object]) -> Segment:
    rollouts = tree["first_rollout"], tree["last_rollout"]
    first, last = (-1 if one == -1 else exact.whole(one) for one in rollouts)
    return Segment(
        exact.text(tree["path"]),
        exact.whole(tree["bytes"]),
        exact.text(tree["digest"]),
        exact.whole(tree["entries"], SEGMENT_ENTRIES),
        check_id("run_id", exact.text(tree["run_id"])),
        exact.whole(tree["attempt"]),
        first,
        last,
    )
