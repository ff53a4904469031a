"""The stage reward.post_process of a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.schema.settings import KlSettings, Settings
from trajreplay.stages.block import Block
from trajreplay.stages.capability import LOG_PROB_SOURCES, is_plain
from trajreplay.stages.cohorts.constant_groups import batches_of
from trajreplay.stages.cohorts.packed import Packed
from trajreplay.stages.compare import Compared, Look, compare_elements
from trajreplay.stages.compose import (
    SHARE,
    RewardInputs,
    equal_rewards,
    evaluation_slack,
    kl_tokens,
    processed_rewards,
    processed_rewards_error,
    summed_tokens,
)
from trajreplay.stages.kernels import (
    accumulation_factor,
    group_rewards,
    group_rewards_error,
    half_ulp,
    kl_penalised_rewards,
    segment_sum,
)
from trajreplay.stages.outputs import echoed_looks
from trajreplay.stages.remaining import remaining_tokens
from trajreplay.stages.rewards.findings import warn_of_constant_groups
from trajreplay.stages.rewards.group_sizes import group_size_looks, odd_group
from trajreplay.stages.rewards.raw import components
from trajreplay.stages.wide import whole_batches

_RAW, _STAGE = "reward.raw", "reward.post_process"


def replay_reward_post_process(block: Block) -> None:
    """Recompute the processed rewards from the raw ones, group by group."""
    settings, reads = block.settings.reward, block.cohorts[0].abilities[_STAGE].reads
    raw = raw_rewards(block)
    isolated = Processed(block, raw)
    compared = isolated.compare()
    looks = compared.looks
    if settings.grouping != "none":
        sizes = group_size_looks(block, compared.disagree)
        looks = [look.merged(size) for look, size in zip(looks, sizes, strict=True)]
        for cohort, size in zip(block.cohorts, sizes, strict=True):
            odd = odd_group(size)
            cohort.report.findings += [odd] if odd is not None else []
    if block.kernel(_STAGE) is None:
        warn_of_constant_groups(block, lambda: _equal(block, raw), looks)
    looks = isolated.with_echoes(looks)
    final, chained = isolated, None
    # Only a reward function recomputes raw rewards, here or in the rollouts that a step consumed.
    scored_whole = not settings.weights and settings.source == "sample"
    if block.cohorts[0].rescored and "raw_reward" in block.chained and scored_whole:
        final = Processed(block, block.chained["raw_reward"])
        compared = final.compare()
        chained = final.with_echoes(compared.looks)
    if compared.disagree is not None:
        recorded = block.packed.scalars("reward")
        block.chained["reward"] = torch.where(compared.disagree, final.values, recorded)
    scored = chained is not None or block.cohorts[0].scores is not None
    block.record(
        _STAGE,
        looks,
        chained,
        inputs=tuple(one for one in reads if block.per_token(one)),
        outputs=("reward",),
        after=_RAW if scored else "",
        replaced=("raw_reward",) if chained is not None else (),
        noun="samples",
    )


class Processed:
    """Processed rewards of a block from some raw ones, to be compared with the recorded ones."""

    def __init__(self, block: Block, raw: Tensor) -> None:
        self._block, self._raw = block, raw
        self.values = _processed(block, raw)
        self._tolerance = block.tolerance(_STAGE, "reward")

    def compare(self) -> Compared:
        """Recorded against recomputed."""
        return compare_elements(
            self._block.packed.scalars("reward"),
            self.values,
            self._block.packed.sample_bounds,
            self._tolerance,
            slack=self._slack,
            describe=lambda one, old, new: self._block.sample_divergence("reward", one, old, new),
            ranks=self._block.ranks_of_samples,
            exact=self.evaluated() if self._block.exact else None,
        )

    def evaluated(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(S,) float64. The bits that rewards by the arithmetic of a dtype would have."""
        return self._block.as_recorded("reward", _processed(self._block, self._raw.to(dtype)))

    def with_echoes(self, looks: list[Look]) -> list[Look]:
        """The looks, and with them those at what was recorded beside the column."""
        fields = ("reward", "rewards")
        echoes = echoed_looks(
            self._block,
            _STAGE,
            "reward",
            fields,
            self._tolerance,
            self.values,
            self._slack,
            self.evaluated() if self._block.exact else None,
        )
        return [look.merged(echo) for look, echo in zip(looks, echoes, strict=True)]

    def _slack(self, samples: Tensor) -> Tensor:
        rounding = half_ulp(self.values, self._block.dtypes.get("reward", "float32"))
        return (rounding + _error(self._block, self._raw, self.values))[samples]


