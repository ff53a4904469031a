"""What a step's samples have in the rollouts that they came from: choices, log-probs, weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trajreplay.query.experts.captured import expert_columns, routed_rows
from trajreplay.query.files.reading import read_columns
from trajreplay.query.files.row_identity import SHARD, WHOLE, Shard, shards_of
from trajreplay.query.manifest.catalog import Catalog, Cohort
from trajreplay.schema.identity import DATA, CaptureKey
from trajreplay.schema.lists import elements, lengths_of
from trajreplay.schema.tables import ROLLOUTS

_KEPT = 4  # captures of rollouts whose choices are in memory at once
_KEPT_INDEXES = 32


class Side(NamedTuple):
    """What one side has of a sample.

    Args:
        experts: (T, L, K) int16. None where it has none.
        layers: (L,) Their numbers.
        log_probs: (N,) float32. Of its response tokens.
        numbered: Whether the numbers of the layers were recorded, and are not their places.
    """

    experts: Any
    layers: tuple[int, ...]
    log_probs: Any
    numbered: bool = True


class SamplePlace(NamedTuple):
    """Where a generated sample lies, and by which weights it was sampled.

    Args:
        key: The capture.
        row: Its row there.
        spans: Spans of weight versions; None where they are not recorded.
    """

    key: CaptureKey
    row: int
    spans: Sequence[Mapping[str, int]] | None


@dataclass
class Generated:
    """Finds samples in the rollouts of a lake and reads what the sampler has of them.

    Args:
        catalog: The lake.
        choices: The column of the sampler's choices.
        log_probs: The column of its log-probs.
    """

    catalog: Catalog
    choices: str
    log_probs: str

    def __post_init__(self) -> None:
        self._rollout = lru_cache(maxsize=_KEPT_INDEXES)(self._read_places)
        self._sides = lru_cache(maxsize=_KEPT)(self._read_sides)

    def place(
        self, run_id: str, attempt: int, rollout: int, sample_id: str, shard: Shard
    ) -> SamplePlace | None:
        """Where the same shard of a sample lies, else all of it; None where neither was captured.

        Args:
            run_id: The run.
            attempt: The attempt that generated it.
            rollout: Its rollout there.
            sample_id: Its name.
            shard: Which shard of it, as `shards_of` names them.
        """
        places = self._rollout(run_id, attempt, rollout)
        return places.get((sample_id, shard)) or places.get((sample_id, WHOLE))

    def side(self, place: SamplePlace) -> Side:
        """What the sampler has of a sample."""
        return self._sides(place.key)[place.row]

    def _read_places(
        self, run_id: str, attempt: int, rollout: int
    ) -> dict[tuple[str, Shard], SamplePlace]:
        found: dict[tuple[str, Shard], SamplePlace] = {}
        for key in self.catalog.by_cohort.get(Cohort(run_id, attempt, rollout, None), ()):
            entry = self.catalog.entry(key)
            if key.part == DATA and entry.owner and entry.rows:
                wanted = ["sample_id", "weight_versions", *SHARD]
                rows = read_columns(self.catalog.store, entry, ROLLOUTS, wanted)
                names, spans = (rows[name].to_pylist() for name in wanted[:2])
                for row, one in enumerate(zip(names, shards_of(entry, rows), strict=True)):
                    found[one] = SamplePlace(key, row, spans[row])
        return found

    def _read_sides(self, key: CaptureKey) -> list[Side]:
        entry, store = self.catalog.entry(key), self.catalog.store
        lists = Lists(read_columns(store, entry, ROLLOUTS, [self.log_probs])[self.log_probs])
        if self.choices not in expert_columns(entry):
            return [Side(None, (), lists.of(row)) for row in range(entry.rows)]
        return [
            Side(
                piece.choices[self.choices].of(row),
                piece.layer_numbers,
                lists.of(piece.start + row),
                piece.numbered,
            )
            for piece in routed_rows(store, entry, [self.choices])
            for row in range(len(piece.sample_ids))
        ]


class Lists:
    """A column of lists as arrays.

    Args:
        column: The column.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        chunks = column.chunks
        none = np.empty(0, np.int64)
        self._values = np.concatenate(
            [elements(chunk).to_numpy(zero_copy_only=False) for chunk in chunks] or [none]
        )
        self._lengths = np.concatenate([lengths_of(chunk) for chunk in chunks] or [none])
        self._ends = np.cumsum(self._lengths)
        self._valid = np.asarray(column.is_valid())

    def of(self, row: int) -> Any:
        """The list of a row, None of one without."""
        end = self._ends[row]
        return self._values[end - self._lengths[row] : end] if self._valid[row] else None
