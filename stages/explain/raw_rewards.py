"""Explaining raw rewards: what became of a score, or of the components of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trajreplay.query import Cohort
from trajreplay.stages.block import Block
from trajreplay.stages.compose import summed_components, summed_tokens
from trajreplay.stages.explain.explanation import Explanation
from trajreplay.stages.explain.handoffs import explain_column
from trajreplay.stages.faults import Fault
from trajreplay.stages.faults.fault import Handed
from trajreplay.stages.outputs import recorded_outputs, sample_values
from trajreplay.stages.rewards.raw import COMPONENTS, STAGE, TOKENS, components

_ECHOES = ("raw_reward", "raw_rewards")


def explain_raw_rewards(
    block: Block, place: Cohort, faults: Sequence[Fault]
) -> Iterator[Explanation]:
    """Search what reproduces raw rewards that are not what was recorded beside them.

    Args:
        block: One cohort, whole.
        place: Its coordinates.
        faults: The catalogue.
    """
    if "raw_reward" not in block.packed.table.column_names:
        return
    used = block.packed.scalars("raw_reward")
    for origin, others in _origins(block, used):
        given = Handed(
            "raw_reward",
            used,
            origin,
            torch.arange(len(used) + 1),
            torch.ones(len(used), dtype=torch.bool),
            others,
            {},
            torch.from_numpy(block.packed.ranks.copy()),
        )
        found = explain_column(given, STAGE, place, faults)
        odd = ~(used - origin).isfinite()
        if bool(odd.any()) and not found.hypotheses:
            _without_numbers(found, used - origin, odd)
        if found.differ:
            yield found


def _without_numbers(found: Explanation, gap: Tensor, odd: Tensor) -> None:
    """Say of values that are no numbers that they are none: they differ by no number."""
    rest = gap[~odd].abs()
    found.misses_by = float(rest.max()) if len(rest) else 0.0
    if not found.misses_by:
        found.note = (
            f"no known fault: {int(odd.sum())} of {len(odd)} raw rewards, or what was recorded "
            "beside them, are not finite, and the others agree"
        )


def _origins(block: Block, used: Tensor) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """What the raw rewards should be: scores that were received, or sums of parts."""
    echoed = used.clone()
    there = False
    for one in recorded_outputs(block, 0, STAGE):
        if one.output.field in _ECHOES and one.output.values is not None:
            echoed[one.samples], there = sample_values(block, one), True
    if there:
        yield echoed, {}
    names = block.packed.table.column_names
    settings = block.settings.reward
    if settings.weights and COMPONENTS in names:
        values = components(block)
        others = {
            "the components added up without weights": values.sum(1),
            "the mean of the components": values.mean(1),
            "the weighted components, missing ones as 0": summed_components(
                settings, values.nan_to_num(nan=0.0)
            ),
        }
        for number, name in enumerate(settings.weights):
            others[f"the component {name} alone"] = values[:, number]
        yield summed_components(settings, values), others
    elif TOKENS in names and settings.rule == "normalise" and not settings.weights:
        values, offsets = block.packed.tokens(TOKENS), block.packed.offsets
        last = torch.zeros_like(used)
        held = block.packed.lengths > 0
        last[held] = values[offsets[1:][held] - 1]
        yield summed_tokens(values, offsets), {"the reward of the last token": last}
