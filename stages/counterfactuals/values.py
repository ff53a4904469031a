"""What is recorded of a stage of one cohort, field by field, and what it should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from trajreplay.schema.columns import has_column
from trajreplay.schema.errors import StageError
from trajreplay.stages.advantages.estimate import compare_estimates, estimated
from trajreplay.stages.advantages.kl import computed_kl
from trajreplay.stages.block import Block
from trajreplay.stages.compare import Compared, compare_scalar
from trajreplay.stages.counterfactuals.sparing import Hopeless, Key, Row, Values, judged
from trajreplay.stages.losses.sample_losses import SampleLosses
from trajreplay.stages.losses.scalars import Scalar, sample_scalars, summed_scalars
from trajreplay.stages.outputs import Recorded, is_stated, recorded_outputs
from trajreplay.stages.rewards.post_process import Processed, raw_rewards


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
        hopeless: Says which fields no bound saves; where there is one, values are held against
            their tolerance alone, which is far less work. None where every value gets its bound.

    Returns:
        The fields that were recorded.

    Raises:
        StageError: It cannot be recomputed.
    """
    if stage not in block.cohorts[0].abilities:
        raise StageError(f"{stage} cannot be recomputed under these settings", stage=stage)
    own = dict(replaced or {})
    if stage.startswith("loss."):
        return judged(_scalars(block, stage, own), hopeless)
    fields: dict[Key, list[Row]] = {}
    for name, (recomputed, compare) in _columns(block, stage, own).items():
        per_token = block.per_token(name)
        samples = torch.arange(len(block.packed.lengths))
        if per_token:
            samples = samples.repeat_interleave(block.packed.lengths)
        row = Row(
            block.packed.tokens(name) if per_token else block.packed.scalars(name),
            recomputed,
            samples,
            block.tolerance(stage, name),
            partial(_of_column, compare),
            block.packed.mask if per_token else None,
        )
        fields[name, "token" if per_token else "sample"] = [row]
    return judged(fields, hopeless)


def _columns(
    block: Block, stage: str, replaced: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Callable[[], Compared]]]:
    """By column that a stage recorded, what it should be, and what compares the two."""
    if stage == "reward.post_process":
        found = Processed(block, raw_rewards(block, replaced))
        return {"reward": (found.values, found.compare)}
    if stage == "advantage.kl":
        kl = computed_kl(block)
        return {"kl": (kl.values, kl.compare)}
    made = estimated(block, replaced)

    def compared(name: str) -> Compared:
        return compare_estimates(block, {name: made[name]}, replaced)[0]

    return {
        name: (values, partial(compared, name))
        for name, values in made.items()
        if has_column(block.packed.table, name)
    }


def _of_column(compare: Callable[[], Compared]) -> tuple[Tensor | None, int]:
    found = compare()
    return found.disagree, sum(look.undecided for look in found.looks)


def _scalars(block: Block, stage: str, replaced: dict[str, Tensor]) -> dict[Key, list[Row]]:
    losses = SampleLosses(block, stage, replaced)
    fields: dict[Key, list[Row]] = {}
    for one in recorded_outputs(block, 0, stage):
        name = one.output.field
        if name not in losses.means or not one.complete or not is_stated(one.output):
            continue
        if one.output.scope == "sample":
            fields.setdefault((name, "sample"), []).append(_of_samples(block, one, losses))
            continue
        for scalar in summed_scalars(block, one, losses):
            label, _, batch = scalar.divergence.field.partition("[")
            row = _of_several(scalar, one.entry.key.rank, batch)
            fields.setdefault((label, "scalar"), []).append(row)
    return fields


def _of_samples(block: Block, one: Recorded, losses: SampleLosses) -> Row:
    recorded, recomputed, compare = sample_scalars(block, one, losses)
    tolerance = block.tolerance(one.output.stage, one.output.field)
    return Row(recorded, recomputed, one.samples, tolerance, partial(_of_column, compare))


def _of_several(scalar: Scalar, rank: int, batch: str) -> Row:
    found = scalar.divergence

    def compare() -> tuple[Tensor | None, int]:
        look = compare_scalar(found, scalar.tolerance, scalar.slack)
        return torch.tensor([bool(look.mismatches)]), look.undecided

    place = "all ranks" if found.rank is None else f"rank {rank}"
    place += f" [{batch}" if batch else ""
    recorded, recomputed = (
        torch.tensor([value], dtype=torch.float64) for value in (found.recorded, found.recomputed)
    )
    samples = torch.tensor([-1])
    return Row(
        recorded,
        recomputed,
        samples,
        scalar.tolerance,
        compare,
        places=(place,),
        scalar=scalar,
    )
