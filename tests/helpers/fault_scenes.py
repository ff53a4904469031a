"""What a cohort must have so that a fault can happen to it, and faults that no variant puts in."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from tests.helpers.faulty import Alter, Shares, with_columns, with_fault, with_outputs
from tests.helpers.healthy_composed import Draw
from tests.helpers.trainer import Sample
from trajreplay.schema import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant, varied
from trajreplay.stages.faults import Told
from trajreplay.stages.outputs import Recorded

Put = Callable[[Block, random.Random], Block | None]
POLICY = "loss.policy"


@dataclass(frozen=True)
class Scene:
    """What a draw needs.

    Args:
        changes: Settings that are in force.
        alter: What is done to the samples before they are trained on.
        put: What puts the fault in; None where a variant of its own does.
        finite: Whether what is recorded is finite.
        groups: How few and how many groups there are.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    alter: Alter | None = None
    put: Put | None = None
    finite: bool = True
    groups: tuple[int, int] = (1, 3)


def _samples(shares: Shares) -> list[Sample]:
    return [one for rank in sorted(shares) for one in shares[rank]]


def _mixed(draw: Draw, settings: Settings, shares: Shares) -> None:
    """Groups of several sizes, their samples in any order on two ranks."""
    samples = _samples(shares)
    draw.choose.shuffle(samples)
    names = sorted({str(one.group) for one in samples})
    if settings.reward.n_samples_per_prompt is None:
        for name in draw.choose.sample(names, len(names) // 2):
            members = [one for one in samples if one.group == name]
            samples.remove(members[0])
    cut = draw.choose.randint(len(samples) // 3, 2 * len(samples) // 3)
    size = draw.choose.choice([2, 3])
    shares.clear()
    shares |= {0: samples[:cut], 1: samples[cut:]}
    for own in shares.values():
        for row, one in enumerate(own):
            one.micro_batch_id = f"mb-{row // size:04d}"


def _streamed(draw: Draw, settings: Settings, shares: Shares) -> None:
    _mixed(draw, settings, shares)
    size = draw.choose.randint(3, 5)
    for row, one in enumerate(_samples(shares)):
        one.consumer_batch_id = f"cb-{row // size}"


def _short(draw: Draw, settings: Settings, shares: Shares) -> None:
    """The last group has lost members."""
    own = shares[max(shares)]
    last = [one for one in own if one.group == own[-1].group]
    for one in last[1:][: draw.choose.randint(1, max(1, len(last) - 1))]:
        own.remove(one)


def _lone(draw: Draw, settings: Settings, shares: Shares) -> None:
    own = shares[max(shares)]
    for one in [one for one in own if one.group == own[-1].group][1:]:
        own.remove(one)


def _missing(draw: Draw, settings: Settings, shares: Shares) -> None:
    samples = _samples(shares)
    for one in draw.choose.sample(samples, max(1, len(samples) // 4)):
        one.raw_reward = math.nan


def _trajectories(draw: Draw, settings: Settings, shares: Shares) -> None:
    """Some trajectories of each group have several fragments, all with the reward of one."""
    first: dict[str, Sample] = {}
    for number, one in enumerate(_samples(shares)):
        joins = draw.choose.random() < 0.4
        mate = first.get(str(one.group)) if joins else None
        if mate is None:
            one.trajectory_id, one.fragment_index = f"t-{number}", 0
            first[str(one.group)] = one
        else:
            one.trajectory_id, one.fragment_index = mate.trajectory_id, number
            one.raw_reward, one.greedy_reward = mate.raw_reward, mate.greedy_reward


def _square(draw: Draw, settings: Settings, shares: Shares) -> None:
    samples = _samples(shares)
    for one in samples:
        one.mask = [int(draw.choose.random() < 0.8) for _ in samples]
        one.mask[draw.choose.randrange(len(samples))] = 1
        one.weight_versions = [(0, one.length, 0)]
    draw.fill(samples, settings)


def _masked(draw: Draw, settings: Settings, shares: Shares) -> None:
    """Every sample has masked tokens."""
    samples = _samples(shares)
    for one in samples:
        one.mask = [1, *(int(draw.choose.random() < 0.6) for _ in range(one.length)), 0]
        one.weight_versions = [(0, one.length, 0)]
    draw.fill(samples, settings)


def _overflowing(draw: Draw, settings: Settings, shares: Shares) -> None:
    """A trained token of which the sampler thought nothing."""
    one = draw.choose.choice([one for one in _samples(shares) if any(one.mask)])
    at = draw.choose.choice([place for place, kept in enumerate(one.mask) if kept])
    one.columns["rollout_log_probs"][at] = one.columns["old_log_probs"][at] - 200.0


def _view(block: Block, choose: random.Random) -> Block | None:
    """The penalty of a span, written to all of a row that is a view of one number."""
    own = block.settings.advantage
    values = block.packed.tokens("advantages").clone()
    faults = block.packed.tokens("message_faults")
    for kind, penalty in ((1, own.invalid_tool_call), (2, own.malformed_thinking)):
        for start, stop in pairwise(block.packed.offsets.tolist()):
            if penalty is not None and bool((faults[start:stop] == kind).any()):
                values[start:stop] = penalty
    return with_columns(block, {"advantages": values})


def _left_out(block: Block, choose: random.Random) -> Block | None:
    """Missing rewards are left out, and the settings say that they are kept."""
    return varied(block, Variant({"reward.missing": "keep"}), ("reward.post_process",))


def _multiplied(block: Block, choose: random.Random) -> Block | None:
    factor = float(choose.choice([2, 3, 4, 8]))
    factor = choose.choice([factor, 1 / factor])
    whole = choose.random() < 0.5

    def change(one: Recorded) -> float | None:
        scaled = one.output.field == "loss" or whole
        return None if one.output.value is None or not scaled else one.output.value * factor

    return with_outputs(block, POLICY, change)


def _value_multiplied(block: Block, choose: random.Random) -> Block | None:
    factor = float(choose.choice([3, 4, 8]))
    factor = choose.choice([factor, 1 / factor])
    return with_outputs(
        block,
        "loss.value",
        lambda one: None if one.output.value is None else one.output.value * factor,
    )


def _leaking(block: Block, choose: random.Random) -> Block | None:
    """A masked token has no log-prob, and a mask that multiplies lets it through."""
    packed = block.packed
    masked = (~packed.mask).nonzero().squeeze(1).tolist()
    if not masked:
        return None
    at = choose.choice(masked)
    sample = int(torch.searchsorted(packed.offsets, at, right=True)) - 1
    values = packed.tokens("old_log_probs").clone()
    values[at] = torch.nan

    def change(one: Recorded) -> float | None:
        reads = one.output.field in ("loss", "pg_loss", "ppo_kl")
        return math.nan if reads and sample in one.samples.tolist() else None

    return with_outputs(with_columns(block, {"old_log_probs": values}), POLICY, change)


def _kl_leaking(block: Block, choose: random.Random) -> Block | None:
    """The same of the reference, and a KL that is summed over the sample."""
    packed = block.packed
    masked = (~packed.mask).nonzero().squeeze(1).tolist()
    if not masked:
        return None
    at = choose.choice(masked)
    sample = int(torch.searchsorted(packed.offsets, at, right=True)) - 1
    values, kl = packed.tokens("ref_log_probs").clone(), packed.tokens("kl").clone()
    values[at] = torch.nan
    kl[int(packed.offsets[sample]) : int(packed.offsets[sample + 1])] = torch.nan
    return with_columns(block, {"ref_log_probs": values, "kl": kl})


def _two_digits(low: float, high: float) -> Callable[[random.Random], float]:
    """Numbers as people choose them, on no list of ours."""
    return lambda choose: float(f"{math.exp(choose.uniform(math.log(low), math.log(high))):.2g}")


def _other(name: str, stage: str, number: Callable[[random.Random], Any]) -> Put:
    """Another number in a setting."""

    def put(block: Block, choose: random.Random) -> Block | None:
        return with_fault(block, stage, Told(Variant({name: number(choose)})))

    return put


def _symmetric_bounds(choose: random.Random) -> tuple[float, float]:
    bound = choose.randint(10, 99) / 100
    return -bound, bound


def _other_bounds(block: Block, choose: random.Random) -> Block | None:
    """Another bound on one side, or one other bound on both."""
    bound = _two_digits(0.005, 0.3)(choose)
    low, high = (block.settings.loss.eps_clip, block.settings.loss.eps_clip_high)
    low, high = choose.choice([(bound, high), (low, bound), (bound, bound)])
    changes = {"loss.eps_clip": low, "loss.eps_clip_high": high}
    return with_fault(block, POLICY, Told(Variant(changes)))


def _other_temperature(block: Block, choose: random.Random) -> Block | None:
    """Log-probs of one side at another temperature."""
    name = choose.choice(["old_log_probs", "log_probs"])
    scaled = block.packed.tokens(name) / (choose.randint(30, 250) / 100)
    return with_fault(block, POLICY, Told(Variant(columns={name: scaled})))


_OVERLONG = {"reward.overlong_max_length": 4, "reward.overlong_buffer": 2}
_WHITE_CLIP = {"advantage.clip": (-0.5, 0.5), "advantage.whiten": "cohort"}
_SIZES = {"reward.n_samples_per_prompt": None}
_GROUPS = {"reward.grouping": "group", "reward.rule": "normalise", "reward.unit": "sample"}
_PLAIN = {**_GROUPS, **_SIZES, "reward.baseline": "mean"}
_MISSING: dict[str, Any] = {
    **_PLAIN,
    "reward.lone": "zero",
    "reward.weights": {},
    "reward.source": "sample",
}
_SQUARE = {"advantage.whiten": "cohort", "advantage.clip": None}
_SPAN = {"advantage.estimator": "grpo", "advantage.whiten": "none", "advantage.clip": None}
_KL_LOSS = {"loss.kl_loss_coef": 0.1}
_WEIGHED = {"loss.correction": "tis", "loss.correction_bounds": (0.9, 1.05)}
_VALUE_CLIP = {"value.clip": 0.2}
_REJECTED = {"loss.rejection": {"token-ratio": (0.9, 1.05)}}
_OLD = {"loss.surrogate": "ppo-clip", "loss.ratio": "token", "loss.old_source": "old"}
_MIXED = Scene(_GROUPS, _mixed, groups=(3, 6))

# Faults that need more than a drawn cohort has.
SCENES: Mapping[str, Scene] = {
    "reward.grouped-by-consumer-batch": Scene(_GROUPS, _streamed, groups=(3, 6)),
    "reward.grouped-by-batch": _MIXED,
    "reward.grouped-by-rank": _MIXED,
    "reward.grouped-by-micro-batch": _MIXED,
    "reward.grouped-by-stride": _MIXED,
    "reward.grouped-by-stride-of-all": _MIXED,
    "reward.grouped-by-position": Scene(_PLAIN, _mixed, groups=(3, 6)),
    "reward.stride-tail": Scene(_PLAIN, _short, groups=(2, 5)),
    "reward.lone": Scene(_PLAIN, _lone, groups=(2, 5)),
    "reward.missing-counted": Scene(
        {**_MISSING, "reward.missing": "exclude"}, _missing, finite=False
    ),
    "reward.missing-excluded": Scene(
        {**_MISSING, "reward.missing": "exclude"}, _missing, _left_out, finite=False
    ),
    "reward.grouped-by-prompt": Scene(
        {**_PLAIN, "reward.grouping": "batch"}, _mixed, groups=(3, 6)
    ),
    "reward.per-fragment": Scene({**_SIZES, "reward.unit": "trajectory"}, _trajectories),
    "reward.length-of-tool-tokens": Scene({**_OVERLONG, "reward.overlong_counts": "trained"}),
    "reward.length-of-trained-tokens": Scene({**_OVERLONG, "reward.overlong_counts": "response"}),
    "reward.overlong-floor": Scene({**_OVERLONG, "reward.overlong_max_length": 2}),
    "reward.overlong-off": Scene(_OVERLONG),
    "reward.truncation-off": Scene({"reward.stop_properly_coef": 0.5}),
    "reward.clip-off": Scene({"reward.clip_after": (-0.5, 0.5)}),
    "reward.clip-exchanged": Scene({"reward.clip_before": (0.25, 0.75)}),
    "kl.log-ratio-clamp": Scene({"kl.log_ratio_clamp": (-0.1, 0.1), "kl.coef": 0.1}),
    "kl.on": Scene({"kl.coef": 0.0}),
    "kl.roles": Scene({"kl.coef": 0.1, "kl.estimator": "k3"}),
    "kl.squared-twice": Scene({"kl.coef": 0.1, "kl.estimator": "k2"}),
    "kl.leaked": Scene({"kl.coef": 0.1}, _masked, _kl_leaking, finite=False),
    "advantage.wrong-axis": Scene(_SQUARE, _square),
    "advantage.clip-off": Scene({"advantage.clip": (-0.5, 0.5)}),
    "advantage.clip-first": Scene(_WHITE_CLIP),
    "advantage.broadcast-view": Scene({**_SPAN, "advantage.invalid_tool_call": -1.0}, put=_view),
    "loss.log-ratio-clamp": Scene({"loss.log_ratio_clamp": (-0.05, 0.05)}),
    "loss.sequence-clip-off": Scene({"loss.opsm_delta": 1e-4}),
    "loss.factor": Scene(put=_multiplied),
    "loss.kl-sign": Scene(_KL_LOSS),
    "loss.kl-coefficient": Scene(
        _KL_LOSS, put=_other("loss.kl_loss_coef", POLICY, _two_digits(1e-3, 0.9))
    ),
    "loss.entropy-coefficient": Scene(
        {"loss.entropy_coef": 0.01},
        put=_other("loss.entropy_coef", POLICY, _two_digits(1e-3, 0.9)),
    ),
    "loss.clip-bounds": Scene(_OLD, put=_other_bounds),
    "loss.temperature": Scene(_OLD, put=_other_temperature),
    "reward.other-epsilon": Scene(
        _GROUPS, put=_other("reward.epsilon", "reward.post_process", _two_digits(1e-5, 0.1))
    ),
    "advantage.gamma": Scene(
        put=_other("advantage.gamma", "advantage.estimate", lambda one: one.randint(50, 99) / 100)
    ),
    "advantage.clip-bounds": Scene(
        put=_other("advantage.clip", "advantage.estimate", _symmetric_bounds)
    ),
    "value.clip": Scene(
        _VALUE_CLIP, put=_other("value.clip", "loss.value", _two_digits(0.01, 0.9))
    ),
    "loss.kl-estimator": Scene(_KL_LOSS),
    "advantage.other-returns": Scene({"advantage.whiten": "cohort", "advantage.estimator": "grpo"}),
    "loss.weight-of-current": Scene(_WEIGHED),
    "loss.weight-inverted": Scene(_WEIGHED),
    "loss.dual-clip": Scene({**_OLD, "loss.dual_clip": 1.05}),
    "loss.dual-clip-positive": Scene(_OLD),
    "loss.optimistic": Scene(_OLD),
    "loss.clipped-alone": Scene(_OLD),
    "loss.rejection-off": Scene(_REJECTED),
    "loss.rejection-denominator": Scene(_REJECTED),
    "loss.correction-norm": Scene(_WEIGHED),
    "value.clipped-alone": Scene(_VALUE_CLIP),
    "value.optimistic": Scene(_VALUE_CLIP),
    "value.counts": Scene(_REJECTED),
    "value.times": Scene(put=_value_multiplied),
    "value.huber": Scene({"value.huber_delta": 0.5}),
    "loss.nan": Scene(_OLD, _masked, _leaking, finite=False),
    "loss.infinite-weight": Scene(
        {"loss.correction": "sequence-mask", "loss.correction_bounds": (0.9, 1.05)},
        _overflowing,
        finite=False,
    ),
}
