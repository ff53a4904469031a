"""Statistics of any selection: equal to plain loops, independent of threads, honest about pairs."""

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers.captures import record, sample
from tests.helpers.mismatches import (
    MASK,
    OLD,
    ROLLOUT,
    as_rows,
    differences,
    measured,
    only_row,
    token_reference,
    write_pair,
)
from trajreplay import DatasetError, Lake, QueryError
from trajreplay.query import Selection
from trajreplay.schema.lakefile import open_lake
from trajreplay.writer.attempts import reserve_next_attempt

_log_prob = st.floats(-60.0, 0.0, width=32)
_close = st.floats(-0.0625, 0.0625, width=32)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[Any], list[Any], list[Any]]:
    """Sequences of a trainer and a sampler, near or far apart, with masks."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    rollout = [draw(st.lists(_log_prob, min_size=n, max_size=n)) for n in lengths]
    other = _log_prob if draw(st.booleans()) else None
    old = [
        [draw(other) if other is not None else one + draw(_close) for one in row] for row in rollout
    ]
    masks = [draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    return old, rollout, masks


@given(pairs())
def test_equals_a_loop_over_tokens(tmp_path_factory: Any, values: Any) -> None:
    lake = Lake.create(tmp_path_factory.mktemp("pairs") / "lake")
    write_pair(lake, *values)
    expected = token_reference(differences(*values)) if any(map(any, values[2])) else None
    if expected is None:
        with pytest.raises(QueryError, match="nothing to compare"):
            only_row(lake)
        return
    row = only_row(lake)
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-11, abs=1e-15)


@given(pairs())
def test_the_spread_of_the_ratio_is_that_of_clamped_ones(
    tmp_path_factory: Any, values: Any
) -> None:
    flat = [min(max(d, -20.0), 20.0) for row in differences(*values) for d in row]
    assume(flat)
    lake = Lake.create(tmp_path_factory.mktemp("pairs") / "lake")
    write_pair(lake, *values)
    # Digits are lost where ratios that are far from 1 are nearly equal.
    expected = statistics.pstdev(map(math.exp, flat))
    top = max(abs(math.expm1(d)) for d in flat)
    lost = 1e-7 * max(top, math.sqrt(top))
    assert only_row(lake)["importance_ratio_std"] == pytest.approx(expected, rel=1e-6, abs=lost)


@pytest.mark.parametrize("delta", [1e-7, 1e-4, 0.03125, 0.0313, 0.4, 36.0, -36.0, -1e-6])
def test_small_and_large_differences_keep_their_digits(delta: float, tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    old, rollout = [[delta * 0.5 - 40.0 + 40.0]], [[-delta * 0.5]]
    write_pair(lake, old, rollout)
    expected = token_reference(differences(old, rollout, [[1]]))
    row = only_row(lake)
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-11, abs=1e-300)
    assert row["generation_kl"] >= 0


def test_the_largest_difference_of_equal_values_has_no_sign(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, [[-1.0, -2.0]], [[-1.0, -2.0]])
    assert math.copysign(1.0, only_row(lake)["abs_delta_max"]) == 1.0


def many(lake: Lake, *, samples: int = 40, length: int = 900, spread: float = 0.03) -> None:
    """Two steps of enough tokens for several threads."""
    for step_id in range(2):
        chance = np.random.default_rng([7, step_id])
        rollout = [-chance.exponential(0.5, length).astype(np.float32) for _ in range(samples)]
        old = [one + chance.normal(0, spread, length).astype(np.float32) for one in rollout]
        write_pair(lake, old, rollout, step_id=step_id)


def test_no_bit_depends_on_the_number_of_threads(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    many(lake)
    one, *others = [
        measured(lake, threads=threads, by=["step", "position"]) for threads in (1, 2, 3, 8)
    ]
    assert all(other.table.equals(one.table) for other in others)


def test_no_bit_of_far_tokens_depends_on_the_number_of_threads(tmp_path: Path) -> None:
    """There are so many of them that each thread of DuckDB would take a share of a sample."""
    lake = Lake.create(tmp_path)
    many(lake, samples=60, length=4000, spread=0.7)
    one, *others = [measured(lake, threads=threads, by=["step"]) for threads in (1, 2, 5, 8)]
    assert all(other.table.equals(one.table) for other in others)


def test_means_over_steps_are_unweighted_beside_the_mean_over_tokens(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, [[-1.0]], [[-1.5]], step_id=0)
    write_pair(lake, [[-1.0] * 3], [[-1.25] * 3], step_id=1)
    row = only_row(lake)
    assert row["abs_delta"] == (0.5 + 0.25) / 2
    assert row["abs_delta_token_mean"] == (0.5 + 3 * 0.25) / 4
    assert (row["abs_delta_step_min"], row["abs_delta_step_max"]) == (0.25, 0.5)
    assert (row["steps"], row["valid_tokens"], row["over_0_5"]) == (2, 4, 0)


def test_a_threshold_counts_only_what_is_beyond_it(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    above = float(np.nextafter(np.float32(-1.0), np.float32(0)))
    write_pair(lake, [[-1.0, above, -3.0]], [[-1.5, -1.5, -1.0]])
    row = only_row(lake, thresholds=[0.5, 1.0, 2.0])
    assert (row["over_0_5"], row["over_1_0"], row["over_2_0"]) == (2, 1, 0)
    assert row["over_0_5_fraction"] == 2 / 3


@pytest.mark.parametrize("by", ["run", "rollout", "step", "rank", "position", "length"])
def test_groups_hold_every_token_once(by: Any, tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    for rollout_id in range(2):
        for rank in range(2):
            long = [-1.0 - index / 1024 for index in range(300 + 300 * rank)]
            write_pair(
                lake,
                [long, [-1.0]],
                [[-1.0] * len(long), [-1.5]],
                rollout_id=rollout_id,
                rank=rank,
                expected_ranks=[0, 1],
                first=10 * rank,
            )
    whole = only_row(lake)
    groups = measured(lake, by=[by]).table.to_pylist()
    sizes = {"run": 1, "rollout": 2, "step": 2, "rank": 2, "position": 3, "length": 3}
    assert len(groups) == sizes[by]
    for name in ("valid_tokens", "over_0_5", "over_1_0", "equal_tokens"):
        assert sum(one[name] for one in groups) == whole[name]
    assert max(one["abs_delta_max"] for one in groups) == whole["abs_delta_max"]


def test_positions_are_told_apart_in_powers_of_two(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    rollout = [-1.0] * 600
    old = [-1.0 + index / 4096 for index in range(600)]
    write_pair(lake, [old], [rollout])
    groups = measured(lake, by=["position"]).table.to_pylist()
    found = {one["position_from"]: one for one in groups}
    for (low, high), one in zip(pairwise([0, 256, 512, 600]), groups, strict=True):
        d = np.abs(np.asarray(old[low:high], np.float32).astype(float) + 1.0)
        assert one["position_from"] == low
        assert one["abs_delta"] == pytest.approx(d.mean(), rel=1e-12)
        assert one["abs_delta_p99"] == pytest.approx(np.quantile(d, 0.99), rel=1e-12)
        assert one["sequences"] is None  # a part of a sample's tokens is no sequence
    assert sum(one["valid_tokens"] for one in found.values()) == 600


SPANS = [
    {"weight_versions": [(0, 2, 7), (2, 3, 8)]},
    {"weight_versions": [(0, 1, 8)]},
]


def test_tokens_of_other_weights_are_left_out_and_counted(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK, fields=SPANS, version=8)
    report = measured(lake)
    (row,) = report.table.to_pylist()
    assert row["valid_tokens"] == 3  # one of each span of 8, and one that no span covers
    unknown, left_out = report.findings
    assert (unknown.severity, left_out.severity) == ("warning", "info")
    assert "which sampled 1 of the valid tokens is not, of 0:0: " in unknown.message
    assert left_out.message.startswith("2 valid tokens are left out, of 0:0: ")
    assert only_row(lake, any_version=True)["valid_tokens"] == 5


def test_tokens_are_grouped_by_the_weights_that_sampled_them(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK, fields=SPANS, version=8)
    groups = measured(lake, by=["weight_version"], any_version=True).table.to_pylist()
    assert {one["weight_version"]: one["valid_tokens"] for one in groups} == {7: 2, 8: 2, None: 1}


def test_tokens_all_sampled_by_other_weights_are_nothing_to_compare(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK, fields=[{"weight_versions": [(0, 3, 7)]}] * 2, version=8)
    with pytest.raises(QueryError, match="5 tokens were sampled by other weights") as refused:
        measured(lake)
    assert "--any-version" in refused.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "copy:rollout_log_probs"}, "old_log_probs is a copy of rollout_log_probs"),
        ({"sampled": "copy:old_log_probs"}, "rollout_log_probs is a copy of old_log_probs"),
        ({"source": "sampler"}, "old_log_probs comes from the sampler"),
        ({"sampled": "trainer"}, "rollout_log_probs comes from the trainer"),
    ],
)
def test_a_column_that_is_said_to_be_the_other_is_refused(
    options: Any, message: str, tmp_path: Path
) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK, **options)
    with pytest.raises(DatasetError, match=message):
        measured(lake)


def test_columns_that_are_equal_throughout_are_an_error(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    masked = [*ROLLOUT[1][:2], -9.0]  # under the mask anything may stand
    write_pair(lake, [ROLLOUT[0], masked], ROLLOUT, MASK)
    report = measured(lake)
    assert not report.ok
    assert "equal in every token of every step" in report.findings[0].message
    assert report.table["generation_kl"].to_pylist() == [0.0]


def test_columns_that_are_equal_in_one_step_are_a_warning(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK, step_id=0)
    write_pair(lake, ROLLOUT, ROLLOUT, MASK, step_id=1)
    report = measured(lake)
    assert report.ok
    (finding,) = report.findings
    assert finding.severity == "warning"
    assert finding.message.endswith("equal in every token of 1 of 2 steps: 0:1")


def test_different_temperatures_are_an_error(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK, temperatures=(1.0, 0.7))
    report = measured(lake)
    (finding,) = report.findings
    assert finding.message == (
        "the log-probs were taken at different temperatures: old_log_probs at 1.0 and "
        "rollout_log_probs at 0.7"
    )
    assert not report.ok


def test_temperatures_are_compared_in_each_capture(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    for step_id, both in enumerate([(1.0, 1.0), (0.7, 0.7), (0.5, None)]):
        write_pair(lake, OLD, ROLLOUT, MASK, step_id=step_id, temperatures=both)
    assert measured(lake).ok, "a run may change its temperature"
    write_pair(lake, OLD, ROLLOUT, MASK, step_id=3, temperatures=(1.0, 0.7))
    write_pair(lake, OLD, ROLLOUT, MASK, step_id=4, temperatures=(0.7, 1.0))
    finding, _ = measured(lake).findings
    assert finding.message == (
        "the log-probs were taken at different temperatures: old_log_probs at 0.7 and "
        "rollout_log_probs at 1.0; old_log_probs at 1.0 and rollout_log_probs at 0.7"
    )


UNKNOWN = "whether they are the same is not known"


@pytest.mark.parametrize(
    ("stated", "unproven"),
    [
        ((None, None), None),
        ((0.7, 0.7), None),
        ((0.7, None), "the temperature of old_log_probs is stated (0.7) and that of rollout_log_"),
        ((None, 1.0), "the temperature of rollout_log_probs is stated (1.0) and that of old_log_"),
    ],
)
def test_a_temperature_that_one_side_states_is_not_taken_for_that_of_the_other(
    stated: Any, unproven: str | None, tmp_path: Path
) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK, temperatures=stated)
    report = measured(lake)
    assert report.ok
    (told,) = report.unproven.values()
    found = [(one.severity, one.message) for one in report.findings]
    assert found == [("warning", one) for one in told]
    assert [one.startswith(unproven or "-") for one in told] == ([True] if unproven else [])
    assert all(one.endswith(UNKNOWN) for one in told)


@pytest.mark.parametrize(
    ("trainer", "spans", "sampler", "unproven", "left_out"),
    [
        (None, None, None, None, 0),
        (5, [(0, 3, 5)], None, None, 0),
        (5, None, 5, None, 0),
        (5, None, 4, None, 5),
        (5, [(0, 3, 4)], 5, None, 5),  # what each token says counts before what all do
        (5, None, None, "which sampled 5 of the valid tokens is not, of 0:0", 0),
        (5, [(0, 2, 5)], None, "which sampled 1 of the valid tokens is not, of 0:0", 0),
        (None, [(0, 3, 5)], None, "which recomputed old_log_probs is not", 0),
        (None, None, 5, "which recomputed old_log_probs is not", 0),
    ],
)
def test_weights_that_one_side_states_are_not_taken_for_those_of_the_other(
    trainer: int | None,
    spans: Any,
    sampler: int | None,
    unproven: str | None,
    left_out: int,
    tmp_path: Path,
) -> None:
    lake = Lake.create(tmp_path)
    fields = [{"weight_versions": spans}] * 2 if spans else None
    write_pair(*(lake, OLD, ROLLOUT, MASK), fields=fields, version=trainer, sampled_version=sampler)
    if left_out:
        with pytest.raises(QueryError, match="5 tokens were sampled by other weights"):
            measured(lake)
        return
    report = measured(lake)
    assert report.table["valid_tokens"].to_pylist() == [5]
    (told,) = report.unproven.values()
    assert len(told) == (unproven is not None)
    assert all(f"{unproven}" in one and one.endswith(UNKNOWN) for one in told)
    assert [one.message for one in report.findings] == list(told)


def test_a_difference_that_is_not_finite_is_counted_and_an_error(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, [[-1.0, math.nan, -math.inf]], [[-1.5, -1.0, -1.0]])
    report = measured(lake)
    (row,) = report.table.to_pylist()
    assert row["non_finite_tokens"] == 2
    assert math.isnan(row["abs_delta_max"])
    assert math.isnan(row["generation_kl"])
    assert not report.ok


@given(pairs(), st.data())
def test_nothing_is_made_of_a_difference_that_is_no_number(
    tmp_path_factory: Any, values: Any, data: st.DataObject
) -> None:
    old, rollout, masks = values
    assume(any(map(len, old)))
    row = data.draw(st.sampled_from([row for row, one in enumerate(old) if one]))
    token = data.draw(st.integers(0, len(old[row]) - 1))
    old[row][token], masks[row][token] = math.nan, 1
    lake = Lake.create(tmp_path_factory.mktemp("nan") / "lake")
    write_pair(lake, old, rollout, masks)
    found = only_row(lake)
    flat = [d for one in differences(old, rollout, masks) for d in one]
    counts = {
        "valid_tokens": len(flat),
        "over_0_5": sum(abs(d) > 0.5 for d in flat),
        "over_1_0": sum(abs(d) > 1.0 for d in flat),
        "equal_tokens": sum(d == 0 for d in flat),
        "truncated_share": sum(d > math.log(2) for d in flat) / len(flat),
    }
    assert {name: found[name] for name in counts} == pytest.approx(counts)
    others = token_reference([[0.0]]).keys() - counts.keys()
    assert [name for name in sorted(others) if not math.isnan(found[name])] == []


@pytest.mark.parametrize("delta", [math.inf, -math.inf])
def test_an_infinite_difference_gives_infinite_divergences(delta: float, tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, [[-1.0 if delta > 0 else -math.inf]], [[-math.inf if delta > 0 else -1.0]])
    row = only_row(lake)
    assert [row[name] for name in ("generation_kl", "policy_kl")] == [math.inf, math.inf]


def write_rollout(lake: Lake, values: list[list[float]], rollout_id: int) -> None:
    record(
        lake,
        lambda capture: capture.samples([sample(0, 3), sample(1, 3)]),
        lambda capture: capture.tensor("rollout_log_probs", as_rows(values), source="sampler"),
        rollout_id=rollout_id,
    )


def test_a_step_takes_what_it_lacks_from_the_rollouts_that_it_consumed(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    for rollout_id in range(2):
        moved = [[one - rollout_id for one in row] for row in ROLLOUT]
        write_rollout(lake, moved, rollout_id)
    consumed = [
        sample(index, 3, loss_mask=MASK[index], source_rollout_id=rollout_id)
        for rollout_id, index in ((1, 1), (0, 0))
    ]
    old = [[one - 1 for one in OLD[1]], OLD[0]]
    record(
        lake,
        lambda capture: capture.samples(consumed),
        lambda capture: capture.tensor("old_log_probs", as_rows(old), source="trainer"),
        rollout_id=2,
        step_id=0,
    )
    report = measured(lake)
    (row,) = report.table.to_pylist()
    assert row["generation_kl"] == pytest.approx(0.0255700611, rel=2e-6)
    assert (row["valid_tokens"], report.levels) == (5, {"r": "step"})
    assert report.pair == "old_log_probs (trainer) against rollout_log_probs (sampler), of steps"


def test_rollouts_are_read_where_no_step_holds_the_pair(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK, step_id=None)
    report = measured(lake)
    assert report.levels == {"r": "rollout"}
    assert report.table["valid_tokens"].to_pylist() == [5]


def test_samples_without_a_pair_are_counted(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK, step_id=0)
    record(
        lake,
        lambda capture: capture.samples([sample(0, 3)]),
        lambda capture: capture.tensor("old_log_probs", as_rows(OLD[:1]), source="trainer"),
        step_id=1,
    )
    assert [one.message for one in measured(lake).findings] == [
        "1 samples lack one of the columns, of 0:1"
    ]


def test_an_incomplete_step_is_left_out_unless_it_is_allowed(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK, step_id=0)
    write_pair(lake, OLD, ROLLOUT, MASK, step_id=1, expected_ranks=[0, 1])
    report = measured(lake)
    assert report.table["valid_tokens"].to_pylist() == [5]
    assert "1 left out as incomplete" in report.findings[0].message
    allowed = measured(lake, selection=Selection(allow_partial=True))
    assert allowed.table["valid_tokens"].to_pylist() == [10]


def test_a_selection_takes_the_samples_that_it_names(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK)
    for selection in (Selection(samples=("s-1",)), Selection(where="sample_id = 's-1'")):
        row = only_row(lake, selection=selection)
        assert row["valid_tokens"] == 2
        assert row["abs_delta_max"] == pytest.approx(0.4)


def test_copies_of_parallel_ranks_count_once(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    for rank, owner in ((0, True), (1, False)):
        write_pair(lake, OLD, ROLLOUT, MASK, rank=rank, expected_ranks=[0, 1], owner=owner)
    assert only_row(lake)["valid_tokens"] == 5


def test_runs_stand_side_by_side_with_their_ratio_and_its_interval(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    for run, scale in (("off", 1.0), ("on", 0.25)):
        for step_id in range(6):
            delta = scale * (0.5 + step_id / 64)
            write_pair(lake, [[-1.0] * 4], [[-1.0 - delta] * 4], run_id=run, step_id=step_id)
    report = measured(lake)
    assert report.table["run_id"].to_pylist() == ["off", "on"]
    (found,) = [one for one in report.comparison.to_pylist() if one["statistic"] == "abs_delta"]
    assert (found["base_run"], found["run_id"], found["ratio"]) == ("off", "on", 0.25)
    assert 0.22 < found["low"] < 0.25 < found["high"] < 0.28
    assert report.comparison.equals(measured(lake).comparison)


def test_one_step_has_no_interval(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    for run in ("a", "b"):
        write_pair(lake, OLD, ROLLOUT, MASK, run_id=run)
    (found,) = [
        one for one in measured(lake).comparison.to_pylist() if one["statistic"] == "abs_delta"
    ]
    assert (found["ratio"], found["low"], found["high"]) == (1.0, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pair": "old_log_probs"}, "the pair is 'old_log_probs'"),
        ({"pair": "kl:rollout_log_probs"}, "two different columns TRAINER:SAMPLER"),
        ({"pair": "log_probs:log_probs"}, "two different columns"),
        ({"by": ["batch"]}, "cannot group by 'batch'"),
        ({"thresholds": [-1.0]}, "the threshold is -1.0"),
        ({"cap": 0.5}, "the cap of importance ratios is 0.5"),
        ({"runs": ["x"]}, "no run 'x'"),
    ],
)
def test_what_cannot_be_asked_is_refused(options: Any, message: str, tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK)
    with pytest.raises(QueryError, match=message):
        measured(lake, **options)


def test_runs_that_nobody_named_and_that_hold_nothing_are_left_out_by_name(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    store = open_lake(lake.path)
    reserve_next_attempt(store, "empty")
    with pytest.raises(QueryError, match="a lake without captures selects nothing"):
        measured(lake)
    write_pair(lake, OLD, ROLLOUT, MASK)
    alone = measured(lake, runs=["r"])
    report = measured(lake)
    assert report.table.equals(alone.table)
    assert report.comparison.num_rows == 0
    assert [(one.severity, one.run_id, one.message) for one in report.findings[-1:]] == [
        ("warning", "empty", "left out: it captured nothing")
    ]
    with pytest.raises(QueryError, match="--run empty selects nothing"):
        measured(lake, runs=["r", "empty"])
    with pytest.raises(QueryError, match=r"^--rollout 77 selects nothing"):
        measured(lake, selection=Selection(rollouts=(77,)))


def test_a_rollout_of_one_run_is_measured_without_naming_the_run(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK)
    write_pair(lake, OLD, ROLLOUT, MASK, run_id="other", rollout_id=9)
    report = measured(lake, selection=Selection(rollouts=(9,)))
    assert report.table["run_id"].to_pylist() == ["other"]
    assert report.findings[-1].message == "left out: it lacks what is selected"
