"""Stages by the arithmetic of one dtype, and how many of the recorded bits that has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trajreplay.schema.columns import has_column
from trajreplay.schema.errors import TrajReplayError
from trajreplay.stages.advantages.estimate import estimated
from trajreplay.stages.advantages.kl import computed_kl
from trajreplay.stages.block import Block
from trajreplay.stages.compose.plain_sums import ORDERS
from trajreplay.stages.counterfactuals.sparing import same
from trajreplay.stages.counterfactuals.variants import COMPUTED
from trajreplay.stages.losses.sample_losses import SampleLosses
from trajreplay.stages.losses.scalars import plain_scalar
from trajreplay.stages.outputs import is_stated, recorded_outputs, sample_values
from trajreplay.stages.rewards.post_process import Processed, raw_rewards

_WIDE = ("float32", "float64")
_NARROW = ("bfloat16", "float16")
_Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Evaluated:
    """What a stage is by one arithmetic, beside what was recorded of it.

    Args:
        arithmetic: The dtype, and the order of sums where that is tried.
        same: Recorded values whose very bits it gives, rounded to the dtype that they were held in.
        values: Recorded values.
        max_error: The largest error of the others; NaN where one is not finite.
    """

    arithmetic: str
    same: int
    values: int
    max_error: float

    def with_(self, other: Evaluated) -> Evaluated:
        """The same of this cohort and of another one."""
        worst = (self.max_error, other.max_error)
        error = float("nan") if any(one != one for one in worst) else max(worst)
        counts = self.same + other.same, self.values + other.values
        return Evaluated(self.arithmetic, *counts, error)


def evaluations(block: Block, stage: str) -> list[Evaluated]:
    """Recompute a stage of one cohort in float32, float64, and dtypes that it was recorded in.

    A loss is summed in float32 in several orders, too. A narrower dtype is tried where a column
    that the stage reads or writes was held in it: its inputs are rounded to it, and each operation
    on a token is.

    Args:
        block: One cohort.
        stage: The stage.

    Returns:
        Each arithmetic that can be had; none of stages that are looked up and not computed.
    """
    if stage not in COMPUTED:
        return []
    used = (*block.cohorts[0].abilities[stage].reads, *block.cohorts[0].abilities[stage].writes)
    held = {block.dtypes.get(name, "float32") for name in used}
    found = []
    for dtype in (*_WIDE, *(one for one in _NARROW if one in held)):
        of_loss = stage.startswith("loss.") and dtype == "float32"
        for order in ORDERS if of_loss else ("",):
            try:
                with np.errstate(all="ignore"):
                    pairs = list(_pairs(block, stage, getattr(torch, dtype), order))
            except (TrajReplayError, RuntimeError, TypeError):
                continue  # torch has no such operation in this dtype, or a user's kernel has none
            label = f"{dtype} with sums {order}" if order else dtype
            found += [_held_against(label, pairs)] if pairs else []
    return found


def _pairs(block: Block, stage: str, dtype: torch.dtype, order: str) -> Iterator[_Pair]:
    """What is recorded, and what it is by an arithmetic, of what counts."""
    if stage.startswith("loss."):
        yield from _scalars(block, stage, dtype, order)
        return
    if stage == "reward.post_process":
        columns = {"reward": Processed(block, raw_rewards(block)).evaluated(dtype)}
    elif stage == "advantage.kl":
        columns = {"kl": computed_kl(block).evaluated(dtype)}
    else:
        made = estimated(block, {}, dtype)
        columns = {
            name: block.as_recorded(name, values)
            for name, values in made.items()
            if has_column(block.packed.table, name)
        }
    for name, values in columns.items():
        recorded = block.column(name)
        counts = block.packed.mask if block.per_token(name) else slice(None)
        yield recorded[counts], values[counts]


def _scalars(block: Block, stage: str, dtype: torch.dtype, order: str) -> Iterator[_Pair]:
    """Recorded scalars, and what they are: float32 holds them as it holds what a trainer logs."""
    losses = SampleLosses(block, stage, {})
    plain = losses.plain(dtype, order or next(iter(ORDERS)))
    for one in recorded_outputs(block, 0, stage):
        name = one.output.field
        if name not in losses.means or not one.complete or not is_stated(one.output):
            continue
        if one.output.scope == "sample":
            recorded = sample_values(block, one)
            values = plain.samples(name, one.samples, one.output)
        else:
            pair = zip(
                (one.output.value, one.output.numerator),
                plain_scalar(losses, one, plain),
                strict=True,
            )
            both = [(was, now) for was, now in pair if was is not None and now == now]
            recorded, values = torch.tensor(both, dtype=torch.float64).reshape(-1, 2).unbind(1)
        fits = bool(same(recorded.float().double(), recorded).all())
        yield recorded, values.float().double() if fits else values


def _held_against(arithmetic: str, pairs: list[_Pair]) -> Evaluated:
    recorded, values = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    alike = same(recorded, values)
    error = (recorded - values).abs()[~alike]
    return Evaluated(
        arithmetic, int(alike.sum()), len(alike), float(error.max()) if len(error) else 0.0
    )
