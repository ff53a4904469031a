import math
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import reference_advantages as references
from trajreplay.schema import StageError
from trajreplay.stages.kernels import normalise_rewards
from trajreplay.stages.kernels.normalise import DIVISORS, GROUP_BASELINES

REWARDS = st.floats(-1e3, 1e3) | st.sampled_from([0.0, 0.1, 0.3, 0.3, 0.7, 1.0])
COHORTS = st.lists(
    st.tuples(REWARDS, st.integers(-1, 3), st.integers(0, 1), st.integers(1, 50), REWARDS),
    max_size=16,
)
OPTIONS = st.fixed_dictionaries(
    {
        "baseline": st.sampled_from(GROUP_BASELINES),
        "divisor": st.sampled_from(DIVISORS),
        "ddof": st.integers(0, 1),
        "epsilon": st.sampled_from([1e-6, 1e-4, 0.0]),
        "epsilon_place": st.sampled_from(["added", "floored", "inside"]),
        "lone": st.sampled_from(["zero", "keep", "nan"]),
    }
)
EIGHT = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
FOUR = [1.0, 0.0, 0.0, 0.5]
LEAVE_ONE_OUT = {"baseline": "leave-one-out", "divisor": "leave-one-out-std"}


def in_float64(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def in_int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def well_conditioned(rewards: list[float], divisor: str) -> list[float]:
    """Keep off a mean near 0 as divisor, and one reward far out, whose square hides the others."""
    if divisor == "baseline":
        return [abs(reward) + 0.5 for reward in rewards]
    if divisor == "leave-one-out-std":
        return [round(reward / 500.0, 1) for reward in rewards]
    return rewards


def in_groups(rewards: Sequence[float], *sizes: int, **options: Any) -> list[float]:
    """Score rewards in groups of these sizes, one after the other."""
    member = [group for group, size in enumerate(sizes) for _ in range(size)]
    scored: list[float] = normalise_rewards(
        in_float64(rewards), in_int64(member), **options
    ).tolist()
    return scored


@given(COHORTS, st.booleans(), OPTIONS)
def test_equals_a_loop_over_samples(
    samples: list[tuple[float, int, int, int, float]], batchwise: bool, options: dict[str, Any]
) -> None:
    rewards, groups, batches, lengths, greedy = (
        (list(one) for one in zip(*samples, strict=True)) if samples else ([],) * 5
    )
    rewards = well_conditioned(rewards, options["divisor"])
    greedy = well_conditioned(greedy, options["divisor"])
    shared = batches if batchwise else groups
    scored = normalise_rewards(
        in_float64(rewards),
        in_int64(groups),
        divisor_index=in_int64(shared),
        lengths=in_int64(lengths),
        greedy_rewards=in_float64(greedy),
        **options,
    )
    expected = references.normalise_rewards(
        rewards, groups, divisor_index=shared, lengths=lengths, greedy_rewards=greedy, **options
    )
    assert scored.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True)


