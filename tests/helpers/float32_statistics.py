"""Statistics of rewards and tokens in float32, as trainers take them: tensors, group by group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Rows = Sequence[Sequence[float]]


def tensor(values: Sequence[float]) -> Tensor:
    """Numbers as float32."""
    return torch.tensor([float(one) for one in values], dtype=torch.float32)


def normalise_rewards(
    rewards: Sequence[float],
    group_index: Sequence[int],
    *,
    baseline: str = "mean",
    divisor: str = "none",
    divisor_index: Sequence[int] | None = None,
    ddof: int = 1,
    epsilon: float = 1e-6,
    epsilon_place: str = "added",
    lone: str = "zero",
    missing: str = "keep",
    lengths: Sequence[float] = (),
    greedy_rewards: Sequence[float] = (),
) -> list[float]:
    """Score rewards against their groups; a NaN is missing, or reaches its group."""
    x = tensor(rewards)
    known = ~x.isnan() if missing == "exclude" else torch.ones(len(x), dtype=torch.bool)
    groups = torch.tensor(list(group_index))
    shared = groups if divisor_index is None else torch.tensor(list(divisor_index))
    weights, greedy = tensor(lengths), tensor(greedy_rewards)
    scored, levels = x.clone(), torch.zeros_like(x)
    for group in sorted(set(groups[known].tolist())):
        own = ((groups == group) & known).nonzero().squeeze(1)
        if baseline == "none":
            continue
        greed = baseline == "greedy"
        levels[own] = greedy[own] if greed else _levels(x[own], baseline, own, weights)
        scored[own] = x[own] - levels[own]
        if not greed and len(own) == 1:
            scored[own] = {"zero": x.new_zeros(1), "keep": x[own], "nan": x[own] * math.nan}[lone]
            levels[own] = x[own] - scored[own]
    result = torch.zeros_like(x)
    for group in sorted(set(shared[known].tolist())):
        own = ((shared == group) & known).nonzero().squeeze(1)
        result[own] = _divided(
            x[own],
            scored[own],
            levels[own],
            divisor=divisor,
            ddof=ddof,
            epsilon=epsilon,
            place=epsilon_place,
            lone=lone,
        )
    return result.tolist()


def _levels(x: Tensor, baseline: str, own: Tensor, weights: Tensor) -> Tensor:
    if baseline == "mean":
        return x.mean().expand(len(x))
    if baseline == "length-weighted":
        return ((weights[own] * x).sum() / weights[own].sum()).expand(len(x))
    return (x.sum() - x) / (len(x) - 1)


def _divided(
    x: Tensor,
    scored: Tensor,
    levels: Tensor,
    *,
    divisor: str,
    ddof: int,
    epsilon: float,
    place: str,
    lone: str,
) -> Tensor:
    count = len(x)
    if divisor == "none":
        return scored
    if divisor == "baseline":
        return torch.where(levels > 0, scored / levels, torch.where(levels <= 0, 0.0, scored))
    if count <= (1 if divisor == "leave-one-out-std" else ddof):
        kept = scored / (1.0 + epsilon) if lone == "keep" else scored * math.nan
        return torch.zeros_like(x) if lone == "zero" else kept
    if divisor == "leave-one-out-std":
        others = count - 1
        mean, square = ((one.sum() - one) / others for one in (x, x * x))
        ones = ~torch.eye(count, dtype=torch.bool)
        mean = torch.stack([x[row].sum() for row in ones]) / others
        square = torch.stack([(x[row] * x[row]).sum() for row in ones]) / others
        variance = (square - mean * mean) * (others / max(others - ddof, 0.5))
        variance = torch.where(torch.tensor(others > ddof), variance, 0.0).nan_to_num(math.nan)
        std = variance.sqrt()
        std = torch.where(variance < 0.0, 0.0, std)
        return torch.where(std == 0.0, scored, scored / _root(std, epsilon, place))
    if divisor == "std-around-baseline":
        std = ((scored * scored).sum() / (count - ddof)).sqrt()
    else:
        std = x.std(correction=ddof)
    if epsilon == 0.0 and float(std) == 0.0:
        return scored
    return scored / _root(std, epsilon, place)


def _root(std: Tensor, epsilon: float, place: str) -> Tensor:
    if place == "inside":
        return (std * std + epsilon).sqrt()
    return (std * std).clamp(min=epsilon).sqrt() + epsilon if place == "floored" else std + epsilon


def gpg_rewards(
    rewards: Sequence[float], group_index: Sequence[int], f_norm: float, lone: str
) -> list[float]:
    """Centre every reward and scale it by the share of the batch that scores."""
    alpha = len(rewards) / max(sum(one != 0 for one in rewards), 1)
    centred = tensor(normalise_rewards(rewards, group_index, lone=lone))
    return (alpha * centred / f_norm).tolist()


def pass_at_k_rewards(
    rewards: Sequence[float], group_index: Sequence[int], *, divide_by_std: bool, epsilon: float
) -> list[float]:
    """Score the best of every group by its lead."""
    x, groups = tensor(rewards), torch.tensor(list(group_index))
    result = torch.zeros_like(x)
    for group in sorted(set(groups.tolist())):
        own = (groups == group).nonzero().squeeze(1)
        top = x[own].topk(2)
        lead = top.values[0] - top.values[1]
        result[own[top.indices[0]]] = lead / (x[own].std() + epsilon) if divide_by_std else lead
    return result.tolist()


def decoupled_rewards(
    components: Rows,
    weights: Sequence[float],
    group_index: Sequence[int],
    *,
    batch_index: Sequence[int],
    batch_epsilon: float | None,
    missing: str,
    baseline: str,
    divisor: str,
    epsilon: float,
    ddof: int = 1,
    lone: str = "zero",
) -> list[float]:
    """Normalise every component, add up, normalise the sums over the batch."""
    columns = [
        tensor(
            normalise_rewards(
                [row[k] for row in components],
                group_index,
                baseline=baseline,
                divisor=divisor,
                ddof=ddof,
                epsilon=epsilon,
                lone=lone,
                missing=missing,
            )
        )
        for k in range(len(weights))
    ]
    unknown = torch.tensor([all(math.isnan(one) for one in row) for row in components])
    total = torch.stack(columns, 1) * tensor(weights)
    total = total.nansum(1) if missing == "exclude" else total.sum(1)
    if missing == "exclude":
        total = total.masked_fill(unknown, math.nan)
    if batch_epsilon is None:
        return total.nan_to_num(0.0).tolist() if missing == "exclude" else total.tolist()
    return normalise_rewards(
        total.tolist(),
        batch_index,
        divisor="std",
        ddof=ddof,
        epsilon=batch_epsilon,
        missing=missing,
    )


def whiten(
    values: Sequence[float],
    loss_mask: Sequence[float],
    set_index: Sequence[int],
    *,
    centre_index: Sequence[int],
    centre: str,
    scale: bool,
    form: str,
    ddof: int,
    epsilon: float,
    short: str,
    one_pass: bool,
) -> list[float]:
    """Whiten the tokens of every set by one pass or two."""
    x, mask, sets = tensor(values), torch.tensor([bool(one) for one in loss_mask]), set_index
    index, result = torch.tensor(list(sets), dtype=torch.int64), tensor(values)
    level = _centres(x, mask, torch.tensor(list(centre_index), dtype=torch.int64), centre)
    for one in sorted(set(index.tolist())):
        own = index == one
        counted = x[own & mask]
        count = len(counted)
        if not count:
            result[own] = x[own] if short == "keep" else math.nan
            continue
        mean = _total(counted) / count
        centred = x[own] - level[own]
        if scale:
            free = count - ddof
            if free < 1:
                free = 0 if short == "nan" else count
            if one_pass:
                variance = (_total(counted.square()) / count - mean * mean) * (count / max(free, 1))
            else:
                variance = _total((x - level)[own & mask].square()) / max(free, 1)
            if short == "keep" and count <= ddof:
                variance = torch.ones(())
            centred = centred / _deviation(variance, epsilon, form) if free else centred * math.nan
        result[own] = centred
    return result.tolist()


def _centres(x: Tensor, mask: Tensor, index: Tensor, centre: str) -> Tensor:
    """What is taken off each token."""
    level = torch.zeros_like(x)
    for one in sorted(set(index.tolist())) if centre != "none" else ():
        own = index == one
        counted, count = x[own & mask], int((own & mask).sum())
        if not count:
            continue
        level[own] = _total(counted) / count
        if centre == "leave-one-out":
            level[own & mask] = (_total(counted) - counted) / max(count - 1, 1)
            if count == 1:
                level[own & mask] = 0.0
    return level


def _total(values: Tensor) -> Tensor:
    """The sum over tokens, sample by sample, say, and then over all."""
    return torch.stack([one.sum() for one in torch.split(values, 256)]).sum()


def _deviation(variance: Tensor, epsilon: float, form: str) -> Tensor:
    if form == "std":
        return variance.sqrt() + epsilon
    return (variance.clamp(min=epsilon) if form == "floored" else variance + epsilon).sqrt()