def raw_rewards(block: Block, replaced: Mapping[str, Tensor] | None = None) -> Tensor:
    """(S,) float64. What rewards are processed from, some columns replaced; (S, K) of components.

    Raises:
        StageError: A sample has more or fewer components than there are weights.
    """
    if block.settings.reward.weights:
        return components(block)
    if block.settings.reward.source == "token":
        own = (replaced or {}).get("token_rewards", block.packed.tokens("token_rewards"))
        return summed_tokens(own, block.packed.offsets)
    other = (replaced or {}).get("raw_reward")
    return block.packed.scalars("raw_reward") if other is None else other


def _processed(block: Block, raw: Tensor) -> Tensor:
    wide = whole_batches(block, _STAGE)
    if wide is not None:
        every = wide.put(raw_rewards(wide.block), raw, per_token=False)
        return wide.own(_processed(wide.block, every), per_token=False)
    settings, kernel = block.settings.reward, block.kernel(_STAGE)
    if kernel is not None:
        groups = reward_inputs(block.packed, block.settings, asked=False).group
        return kernel.rewards(block.settings, raw, groups, block.packed.lengths)
    if not is_plain(_STAGE, block.settings):
        given = reward_inputs(block.packed, block.settings, dtype=raw.dtype)
        return processed_rewards(settings, raw, given)
    if settings.grouping == "none":
        return raw
    return group_rewards(
        raw,
        block.packed.groups,
        baseline=settings.baseline,
        divide_by_std=settings.divide_by_std,
        ddof=settings.ddof,
        epsilon=settings.epsilon,
    )


def _error(block: Block, raw: Tensor, recomputed: Tensor) -> Tensor:
    """How far float32 may be off."""
    wide = whole_batches(block, _STAGE)
    if wide is not None:
        every = wide.put(raw_rewards(wide.block), raw, per_token=False)
        error = _error(wide.block, every, _processed(wide.block, every))
        return wide.own(error, per_token=False)
    settings = block.settings.reward
    if block.kernel(_STAGE) is not None:
        return evaluation_slack(recomputed, _processed(block, raw.float()))
    if not is_plain(_STAGE, block.settings):
        entry = None
        if settings.source == "token":  # raw rewards are sums of them, which training rounded
            sizes = segment_sum(block.packed.tokens("token_rewards").abs(), block.packed.offsets)
            entry = accumulation_factor(block.packed.lengths) * sizes
        given = reward_inputs(block.packed, block.settings)
        if settings.less_kl:
            given = replace(given, penalty_error=_penalty_error(block.packed, block.settings.kl))
        error = processed_rewards_error(settings, raw, given, entry)
        for against in (SHARE, -SHARE) if given.remaining is not None else ():
            counts = _remaining(block.packed, block.settings, against)
            moved = processed_rewards(settings, raw, replace(given, remaining=counts))
            error = error + (moved - recomputed).abs()  # where rounding decides, either is right
        return error
    if settings.grouping == "none":
        return half_ulp(raw, "float32")
    return group_rewards_error(
        raw,
        block.packed.groups,
        baseline=settings.baseline,
        divide_by_std=settings.divide_by_std,
        ddof=settings.ddof,
        epsilon=settings.epsilon,
    )


def _equal(block: Block, raw: Tensor) -> Tensor:
    """(S,) bool. Samples in groups of equal rewards that are divided by their deviation."""
    wide = whole_batches(block, _STAGE)
    if wide is not None:
        every = wide.put(raw_rewards(wide.block), raw, per_token=False)
        return wide.own(_equal(wide.block, every), per_token=False)
    given = reward_inputs(block.packed, block.settings)
    return equal_rewards(block.settings.reward, raw, given)


