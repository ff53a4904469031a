"""Known ways to get the arithmetic of processed rewards wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.schema.settings import Settings, with_changes
from trajreplay.stages.block import Block
from trajreplay.stages.compose import processed_rewards
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import (
    Fault,
    Told,
    Tries,
    WrongRewards,
    each,
    setting,
    under,
)
from trajreplay.stages.faults.precision import computing_dtypes, rounding_dtypes
from trajreplay.stages.faults.solved import TWO_DIGITS, solved, together
from trajreplay.stages.kernels import scatter_sum
from trajreplay.stages.rewards.post_process import reward_inputs

STAGE = "reward.post_process"
_ISSUE = "https://github.com/"


def fault(name: str, known: str, sentence: str, look: str, tries: Tries, *references: str) -> Fault:
    """A fault of this stage."""
    return Fault(f"reward.{name}", known, STAGE, sentence, look, references, tries)


def wrong(function: Callable[[Settings, Tensor, Tensor], Tensor]) -> Variant:
    """The variant by other arithmetic: from settings, raw rewards and groups."""

    def rewards(settings: Settings, raw: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        return function(settings, raw, groups)

    return Variant(arithmetic=WrongRewards(rewards))


def normalised(block: Block, settings: Settings, raw: Tensor, groups: Tensor) -> Tensor:
    """What the settings make of raw rewards, whatever they say the groups are."""
    reward = with_changes(settings, {"reward.grouping": "group"}).reward
    own = reward_inputs(block.packed, settings, dtype=raw.dtype)
    return processed_rewards(reward, raw, replace(own, group=groups))


def shaped(block: Block, settings: Settings, raw: Tensor) -> Tensor:
    """(S,) What the settings normalise: rewards that are added up, shaped and clipped.

    Raises:
        StageError: They normalise something else than one number of each sample.
    """
    own = settings.reward
    plain = (own.unit, own.rule, own.combination) == ("sample", "normalise", "sum-then-normalise")
    simple = own.baseline in ("mean", "none") and own.rescale == "none" and not own.costs
    if not (plain and simple):
        raise StageError("the variant is one of rewards that are normalised sample by sample")
    changes = {"reward.grouping": "none", "reward.clip_after": None}
    plain_settings = with_changes(settings, changes)
    given = reward_inputs(block.packed, plain_settings, dtype=raw.dtype)
    return processed_rewards(plain_settings.reward, raw, given)


def clipped(settings: Settings, rewards: Tensor) -> Tensor:
    """(S,) Rewards within the bounds of the result."""
    bounds = settings.reward.clip_after
    return rewards if bounds is None else rewards.clamp(*bounds)


def _mean_of(values: Tensor, groups: Tensor) -> Tensor:
    count = int(groups.max()) + 1
    sums = scatter_sum(values, groups, count)
    return (sums / scatter_sum(torch.ones_like(values), groups, count))[groups]


def _no_brackets(block: Block) -> Iterable[Told]:
    def rewards(settings: Settings, raw: Tensor, groups: Tensor) -> Tensor:
        reward, given = settings.reward, shaped(block, settings, raw)
        mean = _mean_of(given, groups)
        count = torch.bincount(groups)[groups]
        spread = _mean_of((given - mean) ** 2, groups) * count / (count - reward.ddof).clamp(1)
        return clipped(settings, given - mean / (spread.sqrt() + reward.epsilon))

    yield Told(wrong(rewards))


_UNSHAPED: dict[str, object] = {
    "reward.scale_from": None,
    "reward.scale_to": None,
    "reward.overlong_max_length": None,
    "reward.stop_properly_coef": None,
    "reward.bias": 0.0,
    "reward.factor": 1.0,
    "reward.costs": {},
    "reward.less_kl": False,
    "reward.rescale": "none",
    "reward.clip_before": None,
}


def _twice(block: Block) -> Iterable[Told]:
    def rewards(settings: Settings, raw: Tensor, groups: Tensor) -> Tensor:
        once = normalised(block, settings, raw, groups)
        again = with_changes(settings, {**_UNSHAPED, "reward.weights": {}})
        return normalised(block, again, once, groups)

    if setting(block, "reward.combination") == "sum-then-normalise":
        yield Told(wrong(rewards))


def _negated(block: Block) -> Iterable[Told]:
    yield Told(wrong(lambda settings, *given: -normalised(block, settings, *given)))


def _rounded(block: Block) -> Iterable[Told]:
    for dtype, name in computing_dtypes(block.packed.scalars("reward")):

        def computed(
            settings: Settings, raw: Tensor, groups: Tensor, to: torch.dtype = dtype
        ) -> Tensor:
            return normalised(block, settings, raw.to(to), groups).to(raw.dtype)

        yield Told(wrong(computed), f"computed in {name}")
    for dtype, name in rounding_dtypes():

        def result(
            settings: Settings, raw: Tensor, groups: Tensor, to: torch.dtype = dtype
        ) -> Tensor:
            return normalised(block, settings, raw, groups).to(to).to(raw.dtype)

        yield Told(wrong(result), f"rounded to {name}")
        narrow = block.packed.scalars("raw_reward").to(dtype).double()
        yield Told(Variant(columns={"raw_reward": narrow}), f"of raw rewards in {name}")


FAULTS = (
    fault(
        "not-normalised",
        "raw rewards used as they are",
        "the shaped raw rewards, not normalised at all",
        "switches of reward normalisation; reward.grouping",
        under(reward__grouping="none"),
    ),
    fault(
        "not-divided",
        "no scaling where scaling is configured",
        "the rewards less their baseline, not divided by a deviation",
        "the branches of reward scaling; reward.divide_by_std",
        under(reward__divide_by_std=False),
        "K-005",
        f"{_ISSUE}huggingface/trl/issues/3991",
    ),
    fault(
        "divided",
        "scaling where none is configured",
        "the rewards less their baseline, divided by a deviation",
        "the branches of reward scaling; reward.divide_by_std",
        under(reward__divide_by_std=True),
        "K-005",
        f"{_ISSUE}huggingface/trl/issues/3991",
    ),
    fault(
        "std-of-other-set",
        "group and batch deviation exchanged",
        "division by the deviation of {}",
        "the branches of reward scaling; reward.std_grouping",
        each(
            "reward.std_grouping",
            ("batch", "same"),
            {"batch": "the whole batch", "same": "the group"}.__getitem__,
        ),
        "K-005",
        f"{_ISSUE}PrimeIntellect-ai/prime-rl/pull/1188",
    ),
    fault(
        "population-std",
        "deviation with divisor n",
        "division by the deviation with divisor n, where the settings say n - 1",
        "unbiased, correction or ddof of std: torch divides by n - 1, numpy by n; reward.ddof",
        under(reward__ddof=0),
    ),
    fault(
        "sample-std",
        "deviation with divisor n - 1",
        "division by the deviation with divisor n - 1, where the settings say n",
        "unbiased, correction or ddof of std: torch divides by n - 1, numpy by n; reward.ddof",
        under(reward__ddof=1),
    ),
    fault(
        "no-brackets",
        "missing brackets in the z-score",
        "r - mean / (std + epsilon): the mean alone is divided",
        "operator precedence in the normalisation",
        _no_brackets,
        "K-015",
        f"{_ISSUE}PrimeIntellect-ai/prime-rl/pull/390",
    ),
    fault(
        "other-baseline",
        "another baseline",
        "rewards with the baseline {}",
        "reward.baseline; NeMo-RL leaves one out by default",
        each("reward.baseline", ("mean", "leave-one-out", "none", "length-weighted")),
    ),
    fault(
        "leave-one-out",
        "leave-one-out baseline and deviation",
        "rewards normalised with statistics of the other members of the group",
        "reward.baseline and reward.divisor; NeMo-RL leaves one out by default",
        under(reward__baseline="leave-one-out", reward__divisor="leave-one-out-std"),
    ),
    fault(
        "other-divisor",
        "another divisor",
        "rewards divided by {}",
        "reward.divisor",
        each("reward.divisor", ("std", "std-around-baseline", "leave-one-out-std", "baseline")),
    ),
    fault(
        "other-epsilon",
        "another epsilon",
        "normalisation with epsilon {}",
        "reward.epsilon: 1e-6 in most frameworks, 1e-4 in TRL, 1e-5 in AReaL, 1e-9 in OpenRLHF",
        together(
            each("reward.epsilon", (1e-4, 1e-5, 1e-6, 1e-9, 1e-8, 1e-3, 0.0), "{:g}".format),
            solved("reward.epsilon", STAGE, ("reward",), TWO_DIGITS),
        ),
    ),
    fault(
        "epsilon-place",
        "epsilon elsewhere",
        "normalisation with epsilon {}",
        "whether epsilon is added to the deviation or stands inside the root; reward.epsilon_place",
        each("reward.epsilon_place", ("added", "floored", "inside")),
    ),
    fault(
        "negated",
        "reward with the opposite sign",
        "the opposite of the normalised rewards",
        "signs between reward and advantage",
        _negated,
    ),
    fault(
        "twice",
        "normalised twice",
        "rewards normalised, and then normalised again",
        "normalisation in both the reward function and the trainer",
        _twice,
    ),
    fault(
        "precision",
        "rewards in reduced precision",
        "normalised rewards {}",
        "dtype in which rewards are kept",
        _rounded,
        "K-050",
    ),
)
