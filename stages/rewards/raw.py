"""The stage reward.raw of a block: raw rewards, and the components that they are made of."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.schema.policy import Tolerance
from trajreplay.stages.block import Block
from trajreplay.stages.compare import EXAMPLES, Look, compare_elements
from trajreplay.stages.compose import summed_components, summed_rewards_error, summed_tokens
from trajreplay.stages.compose.plain_sums import plain_sums
from trajreplay.stages.kernels import accumulation_factor, half_ulp, segment_sum
from trajreplay.stages.outputs import echoed_looks
from trajreplay.stages.rewards.scoring import compare_scores

STAGE = "reward.raw"
COMPONENTS, TOKENS = "reward_components", "token_rewards"
_EXACT = Tolerance(0.0, 0.0)


def replay_reward_raw(block: Block) -> None:
    """Hold raw rewards against what was recorded beside them, and against a reward function."""
    reads = block.cohorts[0].abilities[STAGE].reads
    bounds = list(pairwise(block.packed.sample_bounds))
    looks = [Look() for _ in bounds]
    # Where missing rewards are part of the arithmetic, one that is NaN is no fault.
    excluded = block.settings.reward.missing == "exclude"
    if "raw_reward" in reads:
        looks = echoed_looks(block, STAGE, "raw_reward", ("raw_reward", "raw_rewards"), _EXACT)
        scored = compare_scores(block)
        if scored is not None:
            looks = _merged(looks, scored)
        if excluded:
            raw = block.packed.scalars("raw_reward")
            looks = _merged(looks, _odd_rewards(block, "raw_reward", raw, raw.isinf()))
    if COMPONENTS in reads:
        looks = _merged(looks, _odd_components(block, excluded=excluded))
        if "raw_reward" in reads:
            looks = _merged(looks, _sums(block, excluded=excluded))
    if TOKENS in reads and "raw_reward" in reads:
        looks = _merged(looks, _sums(block, excluded=excluded))
    for look, (start, stop) in zip(looks, bounds, strict=True):
        look.compared += stop - start
    judged = "raw_reward" in reads and not excluded
    inputs: tuple[str, ...] = ("raw_reward",) if judged else ()
    inputs += (TOKENS,) if TOKENS in reads else ()
    block.record(STAGE, looks, inputs=inputs, noun="samples")
    for cohort in block.cohorts:
        result = cohort.report.stages[-1]
        if cohort.unscored and result.verdict != "diverged":
            result.verdict, result.message = "unverified", cohort.unscored


def components(block: Block) -> Tensor:
    """(S, K) float64. The recorded components, in the order of the weights' names.

    Raises:
        StageError: A sample has more or fewer than there are weights.
    """
    values, count = block.column(COMPONENTS), len(block.settings.reward.weights)
    samples = len(block.packed.lengths)
    if len(values) != samples * count:
        raise StageError(
            f"{COMPONENTS} holds {len(values)} values of {samples} samples, expected {count} of "
            "each, one for each of reward.weights",
            hint="Weigh every component that was captured, under its own name.",
        )
    return values.reshape(samples, count)


def _merged(looks: list[Look], others: list[Look]) -> list[Look]:
    return [look.merged(one) for look, one in zip(looks, others, strict=True)]


def _odd_components(block: Block, *, excluded: bool) -> list[Look]:
    """Components that are infinite, or missing where that is no part of the arithmetic."""
    values, looks = components(block), [Look() for _ in block.cohorts]
    odd = values.isinf() if excluded else ~values.isfinite()
    for index, name in enumerate(block.settings.reward.weights):
        mine = _odd_rewards(block, f"{COMPONENTS}.{name}", values[:, index], odd[:, index])
        looks = _merged(looks, mine)
    return looks


def _odd_rewards(block: Block, field: str, values: Tensor, odd: Tensor) -> list[Look]:
    """Values of samples that are wrong as they are."""
    looks = []
    for start, stop in pairwise(block.packed.sample_bounds):
        places = (odd[start:stop].nonzero().squeeze(1) + start).tolist()
        examples = [
            block.sample_divergence(field, one, float(values[one]), torch.nan)
            for one in places[:EXAMPLES]
        ]
        look = Look(0, len(places), 0, torch.nan if places else 0.0, examples)
        look.ranks = block.ranks_of_samples(torch.tensor(places, dtype=torch.int64))
        looks.append(look)
    return looks


def _sums(block: Block, *, excluded: bool) -> list[Look]:
    """Raw rewards that are not the weighted sum of their components, or that of their tokens."""
    settings, recorded = block.settings.reward, block.packed.scalars("raw_reward")
    by_token = not settings.weights
    values = block.packed.tokens(TOKENS) if by_token else components(block)
    offsets = block.packed.offsets
    total = summed_tokens(values, offsets) if by_token else summed_components(settings, values)
    unknown = torch.zeros(len(recorded), dtype=torch.bool)
    if excluded and not by_token:  # a sample of which nothing is known has no reward
        unknown = values.isnan().all(1) & recorded.isnan()
        recorded, total = recorded.masked_fill(unknown, 0.0), total.masked_fill(unknown, 0.0)

    def slack(samples: Tensor) -> Tensor:
        rounding = half_ulp(total, block.dtypes.get("raw_reward", "float32"))
        if by_token:
            sizes = segment_sum(values.abs(), offsets)
            return (rounding + accumulation_factor(block.packed.lengths + 1.0) * sizes)[samples]
        return (rounding + summed_rewards_error(settings, values))[samples]

    def as_recorded() -> Tensor:
        if block.dtypes.get("raw_reward", "float32") == "float64":
            return total
        if by_token:
            return block.as_recorded("raw_reward", plain_sums(values, offsets))
        narrow = summed_components(settings, values.float())
        return block.as_recorded("raw_reward", narrow).masked_fill(unknown, 0.0)

    looks = compare_elements(
        recorded,
        total,
        block.packed.sample_bounds,
        block.tolerance(STAGE, "raw_reward"),
        slack=slack,
        describe=lambda one, old, new: block.sample_divergence("raw_reward", one, old, new),
        ranks=block.ranks_of_samples,
        exact=as_recorded() if block.exact else None,
    ).looks
    for look in looks:
        look.compared = 0  # the stage counts its samples itself
    return looks
