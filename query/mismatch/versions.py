"""Which weights sampled and recomputed the tokens of a capture, as its entry says."""

from __future__ import annotations

import pyarrow as pa

from trajreplay.schema.entry import Entry, LogProbOrigin
from trajreplay.schema.tables import SPANS

COLUMN = "weight_versions"
_END = 2**31 - 1  # beyond the tokens of any sample


def version_of(origin: LogProbOrigin | None) -> int | None:
    """The one version of weights that computed a column; None where none is stated."""
    return None if origin is None else origin.weight_version


def holds_spans(entry: Entry) -> bool:
    """Whether samples of a capture say which weights sampled their tokens."""
    return any(COLUMN in file.columns for file in entry.files)


def spanned(spans: pa.Array, versions: pa.Array) -> pa.Array:
    """Spans of weight versions, one over all tokens of a sample that has none.

    Args:
        spans: Of each sample, null where it has none.
        versions: (S,) int64. The weights that sampled a sample, null where nobody says so.
    """
    if not spans.null_count or versions.null_count == len(versions):
        return spans
    both = zip(spans.to_pylist(), versions.to_pylist(), strict=True)
    found = [
        [{"start": 0, "stop": _END, "version": version}]
        if own is None and version is not None
        else own
        for own, version in both
    ]
    return pa.array(found, SPANS)
