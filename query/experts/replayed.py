"""The trainer's captured choices, held against those of the sampler that it was to replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trajreplay.query.experts.captured import RoutedRows, expert_columns, routed_rows
from trajreplay.query.experts.checks import RouteProblem, route_problems
from trajreplay.query.experts.held import HeldTokens
from trajreplay.query.experts.sides import Generated, SamplePlace, Side
from trajreplay.query.files.reading import read_columns
from trajreplay.query.files.row_identity import SHARD, shards_of
from trajreplay.query.manifest.catalog import Catalog
from trajreplay.query.mismatch.shards import is_cut
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.tables import SAMPLE_TABLES

SAMPLER = "rollout_experts"
# What a stage of the trainer chose, and whose replay it is.
TRAINER_OF = {"prev-logprob": "old_experts", "train": "experts"}
_SOURCE = ("source_attempt", "source_rollout_id", "sample_id")


@dataclass
class Replayed:
    """What was found of one name of the trainer's choices; a row is a token in a layer.

    Args:
        name: `old_experts` or `experts`.
        samples: Samples that were compared.
        without: Samples of which one side has no choices.
        rows: Rows of which both sides have a route.
        differing: Of these, the rows that are not the same experts, in whatever order.
        fallback: Rows of which a side has none, which are left to the trainer's own router.
        layers: Layers that were compared.
        others: Layers of the trainer that the sampler has none of.
        sampled: Layers of the sampler.
        first: Where the first row differs, in words.
    """

    name: str
    samples: int = 0
    without: int = 0
    rows: int = 0
    differing: int = 0
    fallback: int = 0
    layers: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)
    sampled: set[int] = field(default_factory=set)
    first: str = ""

    def take(self, other: Replayed) -> None:
        """Add what was found of other captures."""
        for name in ("samples", "without", "rows", "differing", "fallback"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("layers", "others", "sampled"):
            getattr(self, name).update(getattr(other, name))
        self.first = self.first or other.first

    def hold(self, place: str, total: int, mine: Side, theirs: Side, own: Any = None) -> None:
        """Compare one sample.

        A replay hands routes on whatever weights sampled them, and of prompts too, so that every
        token counts but the last, which is never fed to the model.

        Args:
            place: The capture and sample, in words.
            total: Tokens of the sample.
            mine: What the trainer has of it.
            theirs: What the sampler has.
            own: (T,) bool. The positions that this rank computed, where it holds a shard; at the
                others it may have no route.

        Raises:
            DatasetError: They are of other numbers of experts a token, or of layers that nobody
                numbered and that are not as many.
        """
        if mine.experts is None or theirs.experts is None:
            self.without += 1
            return
        self._check_forms(place, mine, theirs)
        common = [one for one in mine.layers if one in theirs.layers]
        self.layers.update(common)
        self.others |= set(mine.layers) - set(common)
        self.sampled.update(theirs.layers)
        count = min(len(mine.experts), len(theirs.experts), max(total - 1, 0))
        left, right = (
            np.sort(one.experts[:count, [one.layers.index(layer) for layer in common]], 2)
            for one in (mine, theirs)
        )
        self.samples += 1
        known = (left[:, :, :1] >= 0).all(2) & (right[:, :, :1] >= 0).all(2)
        differs = (left != right).any(2) & known
        self.rows += int(known.sum())
        lacks = ~known if own is None else ~known & own[:count, None]
        self.fallback += int(lacks.sum())
        self.differing += int(differs.sum())
        if not self.first and differs.any():
            token, layer = divmod(int(differs.argmax()), differs.shape[1])
            self.first = (
                f"{self.name} of {place}, position {token}, layer {common[layer]}: "
                f"{left[token, layer].tolist()}, expected {right[token, layer].tolist()} of the "
                "sampler"
            )

    def _check_forms(self, place: str, mine: Side, theirs: Side) -> None:
        """Refuse choices of which no layer of one side is known to be which of the other."""
        sizes = [one.experts.shape[2] for one in (mine, theirs)]
        if sizes[0] != sizes[1]:
            raise DatasetError(
                f"{place}: {self.name} are {sizes[0]} experts a token, {SAMPLER} are {sizes[1]}",
                hint="They are of different models, or one was cut: nothing is compared.",
            )
        if mine.layers != theirs.layers and not (mine.numbered and theirs.numbered):
            counts = [len(one.layers) for one in (mine, theirs)]
            unnumbered = SAMPLER if mine.numbered else self.name
            raise DatasetError(
                f"{place}: {self.name} are of {counts[0]} layers and {SAMPLER} of {counts[1]}, and "
                f"layer_numbers of {unnumbered} are not recorded, so that nobody knows which is "
                "which",
                hint="Record layer_numbers with the choices of both sides.",
            )


class ReplayedReading:
    """Reads trainer's and sampler's choices of the captures of a lake.

    Args:
        catalog: The lake.
        names: Which of the trainer's choices.

    Attributes:
        givers: The captures of rollouts from which the sampler's choices were taken.
    """

    def __init__(self, catalog: Catalog, names: Sequence[str]) -> None:
        self._catalog, self._names = catalog, tuple(names)
        self._generated = Generated(catalog, SAMPLER, "rollout_log_probs")
        self.givers: set[CaptureKey] = set()

    def held(self, entry: Entry) -> tuple[str, ...]:
        """Which of the trainer's choices a capture holds."""
        return tuple(one for one in self._names if one in expert_columns(entry))

    def of(self, entry: Entry, place: str) -> tuple[list[Replayed], list[RouteProblem]]:
        """What a capture says of each name that it holds, and which of its routes are none.

        What it lacks of the sampler is read from the rollouts that its samples came from.

        Raises:
            DatasetError: A file is not what its entry says, or the sides cannot be compared.
        """
        found = {name: Replayed(name) for name in self.held(entry)}
        problems = route_problems(self._compared(entry, place, found)) if found else []
        return list(found.values()), problems

    def problems(self, key: CaptureKey) -> list[RouteProblem]:
        """Which routes of a rollout's sampler are none."""
        return route_problems(routed_rows(self._catalog.store, self._catalog.entry(key), [SAMPLER]))

    def _compared(
        self, entry: Entry, place: str, found: dict[str, Replayed]
    ) -> Iterator[RoutedRows]:
        """The pieces of a capture, each compared before it is handed on."""
        places: list[SamplePlace | None] | None = None
        held = HeldTokens(self._catalog.store, entry) if is_cut([entry]) else None
        for piece in routed_rows(self._catalog.store, entry, (*found, SAMPLER)):
            own = piece.choices.get(SAMPLER)
            rows = range(len(piece.sample_ids))
            lacking = [row for row in rows if own is None or own.of(row) is None]
            if lacking and places is None:
                places = self._places(entry)
            there = {row: places[piece.start + row] for row in lacking} if places else {}
            # Captures of rollouts are read whole: samples of one come one after another.
            for row in sorted(rows, key=lambda row: _order(there.get(row))):
                theirs = self._theirs(piece, row, there.get(row))
                own_tokens = None if held is None else held.positions(piece.start + row)
                for name, one in found.items():
                    choices = piece.choices[name].of(row)
                    mine = Side(choices, piece.layer_numbers, None, piece.numbered)
                    told = f"{place}, sample {piece.sample_ids[row]}"
                    one.hold(told, int(piece.total[row]), mine, theirs, own_tokens)
            yield piece

    def _theirs(self, piece: RoutedRows, row: int, place: SamplePlace | None) -> Side:
        own = piece.choices.get(SAMPLER)
        choices = None if own is None else own.of(row)
        if choices is not None or place is None:
            return Side(choices, piece.layer_numbers, None, piece.numbered)
        self.givers.add(place.key)
        return self._generated.side(place)

    def _places(self, entry: Entry) -> list[SamplePlace | None]:
        """Where the rollouts have the samples of a capture; nowhere those of a rollout's own."""
        if entry.key.kind != "step":
            return [None] * entry.rows
        table = read_columns(
            self._catalog.store, entry, SAMPLE_TABLES[entry.key.kind], [*_SOURCE, *SHARD]
        )
        source = [table[name].to_pylist() for name in _SOURCE]
        return [
            self._generated.place(entry.key.run_id, *one)
            for one in zip(*source, shards_of(entry, table), strict=True)
        ]


def _order(place: SamplePlace | None) -> tuple[str, int]:
    return ("", 0) if place is None else (str(place.key), place.row)
