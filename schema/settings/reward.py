"""Settings of the stage reward.post_process."""

from __future__ import annotations

from dataclasses import dataclass

from trajreplay.schema.settings.knobs import Interval, count, flag, interval, name, number


@dataclass(frozen=True)
class RewardSettings:
    """Reward post-processing: shape, clip, centre, divide, clip.

    Args:
        grouping: Which samples share statistics: `group`, those of one prompt; `batch`, all of the
            cohort; `consumer-batch`, those handed over together; `stride`, every
            `n_samples_per_prompt` rows of a rank, in row order; `none` for rewards used as given.
        unit: What is normalised: every `sample`, or every `trajectory` once, however many fragments
            it was cut into.
        n_samples_per_prompt: Members that every group must have; None leaves it unchecked.
        baseline: Subtracted from the reward: `mean`, `leave-one-out` (of the other members),
            `length-weighted` (by response tokens) or `none`.
        divide_by_std: Whether the centred reward is divided by a standard deviation.
        std_grouping: Which samples that deviation is of: `same` as the baseline, or `batch`.
        divisor: That deviation: `std`; `std-around-baseline`; `leave-one-out-std`, of the other
            members; or the `baseline` itself.
        ddof: Delta degrees of freedom of that deviation.
        epsilon: Keeps the division finite.
        epsilon_place: `added` to the deviation; `floored`, the variance at least epsilon and
            epsilon added to its root; or `inside` the root.
        lone: What a sample gets that is alone in its group, or whose group is too small for the
            divisor: `zero`, `keep` (no baseline, 1 + epsilon as divisor; verl) or `nan`
            (OpenRLHF).
        missing: A reward that is NaN: `keep`, and its group is NaN; `exclude` it from statistics.
        clip_before: Bounds of the reward before it is centred.
        clip_after: Bounds of the result.
        overlong_max_length: Tokens allowed; None for no overlong penalty.
        overlong_counts: Which tokens: of the whole `response`, or the `trained` ones alone.
        overlong_buffer: Tokens before that from which on the penalty rises.
        overlong_penalty: Penalty at the end of the buffer.
        overlong_floored: Whether it grows no further beyond (OpenRLHF).
        stop_properly_coef: For truncated responses; None for none.
        stop_properly_rule: Whether that does `multiply` their reward or `replace` it.
        scale_from: Range that rewards are clamped to first (NeMo-RL); None for none.
        scale_to: Range that it is mapped to.
    """

    grouping: str = name("group", "none", "batch", "consumer-batch", "stride")
    unit: str = name("sample", "trajectory")
    n_samples_per_prompt: int | None = count(None)
    baseline: str = name("mean", "none", "leave-one-out", "length-weighted")
    divide_by_std: bool = flag(True)
    std_grouping: str = name("same", "batch")
    divisor: str = name("std", "std-around-baseline", "leave-one-out-std", "baseline")
    ddof: int = count(1)
    epsilon: float = number(1e-6)
    epsilon_place: str = name("added", "floored", "inside")
    lone: str = name("zero", "keep", "nan")
    missing: str = name("keep", "exclude")
    clip_before: Interval | None = interval(None)
    clip_after: Interval | None = interval(None)
    overlong_max_length: int | None = count(None)
    overlong_counts: str = name("response", "trained")
    overlong_buffer: int = count(0)
    overlong_penalty: float = number(1.0)
    overlong_floored: bool = flag(False)
    stop_properly_coef: float | None = number(None)
    stop_properly_rule: str = name("multiply", "replace")
    scale_from: Interval | None = interval(None)
    scale_to: Interval | None = interval(None)
