"""What is recorded of a stage of one cohort, field by field, and what it should be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.schema.policy import Tolerance
from trajreplay.stages.advantages import compare_estimates, estimated
from trajreplay.stages.block import Block
from trajreplay.stages.compare import Compared, beyond, compare_scalar
from trajreplay.stages.kl import computed_kl
from trajreplay.stages.losses import Scalar, sample_scalars, summed_scalars
from trajreplay.stages.outputs import Recorded, is_stated, recorded_outputs
from trajreplay.stages.rewards import Processed, raw_rewards
from trajreplay.stages.sample_losses import SampleLosses

_LEAST = sys.float_info.min


Key = tuple[str, str]  # a field, and what of it has a value
# Says of a field, and of its recorded and recomputed values, that no bound can save them all.
Hopeless = Callable[[Key, Tensor, Tensor], bool]


@dataclass(frozen=True)
class Values:
    """What is recorded of one field of a stage, and what it should be.

    Args:
        field: The column or scalar.
        per: What has a value: sample, token, or the scalar itself.
        recorded: (E,) float64.
        recomputed: (E,) float64.
        disagree: (E,) bool. Beyond every bound; a NaN agrees with a NaN here.
        counts: (E,) bool. Values that count: those of trainable tokens.
        undecided: How many agree only within the bound that float32 allows.
        places: Where each scalar is from: rank, and micro-batch in brackets; empty otherwise.
        samples: (E,) int64. The packed sample of each value; of scalars -1.
    """

    field: str
    per: str
    recorded: Tensor
    recomputed: Tensor
    disagree: Tensor
    counts: Tensor
    undecided: int
    places: tuple[str, ...]
    samples: Tensor

    @property
    def key(self) -> Key:
        """What tells it from the other values of a stage: a field may be recorded of several."""
        return self.field, self.per


def recompute(
    block: Block,
    stage: str,
    replaced: Mapping[str, Tensor] | None = None,
    *,
    hopeless: Hopeless | None = None,
) -> list[Values]:
    """Recompute one stage of a block of one cohort, and hold what is recorded against it.

    Args:
        block: One cohort, as captured or varied.
        stage: The stage.
        replaced: Columns to read instead of the recorded ones.
        hopeless: Which fields are held against their tolerance alone, and spared the bounds of
            their rounding; scalars, too, where one of them is so far off that no rounding is
            behind it. None where every value gets its bound.

    Returns:
        The fields that were recorded.

    Raises:
        StageError: It cannot be recomputed.
    """
    if stage not in block.cohorts[0].abilities:
        raise StageError(f"{stage} cannot be recomputed under these settings", stage=stage)
    own = dict(replaced or {})
    if stage == "reward.post_process":
        found = Processed(block, raw_rewards(block, own))
        recorded = block.packed.scalars("reward")
        given = (block, stage, "reward", recorded, found.values)
        return [_elements(*given, found.compare, hopeless)]
    if stage == "advantage.kl":
        _, values, compare = computed_kl(block)
        return [_elements(block, stage, "kl", block.packed.tokens("kl"), values, compare, hopeless)]
    if stage == "advantage.estimate":
        made = estimated(block, own)
        names = [one for one in made if one in block.packed.table.column_names]
        return [
            _elements(
                *(block, stage, name, block.packed.tokens(name), made[name]),
                lambda name=name: compare_estimates(block, {name: made[name]}, own)[0],  # type: ignore[misc]
                hopeless,
            )
            for name in names
        ]
    return _scalars(block, stage, own, hopeless)


def _elements(
    block: Block,
    stage: str,
    name: str,
    recorded: Tensor,
    recomputed: Tensor,
    compare: Callable[[], Compared],
    hopeless: Hopeless | None,
) -> Values:
    per_token = block.per_token(name)
    disagree, undecided = None, 0
    if hopeless is not None and hopeless(
        (name, "token" if per_token else "sample"), recorded, recomputed
    ):
        error = (recorded - recomputed).abs_()
        disagree = beyond(error, recomputed, block.tolerance(stage, name))
    else:
        compared = compare()
        disagree = compared.disagree
        undecided = sum(look.undecided for look in compared.looks)
    if disagree is None:
        disagree = torch.zeros(len(recorded), dtype=torch.bool)
    counts = block.packed.mask if per_token else torch.ones(len(recorded), dtype=torch.bool)
    samples = torch.arange(len(block.packed.lengths))
    if per_token:
        samples = samples.repeat_interleave(block.packed.lengths)
    return Values(
        name,
        "token" if per_token else "sample",
        recorded,
        recomputed,
        disagree & ~_same(recorded, recomputed),
        counts,
        undecided,
        (),
        samples,
    )


def _same(recorded: Tensor, recomputed: Tensor) -> Tensor:
    return (recorded == recomputed) | (recorded.isnan() & recomputed.isnan())


@dataclass(frozen=True)
class _Row:
    """What is recorded of one scalar, or of one of each of some samples.

    Args:
        recorded: (K,) float64.
        recomputed: (K,) float64.
        samples: (K,) int64. The packed sample of each; -1 of a scalar over several.
        tolerance: What is a pass.
        compare: Gives those beyond every bound, (K,) bool, and how many agree within one alone.
        places: Where a scalar over several is from.
        scalar: That scalar.
    """

    recorded: Tensor
    recomputed: Tensor
    samples: Tensor
    tolerance: Tolerance
    compare: Callable[[], tuple[Tensor, int]]
    places: tuple[str, ...] = ()
    scalar: Scalar | None = None

    def spared(self) -> tuple[Tensor, int]:
        """The same without a bound."""
        error = (self.recorded - self.recomputed).abs_()
        return beyond(error, self.recomputed, self.tolerance), 0


def _is_wrong(scalars: Iterable[Scalar]) -> bool:
    """Whether one is off by more than any rounding, which no bound has to be made to see."""
    outside = [one for one in scalars if one.divergence.abs_error > _limit(one)]
    # The worst first: it shows most often, and one is enough.
    outside.sort(key=lambda one: -one.divergence.abs_error / max(_limit(one), _LEAST))
    return any(one.divergence.abs_error > one.least_wrong() for one in outside)


def _limit(one: Scalar) -> float:
    return one.tolerance.atol + one.tolerance.rtol * abs(one.divergence.recomputed)


def _scalars(
    block: Block, stage: str, replaced: dict[str, Tensor], hopeless: Hopeless | None
) -> list[Values]:
    losses = SampleLosses(block, stage, replaced)
    by_key: dict[Key, list[_Row]] = {}
    for one in recorded_outputs(block, 0, stage):
        name = one.output.field
        if name not in losses.means or not one.complete or not is_stated(one.output):
            continue
        if one.output.scope == "sample":
            by_key.setdefault((name, "sample"), []).append(_row_of_samples(block, one, losses))
            continue
        for scalar in summed_scalars(block, one, losses):
            label, _, batch = scalar.divergence.field.partition("[")
            row = _row_of_scalar(scalar, one.entry.key.rank, batch)
            by_key.setdefault((label, "scalar"), []).append(row)
    return [_joined(key, rows, hopeless) for key, rows in by_key.items()]


def _row_of_samples(block: Block, one: Recorded, losses: SampleLosses) -> _Row:
    recorded, recomputed, compare = sample_scalars(block, one, losses)

    def compared() -> tuple[Tensor, int]:
        found = compare()
        differs = found.disagree
        none = torch.zeros(len(recorded), dtype=torch.bool)
        return none if differs is None else differs, found.looks[0].undecided

    tolerance = block.tolerance(one.output.stage, one.output.field)
    return _Row(recorded, recomputed, one.samples, tolerance, compared)


def _row_of_scalar(scalar: Scalar, rank: int, batch: str) -> _Row:
    found = scalar.divergence

    def compared() -> tuple[Tensor, int]:
        look = compare_scalar(found, scalar.tolerance, scalar.slack)
        return torch.tensor([bool(look.mismatches)]), look.undecided

    place = "all ranks" if found.rank is None else f"rank {rank}"
    place += f" [{batch}" if batch else ""
    recorded, recomputed = (
        torch.tensor([value], dtype=torch.float64) for value in (found.recorded, found.recomputed)
    )
    samples = torch.tensor([-1])
    return _Row(recorded, recomputed, samples, scalar.tolerance, compared, (place,), scalar)


def _joined(key: Key, rows: list[_Row], hopeless: Hopeless | None) -> Values:
    recorded, recomputed, samples = (
        torch.cat([getattr(row, part) for row in rows])
        for part in ("recorded", "recomputed", "samples")
    )
    spared = hopeless is not None and (
        hopeless(key, recorded, recomputed)
        or _is_wrong([row.scalar for row in rows if row.scalar is not None])
    )
    found = [row.spared() if spared else row.compare() for row in rows]
    differs = torch.cat([one for one, _ in found])
    return Values(
        *(*key, recorded, recomputed, differs & ~_same(recorded, recomputed)),
        torch.ones(len(recorded), dtype=torch.bool),
        sum(count for _, count in found),
        tuple(place for row in rows for place in row.places),
        samples,
    )
