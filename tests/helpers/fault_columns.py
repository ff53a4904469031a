"""Columns that a step took over wrong, or raw rewards that are not what was scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tests.helpers.healthy_composed import Draw
from trajreplay.stages.faults import Fault
from trajreplay.stages.faults.fault import Handed

Spoil = Callable[[Handed, Draw], Tensor | None]
_OTHERS = ("rollout_log_probs", "old_log_probs", "log_probs", "advantages")


def handed(fault: Fault, draw: Draw) -> Handed | None:
    """A drawn column with a fault put in; None where that changes nothing of it."""
    column = _raw(draw) if fault.stage == "reward.raw" else _tokens(fault, draw)
    spoil = _SPOILED.get(fault.id)
    if spoil is not None:
        recorded = spoil(column, draw)
    else:
        assert fault.hands is not None
        made = [one[0] for one in fault.hands(column)]
        recorded = draw.choose.choice(made) if made else None
    if recorded is None or torch.equal(recorded.float(), column.origin.float()):
        return None
    return replace(column, recorded=recorded.float().double())


def _tokens(fault: Fault, draw: Draw) -> Handed:
    count = draw.choose.randint(2, 8)
    longest = draw.choose.choice([3, 8, 30])
    lengths = torch.tensor([draw.choose.randint(1, longest) for _ in range(count)])
    if draw.choose.random() < 0.5:
        lengths[:] = longest
    size = int(lengths.sum())

    def drawn() -> Tensor:
        return torch.from_numpy(-abs(draw.numbers.normal(0.0, 1.0, size))).float().double()

    mask = torch.from_numpy(draw.numbers.random(size) < 0.7)
    of_mask = fault.id == "handoff.mask" or draw.choose.random() < 0.1
    origin = mask.double() if of_mask else drawn()
    others = {name: drawn() for name in _OTHERS[1:]}
    owns = {name: drawn() for name in _OTHERS[1:]}
    if not of_mask:
        others["loss_mask"] = mask.double()
    name = "loss_mask" if of_mask else _OTHERS[0]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    earlier = {f"log_probs of step {step}": drawn() for step in range(2)}
    return Handed(name, origin, origin, offsets, mask, others, owns, earlier=earlier)


def _raw(draw: Draw) -> Handed:
    count = draw.choose.randint(4, 16)
    parts = torch.from_numpy(draw.numbers.random((count, 2))).float().double()
    origin = parts[:, 0] + 0.5 * parts[:, 1]
    origin[draw.choose.randrange(count)] = 0.0
    others = {
        "the components added up without weights": parts.sum(1),
        "the mean of the components": parts.mean(1),
        "the component answer alone": parts[:, 0],
        "the component format alone": parts[:, 1],
    }
    ranks = torch.arange(count) % draw.choose.choice([1, 2, 3])
    ranks = ranks.sort().values
    return Handed(
        "raw_reward",
        origin,
        origin,
        torch.arange(count + 1),
        torch.ones(count, dtype=torch.bool),
        others,
        {},
        ranks,
    )


def _permuted(given: Handed, draw: Draw) -> Tensor | None:
    """Samples of one length change places."""
    lengths = given.offsets.diff()
    made = given.origin.clone()
    for length in torch.unique(lengths).tolist():
        mine = (lengths == length).nonzero().squeeze(1).tolist()
        order = draw.choose.sample(mine, len(mine))
        for row, other in zip(mine, order, strict=True):
            begin, start = int(given.offsets[row]), int(given.offsets[other])
            made[begin : begin + length] = given.origin[start : start + length]
    return made


def _zeroed(given: Handed, draw: Draw) -> Tensor | None:
    """Values are masked before their order is undone: by the masks of other samples."""
    if draw.choose.random() < 0.5:
        return torch.where(given.mask, given.origin, 0.0)
    other = _permuted(replace(given, origin=given.mask.double()), draw)
    return None if other is None else torch.where(other != 0, given.origin, 0.0)


def _no_score(given: Handed, draw: Draw) -> Tensor:
    return torch.where(given.origin == 0, draw.choose.random() + 0.1, given.origin)


def _by_position(given: Handed, draw: Draw) -> Tensor:
    made = given.origin.clone()
    for rank in torch.unique(given.ranks):
        mine = given.ranks == rank
        made[mine] = given.origin[: int(mine.sum())]
    return made


_SPOILED: Mapping[str, Spoil] = {
    "handoff.permuted": _permuted,
    "handoff.zeroed": _zeroed,
    "raw.zero-as-missing": _no_score,
    "raw.by-position": _by_position,
}