@given(COHORTS, st.sampled_from(["std", "std-around-baseline"]), st.sampled_from(["mean", "none"]))
def test_missing_rewards_are_in_no_statistic_and_score_0(
    samples: list[tuple[float, int, int, int, float]], divisor: str, baseline: str
) -> None:
    rewards = [math.nan if length % 3 == 0 else reward for reward, _, _, length, _ in samples]
    groups = [group for _, group, _, _, _ in samples]
    options: dict[str, Any] = {"divisor": divisor, "baseline": baseline, "missing": "exclude"}
    scored = normalise_rewards(in_float64(rewards), in_int64(groups), **options)
    expected = references.normalise_rewards(rewards, groups, **options)
    assert scored.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(COHORTS, OPTIONS, st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(
    samples: list[tuple[float, int, int, int, float]], options: dict[str, Any], random: Random
) -> None:
    def scored(some: list[tuple[float, int, int, int, float]]) -> Tensor:
        return normalise_rewards(
            in_float64(well_conditioned([one[0] for one in some], options["divisor"])),
            in_int64([one[1] for one in some]),
            divisor_index=in_int64([one[2] for one in some]),
            lengths=in_int64([one[3] for one in some]),
            greedy_rewards=in_float64([one[4] for one in some]),
            **options,
        )

    order = random.sample(range(len(samples)), len(samples))
    torch.testing.assert_close(
        scored([samples[one] for one in order]),
        scored(samples)[order],
        rtol=1e-6,
        atol=1e-6,
        equal_nan=True,
    )


@given(st.floats(-1e6, 1e6), st.integers(2, 40), OPTIONS)
def test_equal_rewards_score_exactly_0(reward: float, size: int, options: dict[str, Any]) -> None:
    options = {**options, "baseline": "leave-one-out" if size % 2 else "mean"}
    assert in_groups([reward] * size, size, **options) == [0.0] * size


@pytest.mark.parametrize("reward", [0.3, 0.7, 0.1])
def test_golden_equal_rewards(reward: float) -> None:
    """G04: trainers get up to 0.9 here, out of a rounding error over their epsilon."""
    for options in ({"divisor": "std"}, LEAVE_ONE_OUT, {"divisor": "std", "epsilon": 1e-9}):
        assert in_groups([reward] * 8, 8, **options) == [0.0] * 8


@pytest.mark.parametrize(
    ("options", "for_1", "for_0"),
    [
        ({"divisor": "std"}, 1.2076124, -0.724567413),
        ({"divisor": "std", "epsilon": 1e-4}, 1.20738149, -0.724428833),
        ({"divisor": "std", "epsilon": 1e-9}, 1.20761478, -0.724568844),
        ({"baseline": "leave-one-out"}, 0.714285731, -0.428571433),
        (LEAVE_ONE_OUT, 1.46384704, -0.80178225),
    ],
    ids=["slime", "trl", "openrlhf", "rloo", "nemo-rl"],
)
def test_golden_group_of_eight(options: dict[str, Any], for_1: float, for_0: float) -> None:
    """G01."""
    expected = [for_1 if reward else for_0 for reward in EIGHT]
    assert in_groups(EIGHT, 8, **options) == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (LEAVE_ONE_OUT, [2.88674116, -0.999997973, -0.999997973, 0.288674623]),
        ({"divisor": "std"}, [1.30557966, -0.783347785, -0.783347785, 0.2611159]),
        (
            {"divisor": "std", "epsilon": 1e-4},
            [1.30530977, -0.783185899, -0.783185899, 0.261061966],
        ),
        ({"baseline": "leave-one-out"}, [0.833333313, -0.5, -0.5, 0.166666657]),
        ({"divisor": "baseline"}, [1.66666663, -1.0, -1.0, 0.333333343]),
        (
            {"baseline": "length-weighted", "lengths": torch.tensor([10, 20, 30, 40])},
            [0.7, -0.3, -0.3, 0.2],
        ),
        (
            {"baseline": "leave-one-out", "divisor": "std-around-baseline", "epsilon": 1e-5},
            [1.30556202, -0.783337176, -0.783337176, 0.261112392],
        ),
    ],
    ids=["nemo-rl", "slime", "trl", "rloo", "max-rl", "opo", "areal"],
)
def test_golden_group_of_four(options: dict[str, Any], expected: list[float]) -> None:
    """G02."""
    assert in_groups(FOUR, 4, **options) == pytest.approx(expected, rel=2e-7)


def test_a_baseline_of_0_or_less_as_divisor_scores_0() -> None:
    assert in_groups([0.0, 0.0, -1.0, 0.5], 2, 2, divisor="baseline") == [0.0] * 4
    assert math.isnan(in_groups([math.nan, 1.0], 2, divisor="baseline")[0])


def test_golden_group_of_two() -> None:
    """G03: a leave-one-out std of one other sample is 0 and divides nothing."""
    assert in_groups([1.0, 0.0], 2, **LEAVE_ONE_OUT) == [1.0, -1.0]
    assert in_groups([1.0, 0.0], 2, divisor="std") == pytest.approx([0.707105756, -0.707105756])


def test_golden_floor_of_the_variance() -> None:
    """G05: a spread below the floor, and a sample by itself in verl."""
    rewards = [0.5, 0.5005, 0.4995, 0.5]
    plain = in_groups(rewards, 4, divisor="std")
    assert plain == pytest.approx([0.0, 1.22178864, -1.22171581, 0.0], abs=1e-4)
    floored = in_groups(rewards, 4, divisor="std", epsilon_place="floored")
    assert floored == pytest.approx([0.0, 0.499523818, -0.499494046, 0.0], abs=5e-5)
    alone = in_groups([2.0], 1, divisor="std", lone="keep")
    assert alone == pytest.approx([1.99999809], abs=2e-7)


