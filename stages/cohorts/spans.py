"""Which weights sampled which tokens: the spans of responses, unpacked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trajreplay.schema.lists import Int64s, elements, lengths_of

UNKNOWN = -1  # no version: those that are counted are 0 or more


@dataclass(frozen=True)
class Spans:
    """The spans of some samples, one after another.

    Args:
        owner: (K,) int64. The sample of each.
        start: (K,) int64. The first token of its response.
        stop: (K,) int64. The token after its last.
        version: (K,) int64. The weights that sampled it.
    """

    owner: Int64s
    start: Int64s
    stop: Int64s
    version: Int64s

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> Spans:
        """Those of a column of lists; a null one has none."""
        rows = column.combine_chunks()
        if isinstance(rows, pa.ChunkedArray):
            rows = pa.concat_arrays(rows.chunks) if rows.num_chunks else pa.array([], rows.type)
        if not len(rows):
            return cls(*(np.zeros(0, np.int64) for _ in range(4)))
        spans = elements(rows)
        start, stop, version = (
            np.asarray(spans.field(name).to_numpy(), np.int64)
            for name in ("start", "stop", "version")
        )
        owner = np.repeat(np.arange(len(rows)), lengths_of(rows))
        return cls(owner, start, stop, version)

    def by_token(self, offsets: Int64s) -> Int64s:
        """(N,) int64. The weights that sampled each token; UNKNOWN where no span says, or two do.

        Args:
            offsets: (S+1,) int64. Where the tokens of each sample begin, and N.
        """
        lengths = np.diff(offsets)[self.owner]
        start, stop = (np.clip(one, 0, lengths) for one in (self.start, self.stop))
        counts = np.maximum(stop - start, 0)
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.repeat(offsets[self.owner] + start, counts) + inside
        found = np.full(offsets[-1], UNKNOWN, np.int64)
        found[places] = np.repeat(self.version, counts)
        found[np.bincount(places, minlength=len(found)) > 1] = UNKNOWN
        return found
