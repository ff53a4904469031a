"""The response tokens of captures of which both sampler's and trainer's choices are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trajreplay.query.experts.captured import Experts, RoutedRows, expert_columns, routed_rows
from trajreplay.query.experts.held import HeldTokens, PairedRows, check_shards
from trajreplay.query.experts.sides import Generated, Lists, SamplePlace, Side
from trajreplay.query.files.reading import read_columns
from trajreplay.query.files.row_identity import SHARD, shards_of
from trajreplay.query.manifest.capture_sets import CaptureSet
from trajreplay.query.manifest.catalog import Catalog
from trajreplay.query.mismatch.pair import Origins, Pair
from trajreplay.query.mismatch.shards import is_cut
from trajreplay.query.mismatch.versions import version_of
from trajreplay.query.selecting.row_masks import Mask, SelectedSet
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError, QueryError
from trajreplay.schema.tables import SAMPLE_TABLES

# Whose choices belong to a column of log-probs: those of the forward pass that made it.
EXPERTS_OF = {
    "rollout_log_probs": "rollout_experts",
    "old_log_probs": "old_experts",
    "log_probs": "experts",
}
_SOURCE = ("source_attempt", "source_rollout_id", "sample_id")


class PairedTokens(NamedTuple):
    """Trained response tokens of some samples.

    Args:
        delta: (N,) float64. |trainer - sampler| of their log-probs.
        trainer, sampler: (N, L, K) int16. The choices where the token was predicted.
        layers: (L,) Their numbers.
    """

    delta: np.ndarray[Any, np.dtype[np.float64]]
    trainer: Experts
    sampler: Experts
    layers: tuple[int, ...]


@dataclass
class PairedReading:
    """Reads the tokens of one run, and counts what could not be compared.

    Args:
        catalog: The lake.
        pair: The columns of log-probs, which say whose choices are compared.
        any_version: Whether tokens count that other weights sampled than recomputed them.
    """

    catalog: Catalog
    pair: Pair
    any_version: bool = False
    samples_without: int = 0
    of_other_version: int = 0
    of_unknown_version: int = 0

    def __post_init__(self) -> None:
        unknown = [one for one in self.pair.columns if one not in EXPERTS_OF]
        if unknown:
            raise QueryError(
                f"no choices of experts belong to {unknown[0]}, expected a pair out of "
                f"{', '.join(EXPERTS_OF)}"
            )
        self.origins = Origins(self.pair)
        self.names = tuple(EXPERTS_OF[one] for one in self.pair.columns)  # trainer, sampler
        self._generated = Generated(self.catalog, self.names[1], self.pair.sampler)

    def level(self, sets: Sequence[CaptureSet]) -> str:
        """Steps, if any of them holds the trainer's choices; else rollouts."""
        held = any(
            self.names[0] in expert_columns(entry)
            for one in sets
            if one.kind == "step"
            for entry in one.owners
        )
        return "step" if held else "rollout"

    def tokens(self, chosen: SelectedSet) -> Iterator[PairedTokens]:
        """The tokens of a capture set, some samples at a time.

        Raises:
            DatasetError: A file is not what its entry says, a column is a copy of the other, or
                the two sides choose other numbers of experts or have no layer in common.
        """
        check_shards(self.catalog.store, chosen)
        for entry in chosen.captures.owners:
            if entry.key.rank not in chosen.rows or not entry.rows:
                continue
            mask: Mask = chosen.rows[entry.key.rank]
            rows = np.ones(entry.rows, bool) if mask is None else np.asarray(mask)
            if self.names[0] not in expert_columns(entry) or not self._holds_trainer(entry):
                self.samples_without += int(rows.sum())
                continue
            yield from self._of_entry(entry, rows)

    def _holds_trainer(self, entry: Entry) -> bool:
        file = entry.file(SAMPLE_TABLES[entry.key.kind].name)
        return file is not None and self.pair.trainer in file.columns

    def _of_entry(self, entry: Entry, chosen: Any) -> Iterator[PairedTokens]:
        origin = self.origins.add(self.pair.trainer, entry)
        version = None if origin is None or self.any_version else origin.weight_version
        names = [self.pair.trainer, self.pair.sampler, "loss_mask", "weight_versions"]
        table = SAMPLE_TABLES[entry.key.kind]
        step = entry.key.kind == "step"
        columns = [*names, *(_SOURCE if step else ["sample_id"]), *SHARD]
        samples = read_columns(self.catalog.store, entry, table, columns)
        held = HeldTokens(self.catalog.store, entry) if is_cut([entry]) else None
        shards = list(shards_of(entry, samples)) if step else []
        if version_of(origin) is None and samples["weight_versions"].null_count < len(samples):
            self.origins.trainer_unversioned = True
        for piece in routed_rows(self.catalog.store, entry, self.names):
            part = samples.slice(piece.start, len(piece.sample_ids))
            rows = PairedRows(piece, part, shards[piece.start :], held)
            yield from self._of_piece(rows, chosen, version)

    def _of_piece(
        self, rows: PairedRows, chosen: Any, version: int | None
    ) -> Iterator[PairedTokens]:
        piece, samples = rows.piece, rows.samples
        lists = {name: Lists(samples[name]) for name in (*self.pair.columns, "loss_mask")}
        parts: dict[tuple[int, ...], list[tuple[Any, Experts, Experts]]] = {}
        for row in range(len(piece.sample_ids)):
            if not chosen[piece.start + row]:
                continue
            sides = self._sides(rows, lists, row)
            if sides is None:
                continue
            mine, theirs = sides
            kept = lists["loss_mask"].of(row) != 0
            if rows.held is not None:  # another rank has the others
                kept &= rows.held.mask(piece.start + row)
            # The token at a position is predicted where the one before it is computed.
            first = int(piece.total[row] - piece.response[row]) - 1
            kept[: max(-first, 0)] = False
            if version is not None:
                kept = self._of_version(kept, self._spans(rows, row), version)
            places = np.flatnonzero(kept)
            delta = np.abs(mine.log_probs[places].astype(np.float64) - theirs.log_probs[places])
            places += first
            left, right, layers = self._aligned(piece, mine, theirs, places)
            parts.setdefault(layers, []).append((delta, left, right))
        for layers, found in parts.items():
            delta, left, right = (np.concatenate(one) for one in zip(*found, strict=True))
            yield PairedTokens(delta, left, right, layers)

    def _spans(self, rows: PairedRows, row: int) -> Any:
        """By which weights a sample was sampled, as the step says or else its rollout."""
        entry = rows.piece.entry
        own = rows.samples["weight_versions"][row].as_py()
        place = self._place(rows, row) if own is None else None
        found = own if place is None else place.spans
        if found is not None:
            return found
        givers = [entry] if place is None else [entry, self.catalog.entry(place.key)]
        told = (version_of(one.origins.get(self.pair.sampler)) for one in givers)
        version = next((one for one in told if one is not None), None)
        return None if version is None else [{"start": 0, "stop": None, "version": version}]

    def _place(self, rows: PairedRows, row: int) -> SamplePlace | None:
        """Where the rollout has a sample that a step consumed."""
        key = rows.piece.entry.key
        if key.kind != "step":
            return None
        attempt, rollout, sample_id = (rows.samples[name][row].as_py() for name in _SOURCE)
        return self._generated.place(key.run_id, attempt, rollout, sample_id, rows.shards[row])

    def _sides(
        self, rows: PairedRows, lists: Mapping[str, Lists], row: int
    ) -> tuple[Side, Side] | None:
        """What trainer and sampler have of one sample; None, and counted, where one lacks."""
        piece = rows.piece
        trainer, sampler = (
            Side(self._own(piece, name, row), piece.layer_numbers, lists[column].of(row))
            for name, column in zip(self.names, self.pair.columns, strict=True)
        )
        if sampler.log_probs is not None:
            self._compare(piece.entry, piece.entry)
        if sampler.experts is None or sampler.log_probs is None:
            place = self._place(rows, row)
            if place is not None:
                sampler = self._filled(piece.entry, sampler, place)
        if any(one is None for one in (*trainer, *sampler)):
            self.samples_without += 1
            return None
        return rows.whole(self.pair.trainer, trainer, row), rows.whole(
            self.pair.sampler, sampler, row
        )

    @staticmethod
    def _own(piece: RoutedRows, name: str, row: int) -> Experts | None:
        return piece.choices[name].of(row) if name in piece.choices else None

    def _compare(self, trainer: Entry, sampler: Entry) -> None:
        """Take note of where the sampler's log-probs come from, beside the trainer's."""
        theirs = self.origins.add(self.pair.sampler, sampler)
        self.origins.compare(trainer.origins.get(self.pair.trainer), theirs)

    def _filled(self, entry: Entry, own: Side, place: SamplePlace) -> Side:
        """What a step lacks of the sampler, taken from the rollout that the sample came from."""
        there = self._generated.side(place)
        if own.log_probs is None and there.log_probs is not None:
            self._compare(entry, self.catalog.entry(place.key))
        if own.experts is None:
            own = own._replace(experts=there.experts, layers=there.layers)
        return own if own.log_probs is not None else own._replace(log_probs=there.log_probs)

    def _aligned(
        self, piece: RoutedRows, mine: Side, theirs: Side, places: Any
    ) -> tuple[Experts, Experts, tuple[int, ...]]:
        """Choices at some positions, of the layers that both sides recorded."""
        left, right = mine.experts[places], theirs.experts[places]
        if left.shape[2] != right.shape[2]:
            raise DatasetError(
                f"capture of {piece.entry.key}: {self.names[0]} are {left.shape[2]} experts a "
                f"token, {self.names[1]} are {right.shape[2]}",
                hint="They are of different models, or one was cut: nothing is compared.",
            )
        if mine.layers == theirs.layers:
            return left, right, mine.layers
        common = sorted(set(mine.layers) & set(theirs.layers))
        if not common:
            raise DatasetError(
                f"capture of {piece.entry.key}: {self.names[0]} and {self.names[1]} have no layer "
                "in common",
                hint="Record layer_numbers where a rank holds only some of the layers.",
            )
        of_left, of_right = ([one.index(n) for n in common] for one in (mine.layers, theirs.layers))
        return left[:, of_left], right[:, of_right], tuple(common)

    def _of_version(self, kept: Any, spans: Any, version: int) -> Any:
        """Leave out tokens that are known to be sampled by other weights."""
        same, unknown = kept.copy(), kept.copy()
        for span in spans or ():
            unknown[span["start"] : span["stop"]] = False
            if span["version"] != version:
                same[span["start"] : span["stop"]] = False
        self.of_other_version += int(kept.sum() - same.sum())
        self.of_unknown_version += int(unknown.sum())
        return same
