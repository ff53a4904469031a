"""Two runs held against each other: alignment, the first difference, growth, settings."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.captures import record, sample
from trajreplay import Lake, QueryError, RecomputeConfig
from trajreplay.query.differences import DiffReport
from trajreplay.query.differences.compare import Tolerance, _differing, compare_column
from trajreplay.query.manifest.catalog import Cohort
from trajreplay.schema.lakefile import open_lake
from trajreplay.schema.tables import STEPS
from trajreplay.writer.attempts import reserve_next_attempt

SAMPLES = 4
LENGTH = 3


def values(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return -np.random.default_rng(seed).random((SAMPLES, LENGTH), dtype=np.float32)


def step(
    lake: Lake,
    run: str,
    step_id: int,
    *,
    change: tuple[str, int, int, float] | None = None,
    ids: list[str] | None = None,
    order: list[int] | None = None,
    loss: float | None = 0.5,
    rewards: list[float] | None = None,
    tokens: list[list[int]] | None = None,
    losses: list[float] | None = None,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """One optimizer step; `change` is (field, sample, token, value), `losses` of each sample.

    `more` are further fields of every sample.
    """
    ids = ids or [f"s-{number}" for number in range(SAMPLES)]
    order = order or list(range(SAMPLES))
    fields = {"old_log_probs": values(step_id), "log_probs": values(step_id + 100)}
    if change is not None:
        name, row, token, value = change
        fields[name][row, token] = value
    rewards = rewards or [0.5] * SAMPLES
    tokens = tokens or [[9, row, step_id, 1] for row in range(SAMPLES)]

    def use(capture: Any) -> None:
        capture.samples(
            [
                sample(
                    row,
                    LENGTH,
                    sample_id=ids[row],
                    reward=rewards[row],
                    total_length=len(tokens[row]),
                    **more or {},
                )
                for row in order
            ]
        )
        capture.tensor("tokens", [np.array(tokens[row], np.int32) for row in order])
        for name, found in fields.items():
            capture.tensor(name, [found[row] for row in order])
        if loss is not None:
            capture.expected("loss.policy", loss=loss)
        if losses is not None:
            scalars = {"scope": "sample", "loss": [losses[row] for row in order]}
            capture.expected("loss.policy", **scalars)

    usual = {
        "run_id": run,
        "rollout_id": 0,
        "step_id": step_id,
        "settings": RecomputeConfig(n_samples_per_prompt=SAMPLES),
        "stages": ("sample", "loss.policy"),
    }
    record(lake, use, **usual | options)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def two(lake: Lake, steps: int = 3, **last: Any) -> DiffReport:
    """Runs a and b of some steps, of which the last of b is changed."""
    for step_id in range(steps):
        step(lake, "a", step_id)
        step(lake, "b", step_id, **(last if step_id == steps - 1 else {}))
    return lake.diff("a", "b")


def test_equal_runs_are_the_same_and_read_no_values(lake: Lake) -> None:
    report = two(lake)
    assert (report.verdict, report.cohorts, report.identical) == ("same", 3, 3)
    assert report.first is None


def test_the_first_difference_has_step_stage_field_sample_token_and_both_values(lake: Lake) -> None:
    report = two(lake, change=("old_log_probs", 2, 1, -7.0))
    first = report.first
    assert first is not None
    assert (first.rollout_id, first.step_id, first.stage, first.field) == (
        0,
        2,
        "sample",
        "old_log_probs",
    )
    assert (first.sample_id, first.token) == ("s-2", 1)
    assert (first.left, first.right) == (float(values(2)[2, 1]), -7.0)
    assert (first.samples, first.differing_samples) == (4, 1)
    assert (first.values, first.differing_values) == (12, 1)
    assert first.max_abs == first.mean_abs == abs(first.left + 7.0)
    assert report.identical == 2


def test_the_order_of_samples_does_not_matter(lake: Lake) -> None:
    step(lake, "a", 0)
    step(lake, "b", 0, order=[3, 1, 0, 2])
    assert lake.diff("a", "b").verdict == "same"


def test_an_earlier_stage_comes_first_and_a_loss_last(lake: Lake) -> None:
    report = two(lake, change=("log_probs", 0, 0, -1.0), rewards=[0.5, 1.5, 0.5, 0.5], loss=0.75)
    assert [one.stage for one in report.fields] == ["sample", "reward.post_process", "loss.policy"]
    assert report.fields[-1].field == "loss"
    assert report.fields[-1].max_abs == 0.25


def test_a_scalar_that_only_one_side_recorded_differs_and_says_what_it_is_of(lake: Lake) -> None:
    (one,) = two(lake, loss=None).fields
    assert (one.field, one.left, one.right, one.max_abs) == ("loss", 0.5, None, None)
    assert (one.rank, one.scope, one.micro_batch_id) == (0, "rank", None)


def test_growth_is_a_row_a_cohort_and_field(lake: Lake) -> None:
    for step_id in range(3):
        step(lake, "a", step_id)
        step(lake, "b", step_id, change=("log_probs", 0, 0, -1.0 - step_id))
    report = lake.diff("a", "b")
    table = report.arrow()
    assert table["step_id"].to_pylist() == [0, 1, 2]
    assert table["field"].to_pylist() == ["log_probs"] * 3
    grown = table["max_abs"].to_pylist()
    assert grown == [abs(float(values(100 + n)[0, 0]) + 1 + n) for n in range(3)]


def test_a_nan_equals_itself_and_differs_from_a_number(lake: Lake) -> None:
    nan = ("old_log_probs", 1, 0, math.nan)
    step(lake, "a", 0, change=nan)
    step(lake, "b", 0, change=nan)
    step(lake, "c", 0)
    assert lake.diff("a", "b").verdict == "same"
    first = lake.diff("a", "c").first
    assert first is not None
    assert (first.token, first.differing_values, first.max_abs) == (0, 1, None)


def test_within_a_tolerance_nothing_differs(lake: Lake) -> None:
    for run, value in (("a", -1.0), ("b", -1.0625)):
        step(lake, run, 0, change=("old_log_probs", 1, 0, value))
    assert lake.diff("a", "b").verdict == "different"
    assert lake.diff("a", "b", atol=0.0625).verdict == "same"
    assert lake.diff("a", "b", atol=0.0624).verdict == "different"
    assert lake.diff("a", "b", rtol=0.06).verdict == "same"


def test_settings_that_differ_are_named_once_with_their_first_cohort(lake: Lake) -> None:
    other = RecomputeConfig(n_samples_per_prompt=SAMPLES, eps_clip=0.1)
    for step_id in range(2):
        step(lake, "a", step_id)
        step(lake, "b", step_id, settings=other)
    report = lake.diff("a", "b")
    named = {one.setting: (one.left, one.right, one.step_id) for one in report.settings}
    assert named["loss.eps_clip"] == (0.2, 0.1, 0)
    assert report.verdict == "different"
    assert report.fields == []


@pytest.mark.parametrize(
    ("left", "right", "told"),
    [
        ([0.2, 0.2, 0.2], [0.2, 0.2, 0.3], (0.2, [0.2, 0.2, 0.3])),
        ([0.2, 0.2, 0.3], [0.2, 0.3, 0.3], ([0.2, 0.2, 0.3], [0.2, 0.3, 0.3])),
    ],
)
def test_settings_of_every_rank_are_compared(
    left: list[float], right: list[float], told: tuple[Any, Any], lake: Lake
) -> None:
    for run, clips in (("a", left), ("b", right)):
        for rank, clip in enumerate(clips):
            config = RecomputeConfig(n_samples_per_prompt=SAMPLES, eps_clip=clip)
            step(lake, run, 0, rank=rank, expected_ranks=[0, 1, 2], settings=config)
    report = lake.diff("a", "b")
    named = {one.setting: (one.left, one.right) for one in report.settings}
    assert named["loss.eps_clip"] == told
    assert report.verdict != "same"


def test_weights_that_sampled_and_lengths_that_cut_are_compared(lake: Lake) -> None:
    for run, version, cut in (("a", 4, False), ("b", 4, False), ("c", 5, False), ("d", 4, True)):
        spans = [(0, LENGTH, version)]
        step(lake, run, 0, more={"weight_versions": spans, "truncated": cut})
    assert lake.diff("a", "b").verdict == "same"
    (one,) = lake.diff("a", "c").fields
    assert (one.field, one.differing_samples) == ("weight_versions", SAMPLES)
    assert one.right == {"start": 0, "stop": LENGTH, "version": 5}
    (one,) = lake.diff("a", "d").fields
    assert (one.field, one.left, one.right) == ("truncated", False, True)


def test_values_that_were_recorded_for_each_sample_are_compared(lake: Lake) -> None:
    step(lake, "a", 0, losses=[0.1, 0.2, 0.3, 0.4])
    step(lake, "b", 0, losses=[0.1, 9.0, 0.3, 0.4], order=[2, 1, 0, 3])
    report = lake.diff("a", "b")
    (one,) = report.fields
    assert (one.stage, one.field, one.scope) == ("loss.policy", "loss", "sample")
    assert (one.sample_id, one.left, one.right, one.differing_samples) == ("s-1", 0.2, 9.0, 1)
    assert report.identical == 0


def test_values_of_samples_that_one_side_did_not_record_differ(lake: Lake) -> None:
    step(lake, "a", 0, losses=[0.1, math.nan, 0.3, 0.4])
    step(lake, "b", 0, losses=[0.1, math.nan, 0.3, 0.4])
    step(lake, "c", 0)
    assert lake.diff("a", "b").verdict == "same"
    (one,) = lake.diff("a", "c").fields
    assert (one.differing_samples, one.right) == (SAMPLES, None)


def test_values_of_samples_without_partners_are_told_by_their_spread(lake: Lake) -> None:
    same = [[1, 2, 3, 4]] * SAMPLES
    step(lake, "a", 0, tokens=same, losses=[0.1] * SAMPLES)
    step(lake, "b", 0, tokens=same, losses=[0.2] * SAMPLES, ids=["x", "y", "z", "w"])
    changed = {one.field: one.mean for one in lake.diff("a", "b").distributions if one.differs}
    assert changed == {"loss.policy.loss": (0.1, 0.2)}


FLOATS = st.floats(width=32) | st.sampled_from([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e38])


def is_equal(left: float, right: float, tolerance: Tolerance) -> bool:
    """The definition, a pair at a time."""
    if math.isfinite(left) and math.isfinite(right):
        return abs(left - right) <= tolerance.atol + tolerance.rtol * abs(right)
    return left == right or (math.isnan(left) and math.isnan(right))


@given(
    st.lists(st.tuples(FLOATS, FLOATS), min_size=1),
    st.sampled_from([0.0, 1e-6, 1.0]),
    st.sampled_from([1e-6, 0.5, 3.0]),
)
def test_a_value_that_is_not_finite_equals_itself_alone_under_any_tolerance(
    pairs: list[tuple[float, float]], atol: float, rtol: float
) -> None:
    tolerance = Tolerance(atol, rtol)
    left, right = (pa.array(one, pa.float32()) for one in zip(*pairs, strict=True))
    found = _differing(left, right, tolerance).to_pylist()
    for (a, b), differs in zip(pairs, found, strict=True):
        if not (math.isnan(a) and math.isnan(b)):  # of NaN the bits count
            assert differs is not is_equal(a, b, tolerance), (a, b)


@pytest.mark.parametrize("tolerance", [math.inf, math.nan, -1.0])
def test_a_tolerance_that_allows_everything_or_nothing_is_refused(
    lake: Lake, tolerance: float
) -> None:
    two(lake)
    with pytest.raises(QueryError, match=r"atol is .*, expected a finite number"):
        lake.diff("a", "b", atol=tolerance)
    with pytest.raises(QueryError, match=r"rtol is .*, expected a finite number"):
        lake.diff("a", "b", rtol=tolerance)


def test_samples_of_other_names_are_told_by_their_tokens(lake: Lake) -> None:
    step(lake, "a", 0)
    step(lake, "b", 0, ids=["x", "y", "z", "w"], change=("log_probs", 3, 2, -4.0))
    report = lake.diff("a", "b")
    assert report.by_content == 1
    assert report.first is not None
    assert (report.first.sample_id, report.first.token) == ("s-3", 2)


def test_content_that_is_there_twice_is_ambiguous_and_distributions_remain(lake: Lake) -> None:
    same = [[1, 2, 3, 4]] * SAMPLES
    step(lake, "a", 0, tokens=same)
    step(lake, "b", 0, tokens=same, ids=["x", "y", "z", "w"], rewards=[1.0] * SAMPLES)
    report = lake.diff("a", "b")
    assert report.fields == []
    assert "twice" in report.unaligned["rollout 0 step 0"]
    changed = {one.field: one.mean for one in report.distributions if one.differs}
    assert changed == {"reward": (0.5, 1.0)}
    assert report.verdict == "different"


def test_what_cannot_be_aligned_and_has_equal_distributions_is_no_pass(lake: Lake) -> None:
    same = [[1, 2, 3, 4]] * SAMPLES
    step(lake, "a", 0, tokens=same)
    step(lake, "b", 0, tokens=same, ids=["x", "y", "z", "w"])
    assert lake.diff("a", "b").verdict == "refused"


def test_samples_and_cohorts_of_one_side_are_counted(lake: Lake) -> None:
    step(lake, "a", 0)
    step(lake, "b", 0, ids=["s-0", "s-1", "s-2", "other"])
    step(lake, "b", 1)
    report = lake.diff("a", "b")
    assert report.unpaired == {"rollout 0 step 0": (1, 1)}
    assert report.only_right == ["rollout 0 step 1"]
    assert report.verdict == "different"


def test_a_cohort_that_is_not_whole_is_refused(lake: Lake) -> None:
    step(lake, "a", 0)
    step(lake, "b", 0, expected_ranks=[0, 1])
    report = lake.diff("a", "b")
    assert report.verdict == "refused"
    assert "rank 1" in report.refused["rollout 0 step 0"]


def test_two_attempts_of_a_run_are_held_against_each_other(lake: Lake) -> None:
    for step_id in range(2):
        step(lake, "a", step_id)
        step(lake, "a", step_id, attempt=1, change=("old_log_probs", 0, 0, -5.0))
    report = lake.diff("a", attempts=(0, 1))
    assert (report.left, report.right) == ("run a attempt 0", "run a attempt 1")
    assert report.first is not None
    assert report.first.right == -5.0


def test_two_lakes_are_held_against_each_other(lake: Lake, tmp_path: Path) -> None:
    other = Lake.create(tmp_path / "other")
    step(lake, "a", 0)
    step(other, "renamed", 0)
    assert lake.diff(other=other).verdict == "same"
    step(other, "renamed", 1)
    other.refresh()
    assert lake.diff(other=other).only_right == ["rollout 0 step 1"]


def test_runs_without_a_common_cohort_and_unknown_runs_are_usage_errors(lake: Lake) -> None:
    step(lake, "a", 0)
    step(lake, "b", 1)
    with pytest.raises(
        QueryError, match="in common: run a has step 0:0, run b has step 0:1"
    ) as apart:
        lake.diff("a", "b")
    assert "trajreplay info" in apart.value.hint
    reserve_next_attempt(open_lake(lake.path), "empty")
    with pytest.raises(QueryError, match=r"^run empty captured no rollout or step: nothing can"):
        Lake.open(lake.path).diff("a", "empty")
    with pytest.raises(QueryError):
        lake.diff("a", "nobody")
    with pytest.raises(QueryError, match="2 runs"):
        lake.diff()


def test_a_difference_of_length_is_where_the_shorter_ends(lake: Lake) -> None:
    step(lake, "a", 0)
    step(lake, "b", 0, tokens=[[9, 0, 0, 1], [9, 1, 0, 1], [9, 2, 0, 1, 5], [9, 3, 0, 1]])
    first = lake.diff("a", "b").first
    assert first is not None
    assert (first.field, first.sample_id, first.token) == ("total_length", "s-2", None)


def test_the_report_is_plain_data(lake: Lake) -> None:
    report = two(lake, change=("old_log_probs", 2, 1, -7.0))
    assert json.loads(json.dumps(report.to_json()))["first"]["sample_id"] == "s-2"


@pytest.mark.parametrize(
    ("left", "right", "tolerance", "token"),
    [
        ([float("nan"), 1.0, 2.0], [float("nan"), 1.0], Tolerance(), 2),
        ([1.0, 1.5, 2.0], [1.0, 1.5000001], Tolerance(atol=0.1), 2),
        ([1.0, 1.5, 2.0], [1.0, 1.5000001], Tolerance(), 1),
        ([0.0, 1.0], [-0.0], Tolerance(), 0),
        ([1.0, 2.0], [], Tolerance(), 0),
        ([1.0, 2.0], None, Tolerance(), 0),
    ],
)
def test_of_samples_of_unequal_length_the_first_token_is_one_that_differs(
    left: list[float], right: list[float] | None, tolerance: Tolerance, token: int
) -> None:
    kind = pa.list_(pa.float32())
    rows = pa.table({"rank": [0, 0], "sample_id": ["a", "b"]})
    for sides in ((left, right), (right, left)):
        first, second = (pa.array([[1.0], one], kind) for one in sides)
        column, cohort = STEPS["old_log_probs"], Cohort("r", 0, 0, 0)
        found = compare_column(cohort, "sample", column, first, second, rows, tolerance)
        assert found is not None
        assert (found.sample_id, found.token) == ("b", token)
