"""Settings of the stage reward.post_process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trajreplay.schema.settings.knobs import (
    Interval,
    count,
    flag,
    interval,
    name,
    names,
    number,
    weights,
)


@dataclass(frozen=True)
class RewardSettings:
    """Reward post-processing: shape, clip, centre, divide, clip.

    Args:
        grouping: Which samples share statistics: `group`, those of one prompt; `batch`, all of the
            cohort; `consumer-batch`, those handed over together; `stride`, every
            `n_samples_per_prompt` rows of a rank, in row order; `agent`, those of one prompt and
            one agent (prime-rl's hierarchical GRPO); `none` for rewards used as given.
        episode_agents: With `agent`, the agents that are compared within one episode only.
        source: What a raw reward is: the `sample`'s score, or the sum over its `token` rewards
            (verl, whose token rewards may have paid a KL already).
        unit: What is normalised: every `sample`; every `trajectory` once, however many fragments
            it was cut into; or every `step` of an agent, a fragment, against the same steps of the
            other trajectories, its reward the sum of those to the end of its own.
        step_gamma: What one step discounts in that sum.
        n_samples_per_prompt: Samples, or trajectories, that every prompt must have; None leaves it
            unchecked, and so does a grouping of none.
        weights: The weight of each component of the reward by name, in order of the names; none
            where a sample has one raw reward.
        combination: How components become one reward: `sum-then-normalise` the sum, or
            `normalise-then-sum` each within its group (GDPO).
        batch_epsilon: With `normalise-then-sum`, the sum is normalised over the batch with this
            epsilon; None leaves it as it is. With rescale, the epsilon of that.
        rule: How a sample is scored: `normalise`, against the baseline and over the divisor; `gpg`,
            against the mean, times the samples of the batch over those whose reward is not 0; or
            `pass@k`, the best of a group by its lead over the second, and the others 0.
        gpg_norm: What `gpg` divides by besides (its f_norm).
        baseline: Subtracted from the reward: `mean`, `leave-one-out` (of the other members),
            `length-weighted` (by response tokens), `greedy` (the reward of the greedy response),
            `kept` (what the trainer keeps from step to step, as recorded: prime-rl's rae) or
            `none`.
        baseline_counts: Which tokens a length-weighted baseline is weighted by: of the whole
            `response`, the `trained` ones alone, or those of them that the loss `kept` (verl, which
            rejects before it scores).
        divide_by_std: Whether the centred reward is divided by a standard deviation.
        std_grouping: Which samples that deviation is of: `same` as the baseline, `batch`, or
            `group`.
        divisor: That deviation: `std`; `std-around-baseline`; `leave-one-out-std`, of the other
            members; or the `baseline` itself.
        ddof: Delta degrees of freedom of that deviation.
        epsilon: Keeps the division finite.
        epsilon_place: `added` to the deviation; `floored`, the variance at least epsilon and
            epsilon added to its root; or `inside` the root.
        lone: What a sample gets that is alone in its group, or whose group is too small for the
            divisor: `zero`, `keep` (no baseline, 1 + epsilon as divisor; verl) or `nan`
            (OpenRLHF).
        missing: A reward, or component, that is NaN: `keep`, and its group is NaN; `exclude` it
            from statistics and sums.
        clip_before: Bounds of the reward before it is centred.
        less_kl: Whether a sample pays kl.coef times the sum of the KL of its trained tokens, after
            clip_before and before it is scored (TRL's RLOO).
        rescale: Whether what was scored is normalised again over the `batch`, by its mean, ddof and
            batch_epsilon (TRL's RLOO, normalize_advantages); samples that are NaN are left out of
            it and get 0 where missing rewards are excluded.
        clip_after: Bounds of the result.
        overlong_max_length: Tokens allowed; None for no overlong penalty.
        overlong_counts: Which tokens: of the whole `response`, the `trained` ones alone (AReaL), or
            of the `first-message` of the model (NeMo-RL).
        overlong_buffer: Tokens before that from which on the penalty rises.
        overlong_penalty: Penalty at the end of the buffer.
        overlong_floored: Whether it grows no further beyond (OpenRLHF).
        stop_properly_coef: For truncated responses; None for none.
        stop_properly_rule: Whether that does `multiply` their reward, less the overlong penalty, or
            `replace` both (OpenRLHF).
        scale_from: Range that rewards are clamped to first (NeMo-RL); None for none.
        scale_to: Range that it is mapped to.
        bias, factor: Added to a shaped reward, and what the sum is multiplied by (AReaL).
        constant_groups: What becomes of a group whose raw rewards are all equal, which teaches
            nothing: `keep`, it is trained as any; `drop`, it is left out before anything is taken
            over the batch, and no step consumes it (dynamic sampling of DAPO, slime, NeMo-RL); or
            `mask`, its samples stay in the batch and train no token, so that means over tokens do
            not count them, and those over samples as loss.denominator_rows says (SkyRL).
        constant_within: Highest deviation (divisor n - 1) of raw rewards that are equal: 0, or
            1e-6 (slime).
        costs: What a sample pays of its group's mean reward, by the share that it has of the
            largest `output` (trained tokens), `input` (the others of prompt and response) and
            `turns` of its group (prime-rl's length_penalty), before it is centred.
    """

    grouping: str = name("group", "none", "batch", "consumer-batch", "stride", "agent")
    episode_agents: tuple[str, ...] = names()
    source: str = name("sample", "token")
    unit: str = name("sample", "trajectory", "step")
    step_gamma: float = number(1.0)
    n_samples_per_prompt: int | None = count(None)
    constant_groups: str = name("keep", "drop", "mask")
    constant_within: float = number(0.0)
    costs: Mapping[str, float] = weights("output", "input", "turns")
    weights: Mapping[str, float] = weights()
    combination: str = name("sum-then-normalise", "normalise-then-sum")
    batch_epsilon: float | None = number(None)
    rule: str = name("normalise", "gpg", "pass@k")
    gpg_norm: float = number(1.0)
    baseline: str = name("mean", "none", "leave-one-out", "length-weighted", "greedy", "kept")
    baseline_counts: str = name("response", "trained", "kept")
    divide_by_std: bool = flag(True)
    std_grouping: str = name("same", "batch", "group")
    divisor: str = name("std", "std-around-baseline", "leave-one-out-std", "baseline")
    ddof: int = count(1)
    epsilon: float = number(1e-6)
    epsilon_place: str = name("added", "floored", "inside")
    lone: str = name("zero", "keep", "nan")
    missing: str = name("keep", "exclude")
    clip_before: Interval | None = interval(None)
    less_kl: bool = flag(False)
    rescale: str = name("none", "batch")
    clip_after: Interval | None = interval(None)
    overlong_max_length: int | None = count(None)
    overlong_counts: str = name("response", "trained", "first-message")
    overlong_buffer: int = count(0)
    overlong_penalty: float = number(1.0)
    overlong_floored: bool = flag(False)
    stop_properly_coef: float | None = number(None)
    stop_properly_rule: str = name("multiply", "replace")
    scale_from: Interval | None = interval(None)
    scale_to: Interval | None = interval(None)
    bias: float = number(0.0)
    factor: float = number(1.0)

    def __post_init__(self) -> None:
        for field in ("weights", "costs"):
            given = getattr(self, field)
            if isinstance(given, Mapping):  # what it is otherwise is refused by its kind
                ordered = dict(sorted(given.items(), key=lambda item: str(item[0])))
                object.__setattr__(self, field, ordered)
