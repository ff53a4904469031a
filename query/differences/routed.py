"""Captured routes of two runs: where they part first, and in how many tokens, by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from trajreplay.query.differences.align import Alignment
from trajreplay.query.differences.compare import FieldDifference
from trajreplay.query.experts.captured import Experts, expert_columns, routed_rows
from trajreplay.query.manifest.capture_sets import CaptureSet
from trajreplay.query.manifest.catalog import Cohort
from trajreplay.schema.entry import Entry
from trajreplay.schema.store import Store
from trajreplay.schema.tables import EXPERT_LISTS, ROUTES

_STAGE = "sample"
_KEPT = 2  # captures of a side whose routes are in memory at once


def route_seals(one: CaptureSet) -> list[dict[str, str]]:
    """The digests of routes, by rank: equal ones need no reading."""
    files = [entry.file(ROUTES.name) for entry in one.owners]
    return [
        {} if file is None else {name: seal.digest for name, seal in file.columns.items()}
        for file in files
    ]


def compare_routes(
    cohort: Cohort,
    stores: tuple[Store, Store],
    sets: tuple[CaptureSet, CaptureSet],
    alignment: Alignment,
    identity: list[tuple[str, int]],
) -> Iterator[FieldDifference]:
    """Hold the choices of aligned samples against each other, token by token.

    A token differs in a layer where not the same experts stand in the same order; those are
    compared that both sides have. A layer, or the routes of a sample, that one side lacks differ.

    Args:
        cohort: Whose samples.
        stores: The two lakes.
        sets: The two capture sets.
        alignment: Which rows of them are the same sample.
        identity: Sample id and rank of the aligned rows, on the left.
    """
    sides = [_Routed(store, one) for store, one in zip(stores, sets, strict=True)]
    pairs = list(zip(alignment.left, alignment.right, strict=True))
    for name in EXPERT_LISTS:
        if not any(name in side.names for side in sides):
            continue
        layers: dict[int | None, _Layer] = {}
        for number, (mine, theirs) in enumerate(pairs):
            _hold(layers, number, sides[0].of(name, mine), sides[1].of(name, theirs))
        for layer in sorted(layers, key=lambda one: -1 if one is None else one):
            if layers[layer].differing:
                yield layers[layer].difference(cohort, name, layer, len(pairs), identity)


@dataclass
class _Layer:
    """What was found in one layer; None stands for samples that one side has no routes of."""

    tokens: int = 0
    differing: int = 0
    samples: set[int] = field(default_factory=set)
    first: tuple[int, int | None, Any, Any] | None = None

    def add(self, sample: int, differs: Any, left: Any, right: Any) -> None:
        """Take (T,) bool, and (T, K) of each side or None of one without."""
        self.tokens += len(differs)
        count = int(differs.sum())
        if not count:
            return
        self.differing += count
        self.samples.add(sample)
        if self.first is None:
            token = int(differs.argmax())
            shown = [None if one is None else one[token].tolist() for one in (left, right)]
            self.first = (sample, token, shown[0], shown[1])

    def difference(
        self, cohort: Cohort, name: str, layer: int | None, samples: int, identity: Any
    ) -> FieldDifference:
        """What is reported of it."""
        assert self.first is not None
        sample, token, left, right = self.first
        sample_id, rank = identity[sample]
        return FieldDifference(
            cohort.rollout_id,
            cohort.step_id,
            _STAGE,
            name,
            rank,
            None,
            None,
            samples,
            len(self.samples),
            self.tokens,
            self.differing,
            None,
            None,
            sample_id,
            token,
            left,
            right,
            layer,
        )


_Side = tuple[Experts | None, tuple[int, ...]]


def _hold(layers: dict[int | None, _Layer], sample: int, left: _Side, right: _Side) -> None:
    mine, theirs = left[0], right[0]
    if mine is None or theirs is None:
        if (mine is None) != (theirs is None):
            lacking = layers.setdefault(None, _Layer())
            lacking.differing += 1
            lacking.tokens += 1
            lacking.samples.add(sample)
            told = [None if one is None else "routes" for one in (mine, theirs)]
            lacking.first = lacking.first or (sample, None, told[0], told[1])
        return
    count = min(len(mine), len(theirs))
    mine, theirs = mine[:count], theirs[:count]
    for layer in sorted({*left[1], *right[1]}):
        places = [one[1].index(layer) if layer in one[1] else None for one in (left, right)]
        a = None if places[0] is None else mine[:, places[0]]
        b = None if places[1] is None else theirs[:, places[1]]
        if a is None or b is None or a.shape != b.shape:
            differs = np.ones(count, bool)
        else:
            differs = (a != b).any(1)
        layers.setdefault(layer, _Layer()).add(sample, differs, a, b)


class _Routed:
    """The routes of a capture set by the row of a sample, its captures one after another."""

    def __init__(self, store: Store, captures: CaptureSet) -> None:
        self._store = store
        self._entries = list(captures.owners)
        self._ends = np.cumsum([entry.rows for entry in self._entries])
        self.names = {name for entry in self._entries for name in expert_columns(entry)}
        self._read = lru_cache(maxsize=_KEPT)(self._of_entry)

    def of(self, name: str, row: int) -> _Side:
        """(T, L, K) and the numbers of the layers; None of a sample without."""
        place = int(np.searchsorted(self._ends, row, "right"))
        entry: Entry = self._entries[place]
        start = int(self._ends[place]) - entry.rows
        rows = self._read(place, name)
        return rows[row - start] if rows else (None, ())

    def _of_entry(self, place: int, name: str) -> list[_Side]:
        entry = self._entries[place]
        if name not in expert_columns(entry):
            return []
        return [
            (piece.choices[name].of(row), piece.layer_numbers)
            for piece in routed_rows(self._store, entry, [name])
            for row in range(len(piece.sample_ids))
        ]
