"""What is recorded of a stage of one cohort, field by field, and what it should be."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.stages.advantages import compare_estimates, estimated
from trajreplay.stages.block import Block
from trajreplay.stages.compare import Compared, compare_scalar
from trajreplay.stages.kl import compare_kl
from trajreplay.stages.losses import Scalar, sample_scalars, summed_scalars
from trajreplay.stages.outputs import is_stated, recorded_outputs
from trajreplay.stages.rewards import Processed, raw_rewards
from trajreplay.stages.sample_losses import SampleLosses

_LEAST = sys.float_info.min


Key = tuple[str, str]  # a field, and what of it has a value


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
    quick: bool = False,
) -> list[Values]:
    """Recompute one stage of a block of one cohort, and hold what is recorded against it.

    Args:
        block: One cohort, as captured or varied.
        stage: The stage.
        replaced: Columns to read instead of the recorded ones.
        quick: Whether scalars are spared the bound of their rounding where one of them is so far
            off that no rounding is behind it.

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
        return [_elements(block, "reward", recorded, found.values, found.compare())]
    if stage == "advantage.kl":
        _, values, compared = compare_kl(block)
        return [_elements(block, "kl", block.packed.tokens("kl"), values, compared)]
    if stage == "advantage.estimate":
        made = estimated(block, own)
        names = [one for one in made if one in block.packed.table.column_names]
        looked = compare_estimates(block, {name: made[name] for name in names}, own)
        return [
            _elements(block, name, block.packed.tokens(name), made[name], one)
            for name, one in zip(names, looked, strict=True)
        ]
    return _scalars(block, stage, own, quick=quick)


def _elements(
    block: Block, name: str, recorded: Tensor, recomputed: Tensor, compared: Compared
) -> Values:
    per_token = block.per_token(name)
    disagree = compared.disagree
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
        sum(look.undecided for look in compared.looks),
        (),
        samples,
    )


def _same(recorded: Tensor, recomputed: Tensor) -> Tensor:
    return (recorded == recomputed) | (recorded.isnan() & recomputed.isnan())


_Row = tuple[Tensor, Tensor, Tensor, Tensor, int, list[str]]


def _none() -> float:
    return 0.0


def _is_wrong(scalars: Iterable[Scalar]) -> bool:
    """Whether one is off by more than any rounding, which no bound has to be made to see."""
    outside = [one for one in scalars if one.divergence.abs_error > _limit(one)]
    # The worst first: it shows most often, and one is enough.
    outside.sort(key=lambda one: -one.divergence.abs_error / max(_limit(one), _LEAST))
    return any(one.divergence.abs_error > one.least_wrong() for one in outside)


def _limit(one: Scalar) -> float:
    return one.tolerance.atol + one.tolerance.rtol * abs(one.divergence.recomputed)


def _scalars(block: Block, stage: str, replaced: dict[str, Tensor], *, quick: bool) -> list[Values]:
    losses = SampleLosses(block, stage, replaced)
    given = [
        one
        for one in recorded_outputs(block, 0, stage)
        if one.output.field in losses.means and one.complete and is_stated(one.output)
    ]
    summed = {
        number: list(summed_scalars(block, one, losses))
        for number, one in enumerate(given)
        if one.output.scope != "sample"
    }
    hopeless = quick and _is_wrong(each for found in summed.values() for each in found)
    by_key: dict[Key, list[_Row]] = {}
    for number, one in enumerate(given):
        name = one.output.field
        rank = one.entry.key.rank
        if one.output.scope == "sample":
            recorded, recomputed, compared = sample_scalars(block, one, losses)
            differs = compared.disagree
            if differs is None:
                differs = torch.zeros(len(recorded), dtype=torch.bool)
            undecided = compared.looks[0].undecided
            row: _Row = (recorded, recomputed, differs, one.samples, undecided, [])
            by_key.setdefault((name, "sample"), []).append(row)
            continue
        for scalar in summed[number]:
            found = scalar.divergence
            slack = _none if hopeless else scalar.slack
            look = compare_scalar(found, scalar.tolerance, slack)
            label, _, batch = found.field.partition("[")
            place = "all ranks" if found.rank is None else f"rank {rank}"
            place += f" [{batch}" if batch else ""
            row = (
                torch.tensor([found.recorded], dtype=torch.float64),
                torch.tensor([found.recomputed], dtype=torch.float64),
                torch.tensor([bool(look.mismatches)]),
                torch.tensor([-1]),
                look.undecided,
                [place],
            )
            by_key.setdefault((label, "scalar"), []).append(row)
    made = []
    for (name, per), rows in by_key.items():
        recorded, recomputed, differs, samples = (
            torch.cat([row[part] for row in rows])  # type: ignore[misc]
            for part in range(4)
        )
        made.append(
            Values(
                name,
                per,
                recorded,
                recomputed,
                differs & ~_same(recorded, recomputed),
                torch.ones(len(recorded), dtype=torch.bool),
                sum(row[4] for row in rows),
                tuple(place for row in rows for place in row[5]),
                samples,
            )
        )
    return made
