"""The trainer's captured choices, held against those of the sampler that it was to replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trajreplay.query.catalog import Catalog
from trajreplay.query.experts.captured import Experts, expert_columns, routed_rows
from trajreplay.query.experts.sides import Generated
from trajreplay.query.reading import read_columns
from trajreplay.query.row_identity import SHARD, shards_of
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
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
        layers: Layers of the trainer that the sampler has none of.
        first: Where the first row differs, in words.
    """

    name: str
    samples: int = 0
    without: int = 0
    rows: int = 0
    differing: int = 0
    fallback: int = 0
    layers: set[int] = field(default_factory=set)
    first: str = ""

    def take(self, other: Replayed) -> None:
        """Add what was found of other captures."""
        for name in ("samples", "without", "rows", "differing", "fallback"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.layers |= other.layers
        self.first = self.first or other.first

    def hold(self, place: str, total: int, mine: _Layered, theirs: _Layered) -> None:
        """Compare one sample.

        A replay hands routes on whatever weights sampled them, and of prompts too, so that every
        token counts but the last, which is never fed to the model.

        Args:
            place: The capture and sample, in words.
            total: Tokens of the sample.
            mine: The trainer's choices, and the numbers of their layers.
            theirs: The sampler's.

        Raises:
            DatasetError: They are of other numbers of experts a token.
        """
        (left, of_left), (right, of_right) = mine, theirs
        if left is None or right is None:
            self.without += 1
            return
        if left.shape[2] != right.shape[2]:
            raise DatasetError(
                f"{place}: {self.name} are {left.shape[2]} experts a token, {SAMPLER} are "
                f"{right.shape[2]}",
                hint="They are of different models, or one was cut: nothing is compared.",
            )
        common = [one for one in of_left if one in of_right]
        self.layers |= set(of_left) - set(common)
        count = min(len(left), len(right), max(total - 1, 0))
        left = np.sort(left[:count, [of_left.index(one) for one in common]], 2)
        right = np.sort(right[:count, [of_right.index(one) for one in common]], 2)
        self.samples += 1
        known = (left[:, :, :1] >= 0).all(2) & (right[:, :, :1] >= 0).all(2)
        differs = (left != right).any(2) & known
        self.rows += int(known.sum())
        self.fallback += int(known.size - known.sum())
        self.differing += int(differs.sum())
        if not self.first and differs.any():
            token, layer = divmod(int(differs.argmax()), differs.shape[1])
            self.first = (
                f"{self.name} of {place}, position {token}, layer {common[layer]}: "
                f"{left[token, layer].tolist()}, expected {right[token, layer].tolist()} of the "
                "sampler"
            )


_Layered = tuple[Experts | None, tuple[int, ...]]


class ReplayedReading:
    """Reads trainer's and sampler's choices of the captures of a lake.

    Args:
        catalog: The lake.
        names: Which of the trainer's choices.
    """

    def __init__(self, catalog: Catalog, names: Sequence[str]) -> None:
        self._catalog, self._names = catalog, tuple(names)
        self._generated = Generated(catalog, SAMPLER, "rollout_log_probs")

    def held(self, entry: Entry) -> tuple[str, ...]:
        """Which of the trainer's choices a capture holds."""
        return tuple(one for one in self._names if one in expert_columns(entry))

    def of(self, entry: Entry, place: str) -> list[Replayed]:
        """What a capture says of each name that it holds; what it lacks of the sampler is read
        from the rollouts that its samples came from.

        Raises:
            DatasetError: A file is not what its entry says, or the sides cannot be compared.
        """
        found = {name: Replayed(name) for name in self.held(entry)}
        for piece in routed_rows(self._catalog.store, entry, (*found, SAMPLER)) if found else ():
            sides = self._sampler(entry, piece)
            for row, (sample_id, theirs) in enumerate(zip(piece.sample_ids, sides, strict=True)):
                for name, one in found.items():
                    mine = piece.choices[name].of(row), piece.layer_numbers
                    one.hold(f"{place}, sample {sample_id}", int(piece.total[row]), mine, theirs)
        return list(found.values())

    def _sampler(self, entry: Entry, piece: Any) -> Iterator[_Layered]:
        own = piece.choices.get(SAMPLER)
        places: Any = None
        for row in range(len(piece.sample_ids)):
            choices = None if own is None else own.of(row)
            if choices is not None or entry.key.kind != "step":
                yield choices, piece.layer_numbers
                continue
            if places is None:
                table = read_columns(
                    self._catalog.store, entry, SAMPLE_TABLES[entry.key.kind], [*_SOURCE, *SHARD]
                )
                shards = list(shards_of(entry, table))
                places = list(
                    zip(*(table[name].to_pylist() for name in _SOURCE), shards, strict=True)
                )
            there = self._generated.place(entry.key.run_id, *places[piece.start + row])
            side = None if there is None else self._generated.side(there)
            yield (None, ()) if side is None else (side.experts, side.layers)