def reward_inputs(
    packed: Packed,
    given: Settings,
    *,
    dtype: torch.dtype = torch.float64,
    asked: bool = True,
) -> RewardInputs:
    """What rewards are processed with, besides the raw ones.

    Args:
        packed: The samples.
        given: Which of it they ask for.
        dtype: In which a KL is computed.
        asked: Whether that is given, too, which a function of the user does without.
    """
    settings, batches = given.reward, batches_of(packed, given)
    by_grouping = {
        "group": lambda: packed.groups,
        "consumer-batch": lambda: packed.consumer_batches,
        "stride": lambda: packed.strides(settings.n_samples_per_prompt or 1),
        "agent": lambda: packed.agents(settings.episode_agents),
    }
    cut = settings.stop_properly_coef is not None and asked
    greedy, kept = (settings.baseline == one and asked for one in ("greedy", "kept"))
    by_kept = settings.baseline == "length-weighted" and settings.baseline_counts == "kept"
    by_first = settings.overlong_max_length is not None
    by_first &= settings.overlong_counts == "first-message"
    by_prompt = settings.std_grouping == "group" and asked
    return RewardInputs(
        by_grouping.get(settings.grouping, lambda: batches)(),
        batches,
        packed.lengths,
        segment_sum(packed.weights, packed.offsets),
        trajectory=None if settings.unit == "sample" else packed.trajectories,
        step=packed.scalars("fragment_index").long() if settings.unit == "step" else None,
        truncated=packed.scalars("truncated") != 0 if cut else None,
        greedy=packed.scalars("greedy_reward") if greedy else None,
        kept=packed.scalars("kept_baseline") if kept else None,
        prompt=packed.groups if by_prompt else None,
        totals=packed.scalars("total_length") if "input" in settings.costs and asked else None,
        turns=packed.scalars("turns") if "turns" in settings.costs and asked else None,
        first_message=_first_messages(packed) if by_first and asked else None,
        remaining=_remaining(packed, given) if by_kept and asked else None,
        penalty=_penalty(packed, given.kl, dtype) if settings.less_kl and asked else None,
    )


def _first_messages(packed: Packed) -> Tensor:
    """(S,) float64. The tokens of the first message of each response.

    Raises:
        StageError: One is longer than its response.
    """
    found = packed.scalars("first_message_length")
    odd = (found > packed.lengths).nonzero().squeeze(1)
    if len(odd):
        sample = int(odd[0])
        raise StageError(
            f"sample {packed.text('sample_id', sample)!r}: first_message_length is "
            f"{int(found[sample])}, expected at most response_length = "
            f"{int(packed.lengths[sample])}",
            hint="Count the response tokens of the model's first message, without the prompt.",
        )
    return found


def _remaining(packed: Packed, given: Settings, against: float = 0.0) -> Tensor:
    """(S,) float64. The tokens of each sample that the loss keeps, its bounds moved."""
    kept = remaining_tokens(packed, given.loss, against=against)
    return segment_sum(kept.double(), packed.offsets)


def _penalty(packed: Packed, kl: KlSettings, dtype: torch.dtype) -> Tensor:
    """(S,) What each sample pays for the KL of its trained tokens."""
    pair = (LOG_PROB_SOURCES[kl.policy_source], "ref_log_probs")
    tokens = kl_tokens(kl, *(packed.tokens(name).to(dtype) for name in pair))
    free = torch.zeros(len(packed.lengths), dtype=dtype)
    return -kl_penalised_rewards(free, tokens, packed.mask, packed.offsets, kl_coef=kl.coef)


def _penalty_error(packed: Packed, kl: KlSettings) -> Tensor:
    """(S,) float64. What that may be off by in float32: each token, their sum and its product."""
    pair = (LOG_PROB_SOURCES[kl.policy_source], "ref_log_probs")
    policy, reference = (packed.tokens(name).masked_fill(~packed.mask, 0.0) for name in pair)
    tokens = kl_tokens(kl, policy, reference)
    slack = evaluation_slack(tokens, kl_tokens(kl, policy.float(), reference.float()))
    tokens, off = (segment_sum(one, packed.offsets) for one in (tokens.abs(), slack))
    factor = accumulation_factor(packed.lengths + 3.0)
    return abs(kl.coef) * (off + factor * (tokens + off))
