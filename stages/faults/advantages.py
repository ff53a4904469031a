"""Known ways to get advantages and returns wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.estimates import STAGE, Made, fault, own_estimates, wrong
from trajreplay.stages.faults.fault import (
    Told,
    each,
    held,
    setting,
    under,
)
from trajreplay.stages.faults.precision import computing_dtypes, rounding_dtypes
from trajreplay.stages.faults.solved import SHARES, solved, together


def _sign_of_kl(block: Block) -> Iterable[Told]:
    if setting(block, "advantage.kl_in_reward") and held(block, "kl"):
        yield Told(Variant(columns={"kl": -block.packed.tokens("kl")}))


def _masked(block: Block) -> Iterable[Told]:
    for one in ("through", "reset", "carry", "multiply"):
        if one == setting(block, "advantage.masking"):
            continue
        yield Told(Variant({"advantage.masking": one}), _PASSED[one])
        for where in ("last", "last-unmasked"):
            if where != setting(block, "advantage.reward_at"):
                changes = {"advantage.masking": one, "advantage.reward_at": where}
                at = "the last token" if where == "last" else "the last trained token"
                yield Told(Variant(changes), f"{_PASSED[one]}, with the reward at {at}")


_PASSED = {
    "through": "that step through masked tokens as through any other",
    "reset": "that start anew at every masked token",
    "carry": "that are carried past masked tokens",
    "multiply": "in which rewards and values of masked tokens count as 0",
}


def _other_rewards(block: Block) -> Iterable[Told]:
    packed = block.packed
    if held(block, "raw_reward"):
        yield Told(Variant(columns={"reward": packed.scalars("raw_reward")}), "raw rewards")
    reward = packed.scalars("reward")
    orders = {
        "the sample before": torch.roll(torch.arange(len(reward)), 1),
        "the sample after": torch.roll(torch.arange(len(reward)), -1),
        "samples in reverse order": torch.arange(len(reward)).flip(0),
        "samples in order of length": torch.argsort(packed.lengths, stable=True),
        "samples in order of length, longest first": torch.argsort(-packed.lengths, stable=True),
    }
    for what, order in orders.items():
        yield Told(Variant(columns={"reward": reward[order]}), f"the rewards of {what}")


def _exchanged(block: Block) -> Iterable[Told]:
    def swapped(settings: Settings, *given: Tensor) -> Made:
        advantages, returns = own_estimates(block, settings, given)
        return returns, advantages

    yield Told(wrong(swapped))


def _negated(block: Block) -> Iterable[Told]:
    def opposite(settings: Settings, *given: Tensor) -> Made:
        advantages, returns = own_estimates(block, settings, given)
        return -advantages, returns

    yield Told(wrong(opposite))


def _overwritten(block: Block) -> Iterable[Told]:
    """What a span gets, written to a row that is a broadcast view of one number: to all of it."""
    own = block.settings.advantage
    if not held(block, "message_faults"):
        return
    packed = block.packed
    owner = torch.arange(len(packed.lengths)).repeat_interleave(packed.lengths)
    kinds = packed.tokens("message_faults")
    given = [(1, own.invalid_tool_call), (2, own.malformed_thinking)]
    stated = [(kind, value) for kind, value in given if value is not None]
    for order in dict.fromkeys([tuple(stated), tuple(reversed(stated))] if stated else []):

        def spread(settings: Settings, *given: Tensor, order: Stated = order) -> Made:
            advantages, returns = own_estimates(block, settings, given)
            for kind, value in order:  # what is written last stays
                odd = torch.zeros(len(packed.lengths), dtype=torch.bool)
                odd[owner[kinds == kind]] = True
                advantages = torch.where(odd[owner], value, advantages)
            return advantages, returns

        yield Told(wrong(spread), " and ".join(f"{value:g}" for _, value in order))


Stated = tuple[tuple[int, float], ...]


def _rounded(block: Block) -> Iterable[Told]:
    there = [one for one in ("advantages", "returns") if held(block, one)]
    recorded = [block.packed.tokens(one)[block.packed.mask] for one in there]
    for dtype, name in computing_dtypes(torch.cat([torch.zeros(0), *recorded])):

        def computed(
            settings: Settings,
            reward: Tensor,
            mask: Tensor,
            offsets: Tensor,
            *rest: Tensor | None,
            to: torch.dtype = dtype,
        ) -> Made:
            narrow = (one if one is None else one.to(to) for one in rest)
            made = own_estimates(block, settings, (reward.to(to), mask, offsets, *narrow))
            return made[0].to(reward.dtype), made[1].to(reward.dtype)

        yield Told(wrong(computed), f"computed in {name}")
    for dtype, name in rounding_dtypes():

        def result(settings: Settings, *given: Tensor, to: torch.dtype = dtype) -> Made:
            advantages, returns = own_estimates(block, settings, given)
            return advantages.to(to).to(advantages.dtype), returns.to(to).to(returns.dtype)

        yield Told(wrong(result), f"rounded to {name}")


def _estimators(block: Block) -> Iterable[Told]:
    for one in ("grpo", "reinforce++", "reinforce++-baseline", "gae"):
        if one == setting(block, "advantage.estimator"):
            continue
        changes: dict[str, object] = {"advantage.estimator": one}
        if one == "grpo":
            changes["advantage.kl_in_reward"] = False
        yield Told(Variant(changes), one)


FAULTS = (
    fault(
        "other-rewards",
        "rewards of other samples, or other rewards",
        "advantages made of {}",
        "the order of samples between reward and advantage; write-backs of processed rewards",
        _other_rewards,
        "K-014",
    ),
    fault(
        "through-masked",
        "returns that step through tool and environment tokens",
        "returns {}",
        "masks inside the recursion; advantage.masking and advantage.reward_at",
        _masked,
        "K-024",
        "K-025",
        "https://github.com/radixark/miles/pull/1827",
    ),
    fault(
        "reward-at",
        "reward at another token",
        "returns with the reward at the {} token",
        "advantage.reward_at",
        each("advantage.reward_at", ("last", "last-unmasked")),
    ),
    fault(
        "kl-sign",
        "KL penalty with the opposite sign",
        "returns to which the KL was added, not taken from",
        "the sign of the KL in the token reward",
        _sign_of_kl,
        "K-061",
    ),
    fault(
        "kl-off",
        "KL penalty configured and not paid",
        "returns without the KL penalty",
        "advantage.kl_in_reward",
        under(advantage__kl_in_reward=False),
    ),
    fault(
        "estimator",
        "another estimator",
        "advantages by the estimator {}",
        "advantage.estimator",
        _estimators,
    ),
    fault(
        "gamma",
        "another discount",
        "returns with the discount {}",
        "advantage.gamma",
        together(
            each("advantage.gamma", (1.0, 0.99, 0.95, 0.9), "{:g}".format),
            solved("advantage.gamma", STAGE, ("advantages", "returns"), SHARES),
        ),
    ),
    fault(
        "lambda",
        "another lambda",
        "advantages with lambda {}",
        "advantage.lam",
        together(
            each("advantage.lam", (1.0, 0.95, 0.99, 0.9), "{:g}".format),
            solved("advantage.lam", STAGE, ("advantages", "returns"), SHARES),
        ),
    ),
    fault(
        "other-returns",
        "returns whitened with the advantages, or not",
        "returns as they were {}",
        "advantage.returns: verl hands on what it whitened as the returns of REINFORCE++",
        each("advantage.returns", ("estimated", "whitened")),
    ),
    fault(
        "exchanged",
        "advantages and returns exchanged",
        "returns under the name of advantages, and the other way round",
        "the order in which both are returned",
        _exchanged,
    ),
    fault(
        "negated",
        "advantages with the opposite sign",
        "the opposite of the advantages",
        "signs between reward, baseline and advantage",
        _negated,
    ),
    fault(
        "broadcast-view",
        "a span penalty written into a broadcast view",
        "{} at every token of some samples: a row that is a view of one number",
        "expand before an in-place write: copy the row first",
        _overwritten,
        "K-030",
        "https://github.com/NVIDIA-NeMo/RL/pull/2787",
    ),
    fault(
        "precision",
        "advantages in reduced precision",
        "advantages {}",
        "dtype in which advantages are kept",
        _rounded,
    ),
)