def test_golden_batch_as_one_group() -> None:
    """G06: what slime does with seven samples in groups of four and three."""
    rewards = [1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 0.0]
    as_one = in_groups(rewards, 7, divisor="std")
    assert as_one == pytest.approx([1, -1, -1, 0, 1, 1, -1], abs=2e-6)
    apart = in_groups(rewards, 4, 3, divisor="std")
    assert apart == pytest.approx(
        [1.30558, -0.78335, -0.78335, 0.26112, 0.57735, 0.57735, -1.15470], abs=5e-6
    )


def test_golden_batch_scaling() -> None:
    """G07: the mean of the group, the std of the batch."""
    scored = in_groups(
        [1.0, 0.0, 1.0, 1.0],
        2,
        2,
        divisor="std",
        divisor_index=torch.tensor([0, 0, 0, 0]),
        epsilon=1e-4,
    )
    assert scored == pytest.approx([0.9998, -0.9998, 0.0, 0.0], abs=1e-7)


def test_a_sample_by_itself_scores_by_the_rule_for_it() -> None:
    rloo: dict[str, Any] = {"baseline": "leave-one-out"}
    assert in_groups([2.0], 1, **rloo) == [0.0]
    assert in_groups([2.0], 1, **rloo, lone="keep") == [2.0]
    assert math.isnan(in_groups([2.0], 1, **rloo, lone="nan")[0])
    assert in_groups([2.0], 1, lone="nan") == [0.0]
    assert math.isnan(in_groups([2.0], 1, lone="nan", divisor="std")[0])
    assert in_groups([2.0], 1, baseline="none", divisor="std") == [0.0]
    assert in_groups([2.0], 1, baseline="none", divisor="std", lone="keep", epsilon=1.0) == [1.0]


def test_a_lone_sample_does_not_reach_the_std_of_its_batch() -> None:
    batch = torch.zeros(3, dtype=torch.int64)
    options: dict[str, Any] = {"baseline": "leave-one-out", "divisor": "std-around-baseline"}
    scored = in_groups([5.0, 1.0, 0.0], 1, 2, divisor_index=batch, epsilon=0.0, **options)
    assert scored == [0.0, 1.0, -1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("divisor", ["std", "leave-one-out-std", "std-around-baseline"])
def test_an_undefined_reward_reaches_its_group_only(bad: float, divisor: str) -> None:
    scored = in_groups([bad, 1.0, 0.5, 0.0, 1.0], 3, 2, divisor=divisor)
    assert not any(math.isfinite(one) for one in scored[:3])
    assert all(math.isfinite(one) for one in scored[3:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_sums_run_in_float64(dtype: torch.dtype) -> None:
    rewards = torch.tensor(FOUR, dtype=dtype)
    scored = normalise_rewards(rewards, torch.zeros(4).long(), divisor="std")
    assert scored.dtype == dtype
    exact = normalise_rewards(rewards.double(), torch.zeros(4).long(), divisor="std")
    torch.testing.assert_close(scored, exact.to(dtype), rtol=0.0, atol=0.0)
    whole = normalise_rewards(torch.tensor([1, 0]), torch.zeros(2).long())
    assert whole.dtype == torch.float64


def test_inputs_are_not_changed() -> None:
    rewards = torch.tensor(FOUR)
    normalise_rewards(rewards, torch.zeros(4).long(), baseline="none").add_(1.0)
    assert rewards.tolist() == FOUR


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "median"}, "no baseline 'median', expected one of none, mean"),
        ({"divisor": "range"}, "no divisor 'range', expected one of none, std"),
        ({"lone": "drop"}, "no lone rule 'drop'"),
        ({"missing": "drop"}, "no missing rule 'drop'"),
        ({"epsilon_place": "outside"}, "no epsilon_place 'outside'"),
        ({"ddof": 2}, "ddof is 2, expected 0 or 1"),
        ({"baseline": "greedy"}, "baseline 'greedy' without greedy_rewards"),
        ({"baseline": "length-weighted"}, "baseline 'length-weighted' without lengths"),
        ({"divisor_index": torch.zeros(2)}, "divisor_index has 2 along S, expected 3"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError, match=message):
        in_groups([1.0, 0.0, 1.0], 2, 1, **options)
