"""A fault that happened to some ranks and not to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.sparing import Values
from trajreplay.stages.explain.fit import Fit

_NO_RANK = -1


def at_some_ranks(block: Block, base: Sequence[Values], fit: Fit) -> Fit | None:
    """A fit of a fault as one of some ranks alone, where that gives all that is recorded.

    At those ranks it gives every value, and at the others, where it would move values too, the
    settings do.

    Args:
        block: The cohort.
        base: What is recorded, and what the settings give.
        fit: The fault everywhere.

    Returns:
        None where it is none of some ranks.
    """
    places = {one.key: _ranks(block, one) for one in base}
    hit = torch.unique(torch.cat([places[one.key][one.wrong] for one in base]))
    if _NO_RANK in hit.tolist() or not len(hit):
        return None
    elsewhere = False
    for one in base:
        here = torch.isin(places[one.key], hit)
        moved, right = fit.moved_at[one.key], fit.right_at[one.key]
        if bool((here & one.counts & ~right).any()):
            return None
        elsewhere |= bool((moved & ~here).any())
    if not elsewhere:
        return None
    names = ", ".join(map(str, hit.tolist()))
    where = f"at {'rank' if len(hit) == 1 else 'ranks'} {names} alone"
    errors = [
        float((one.recorded - one.recomputed).abs()[~one.wrong & one.counts].nan_to_num().max())
        for one in base
        if bool((~one.wrong & one.counts).any())
    ]
    return replace(fit, agree=fit.values, max_error=max([fit.max_error, *errors]), where=where)


def _ranks(block: Block, one: Values) -> Tensor:
    """(E,) int64. The rank of each value; of a scalar over several ranks none."""
    if one.per != "scalar":
        ranks: Tensor = torch.from_numpy(block.packed.ranks.astype(np.int64))[one.samples]
        return ranks
    words = [place.split()[1] if place.startswith("rank ") else "" for place in one.places]
    return torch.tensor([int(word) if word.isdigit() else _NO_RANK for word in words])
