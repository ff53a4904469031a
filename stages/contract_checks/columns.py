"""The columns of cohorts as flat arrays, of a whole block or of one, and where a finding points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.schema.columns import has_column
from trajreplay.schema.entry import Entry
from trajreplay.schema.lists import elements
from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.cohort import sample_versions
from trajreplay.stages.cohorts.packed import list_lengths, packed_values
from trajreplay.stages.cohorts.spans import UNKNOWN, Spans
from trajreplay.stages.report import Finding, Severity

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Found = tuple[int, Finding]  # the number of a cohort in its block, and what was found in it


@dataclass
class Columns:
    """The samples of one cohort.

    Args:
        table: Its rows; list columns as long as `response_length` says.
        settings: The arithmetic in force.
        dtypes: dtype in which the producer held each column.
        rollout_id: The rollout that it is, or belongs to.
        stages: Stages that are recomputed.
        entries: The captures, which say where log-probs came from and hold the scalars.
    """

    table: pa.Table
    settings: Settings
    dtypes: dict[str, str]
    rollout_id: int
    stages: Sequence[str] = ()
    entries: Sequence[Entry] = ()

    def __post_init__(self) -> None:
        self._names = frozenset(self.table.column_names)
        self._flat: dict[str, Floats] = {}

    def has(self, *names: str) -> bool:
        """Whether columns were captured of every sample."""
        there = self._names
        return all(one in there and not self.table[one].null_count for one in names)

    def tokens(self, name: str) -> Floats:
        """(N,) A token column; read-only, since one capture's is not copied."""
        if name not in self._flat:
            column = self.table[name]
            if column.num_chunks == 1:
                self._flat[name] = elements(column.chunk(0)).to_numpy(zero_copy_only=False)
            else:
                self._flat[name] = packed_values(column).numpy()
        return self._flat[name]

    def scalars(self, name: str) -> Floats:
        """(S,) float64. A column of one number a sample."""
        return np.asarray(self.table[name].to_numpy(), np.float64)

    @cached_property
    def lengths(self) -> Ints:
        """(S,) Response tokens."""
        return list_lengths(self.table["loss_mask"])

    @cached_property
    def offsets(self) -> Ints:
        """(S+1,) Where the tokens of each sample begin."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def owners(self, places: Ints) -> Ints:
        """(K,) The samples of packed tokens."""
        return np.asarray(np.searchsorted(self.offsets, places, side="right") - 1, np.int64)

    @cached_property
    def mask(self) -> Flags:
        """(N,) Trainable tokens."""
        return np.asarray(packed_values(self.table["loss_mask"]).numpy() != 0)

    @cached_property
    def ranks(self) -> Ints:
        """(S,) The rank of each sample."""
        return np.asarray(self.table["rank"].to_numpy(), np.int64)

    def version_of(self, name: str) -> Ints | None:
        """(S,) The weights that computed a column of log-probs; None where a rank does not say.

        A rank without samples has nothing to say.
        """
        found = sample_versions(self.entries, self.table, name)
        return None if (found == UNKNOWN).any() else found

    @cached_property
    def spans(self) -> Spans:
        """Which weights sampled which tokens."""
        return Spans.of(self.table["weight_versions"])

    @cached_property
    def sampled_by(self) -> Ints | None:
        """(N,) The weights that sampled each token; None where that is not known of all."""
        if not self.has("weight_versions"):
            return None
        found = self.spans.by_token(self.offsets)
        return None if (found == UNKNOWN).any() else found

    @cached_property
    def groups(self) -> Ints:
        """(S,) The group of each sample, numbered; of several rollouts each its own."""
        names = [one for one in _GROUP if self.has(one)]
        rows = list(zip(*(self.table[one].to_pylist() for one in names), strict=True))
        numbers = {row: number for number, row in enumerate(dict.fromkeys(rows))}
        return np.array([numbers[row] for row in rows], np.int64)

    def finding(
        self,
        check: str,
        severity: Severity,
        message: str,
        *,
        sample: int | None = None,
        token: int | None = None,
        stage: str = "sample",
    ) -> Finding:
        """A finding at a sample, or at one of its tokens, which counts from its beginning."""
        name = None if sample is None else str(self.table["sample_id"][sample].as_py())
        return Finding(check, severity, message, stage=stage, sample_id=name, token=token)

    def at(
        self, check: str, severity: Severity, message: str, place: int, stage: str = "sample"
    ) -> Finding:
        """A finding at a packed token."""
        sample = int(self.owners(np.asarray(place)))
        token = place - int(self.offsets[sample])
        return self.finding(check, severity, message, sample=sample, token=token, stage=stage)


def largest(values: Floats) -> float:
    """The largest of some values, which no NaN hides; -inf of none."""
    found = float(np.maximum.reduce(values, initial=-np.inf))
    return found if found == found else float(np.fmax.reduce(values))


_GROUP = ("source_attempt", "source_rollout_id", "group_id")


class Together:
    """The samples of all cohorts of a block, which have the same columns and settings.

    Args:
        block: The cohorts.

    Attributes:
        spans: Where the tokens of each cohort begin and end.
        masked: (K,) Where the tokens lie that are not trained.
    """

    def __init__(self, block: Block) -> None:
        self.block, self.packed = block, block.packed
        self.settings, self.dtypes, self.stages = block.settings, block.dtypes, block.stages
        self.spans = list(pairwise(self.packed.token_bounds))
        self.offsets: Ints = self.packed.offsets.numpy()
        self.lengths: Ints = self.packed.lengths.numpy()
        self.mask: Flags = self.packed.mask.numpy()
        self.masked: Ints = self.packed.masked.numpy()
        self._one: dict[int, Columns] = {}

    def has(self, *names: str) -> bool:
        """Whether columns were captured of every sample of every cohort."""
        table = self.packed.table
        return all(has_column(table, name) and not table[name].null_count for name in names)

    def finite(self, *names: str) -> bool:
        """Whether columns are known to hold neither NaN nor infinities."""
        return all(name in one.finite for one in self.block.cohorts for name in names)

    def tokens(self, name: str) -> Floats:
        """(N,) A token column, packed, as it was stored."""
        return self.packed.stored(name).numpy()

    def scalars(self, name: str) -> Floats:
        """(S,) float64. A column of one number a sample."""
        return self.packed.scalars(name).numpy()

    def trained(self, places: Ints) -> Ints:
        """Those of some packed tokens that are trained."""
        return places[self.mask[places]] if len(self.masked) else places

    def owners(self, places: Ints) -> Ints:
        """(K,) The samples of packed tokens."""
        return np.asarray(np.searchsorted(self.offsets, places, side="right") - 1, np.int64)

    def by_cohort(self, places: Ints, *, samples: bool = False) -> Iterator[tuple[int, Ints]]:
        """The cohorts that some packed tokens, or samples, are of, each with its own.

        Args:
            places: Ascending.
            samples: Whether they are samples.
        """
        if not len(places):
            return
        bounds = self.packed.sample_bounds if samples else self.packed.token_bounds
        cuts = np.searchsorted(places, bounds).tolist()
        for index, (start, stop) in enumerate(pairwise(cuts)):
            if start < stop:
                yield index, places[start:stop]

    def of(self, index: int) -> Columns:
        """The columns of one cohort alone."""
        if index not in self._one:
            cohort = self.block.cohorts[index]
            rollout_id = cohort.report.rollout_id
            self._one[index] = Columns(
                cohort.table, self.settings, cohort.dtypes, rollout_id, self.stages, cohort.owners
            )
        return self._one[index]

    def each(self, check: Callable[[Columns], Iterator[Finding]]) -> Iterator[Found]:
        """What a check finds in each cohort alone."""
        for index in range(len(self.spans)):
            for finding in check(self.of(index)):
                yield index, finding

    def about(
        self,
        index: int,
        check: str,
        severity: Severity,
        message: str,
        sample: int,
        stage: str = "sample",
        *,
        token: int | None = None,
    ) -> Found:
        """A finding in a cohort, at a packed sample."""
        name = self.packed.text("sample_id", sample)
        return index, Finding(check, severity, message, stage=stage, sample_id=name, token=token)

    def at(self, index: int, check: str, severity: Severity, message: str, place: int) -> Found:
        """A finding in a cohort, at a packed token."""
        sample = int(self.owners(np.asarray(place)))
        token = place - int(self.offsets[sample])
        return self.about(index, check, severity, message, sample, token=token)
