"""Captures changed after the fact, with every digest and count signed anew."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cohorts import rank_sums
from tests.helpers.mutate import (
    change_entry,
    change_json,
    change_output,
    change_table,
    change_value,
    copied,
    drop_columns,
)
from tests.helpers.scenes import (
    WAY,
    diverged,
    drawn,
    halves,
    places,
    refusals,
    rollout_key,
    step_key,
    the_cohort,
    the_stage,
    write_rollout,
    write_step,
    write_whole,
)
from tests.helpers.trainer import METRICS, Trainer
from trajreplay import Lake, TrajReplayError
from trajreplay.schema import Output
from trajreplay.stages import CohortReport

OUTPUTS = {
    "reward": "reward.post_process",
    "kl": "advantage.kl",
    "advantages": "advantage.estimate",
    "returns": "advantage.estimate",
}

few = settings(max_examples=max(10, settings().max_examples // 5))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with all six stages in one step, to be copied."""
    lake = Lake.create(tmp_path_factory.mktemp("whole") / "lake")
    write_whole(lake, drawn())
    return Path(lake.path)


def _tokens(trained: int) -> list[tuple[int, int]]:
    """Sample and token of every token whose mask is so."""
    return [
        (row, token)
        for row, one in enumerate(drawn())
        for token in range(one.length)
        if one.mask[token] == trained
    ]


TRAINED, MASKED = _tokens(1), _tokens(0)
Change = Callable[[Any], Any]


def _changed(
    whole: Path, column: str, place: tuple[int, int | None], change: Change
) -> CohortReport:
    """What a replay says once one value of one of the eight samples is changed."""
    row, token = place
    with copied(whole) as lake:
        change_value(lake, step_key(row % 2), column, row // 2, change, token)
        return the_cohort(lake.replay())


@pytest.mark.parametrize("column", ["kl", "advantages", "returns"])
@few
@given(place=st.sampled_from(TRAINED), by=st.sampled_from([1e-3, -1e-3, 0.5, -7.0, 1e30]))
def test_a_changed_output_is_found_at_its_stage_sample_and_token(
    whole: Path, column: str, place: tuple[int, int], by: float
) -> None:
    cohort = _changed(whole, column, place, lambda value: value + by)
    assert cohort.first_divergent_stage == OUTPUTS[column]
    assert places(the_stage(cohort, OUTPUTS[column])) == {(column, f"s-{place[0]}", place[1])}


@pytest.mark.parametrize("row", range(8))
def test_a_changed_reward_is_found_at_its_sample(whole: Path, row: int) -> None:
    cohort = _changed(whole, "reward", (row, None), lambda value: value + 1e-3)
    assert cohort.first_divergent_stage == "reward.post_process"
    assert places(the_stage(cohort, "reward.post_process")) == {("reward", f"s-{row}", None)}


@pytest.mark.parametrize("row", range(8))
def test_a_changed_raw_reward_is_found_at_its_group(whole: Path, row: int) -> None:
    cohort = _changed(whole, "raw_reward", (row, None), lambda value: value + 0.25)
    assert cohort.first_divergent_stage == "reward.post_process"
    result = the_stage(cohort, "reward.post_process")
    assert {one.group_id for one in result.divergences} == {f"g-{row // 4}"}


@pytest.mark.parametrize("column", ["old_log_probs", "ref_log_probs"])
@few
@given(place=st.sampled_from(TRAINED))
def test_a_changed_log_prob_is_found_at_its_token_by_the_first_stage_that_reads_it(
    whole: Path, column: str, place: tuple[int, int]
) -> None:
    cohort = _changed(whole, column, place, lambda value: value + 0.25)
    assert cohort.first_divergent_stage == "advantage.kl"
    assert places(the_stage(cohort, "advantage.kl")) == {("kl", f"s-{place[0]}", place[1])}


@pytest.mark.parametrize("column", ["log_probs", "entropy"])
@few
@given(place=st.sampled_from(TRAINED))
def test_a_changed_input_of_the_loss_is_found_at_its_rank(
    whole: Path, column: str, place: tuple[int, int]
) -> None:
    cohort = _changed(whole, column, place, lambda value: value - 0.5)
    assert diverged(cohort) == ["loss.policy"]
    found = the_stage(cohort, "loss.policy").divergences
    assert {one.rank for one in found} == {place[0] % 2}
    expected = {"loss", "entropy_loss"} if column == "entropy" else {"ppo_kl"}
    assert expected <= {one.field for one in found}


@pytest.mark.parametrize(
    "column",
    ["kl", "advantages", "returns", "old_log_probs", "ref_log_probs", "log_probs", "entropy"],
)
@few
@given(
    place=st.sampled_from(MASKED),
    by=st.sampled_from([1e-3, -0.5, 1e30, float("nan"), float("-inf")]),
)
def test_a_change_under_the_mask_alters_no_verdict(
    whole: Path, column: str, place: tuple[int, int], by: float
) -> None:
    assert _changed(whole, column, place, lambda value: value + by).verdict == "pass"


def test_a_log_prob_beyond_the_clip_bound_matters_to_the_kl_only(lake: Lake) -> None:
    samples = drawn()
    best = max(range(8), key=lambda row: samples[row].reward or 0.0)
    samples[best].columns["log_probs"][0] = samples[best].columns["old_log_probs"][0] + 2.0
    write_whole(lake, samples)
    cohort = _changed(Path(lake.path), "log_probs", (best, 0), lambda value: value + 1.0)
    found = the_stage(cohort, "loss.policy").divergences
    assert [one.field for one in found] == ["ppo_kl"]


@few
@given(place=st.sampled_from([*TRAINED, *MASKED]))
def test_a_flipped_mask_is_found_by_the_loss(whole: Path, place: tuple[int, int]) -> None:
    cohort = _changed(whole, "loss_mask", place, lambda value: 1 - value)
    assert diverged(cohort) == ["loss.policy"]
    ranks = {one.rank for one in the_stage(cohort, "loss.policy").divergences}
    assert ranks == {place[0] % 2}


def test_a_mask_that_is_neither_0_nor_1_is_found_at_its_token(lake: Lake) -> None:
    write_whole(lake, drawn())
    change_value(lake, step_key(0), "loss_mask", 2, lambda _: 2, 1)
    cohort = the_cohort(lake.replay())
    assert cohort.first_divergent_stage == "sample"
    assert places(the_stage(cohort, "sample")) == {("loss_mask", "s-4", 1)}


@pytest.mark.parametrize("field", METRICS)
@pytest.mark.parametrize("by", [1e-3, -1e-3, float("nan"), float("inf")])
def test_a_changed_scalar_is_found_by_name_and_rank(lake: Lake, field: str, by: float) -> None:
    write_whole(lake, drawn())
    change_output(lake, step_key(1), field, lambda one: {"value": float(one.value or 0.0) + by})
    cohort = the_cohort(lake.replay())
    assert diverged(cohort) == ["loss.policy"]
    (found,) = the_stage(cohort, "loss.policy").divergences
    assert (found.field, found.rank) == (field, 1)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"eps_clip": "0x1.47ae147ae147bp-6"}, "loss.policy"),
        ({"eps_clip_high": "0x1.47ae147ae147bp-6"}, "loss.policy"),
        ({"entropy_coef": 0}, "loss.policy"),
    ],
)
def test_a_changed_setting_of_the_loss_is_found_by_the_loss(
    lake: Lake, change: dict[str, Any], found: str
) -> None:
    write_whole(lake, drawn())
    for rank in (0, 1):
        change_json(lake, step_key(rank), lambda tree: tree["settings_tree"]["loss"].update(change))
    assert diverged(the_cohort(lake.replay())) == [found]


@pytest.mark.parametrize(
    ("section", "change", "found"),
    [
        ("reward", {"divide_by_std": False}, "reward.post_process"),
        ("reward", {"ddof": 0}, "reward.post_process"),
        ("reward", {"epsilon": 1}, "reward.post_process"),
        ("reward", {"baseline": "none"}, "reward.post_process"),
        ("reward", {"grouping": "none"}, "reward.post_process"),
        ("reward", {"n_samples_per_prompt": 2}, "reward.post_process"),
        ("kl", {"estimator": "k2"}, "advantage.kl"),
        ("kl", {"estimator": "k3"}, "advantage.kl"),
        ("kl", {"coef": 0}, "advantage.kl"),
        ("kl", {"policy_source": "rollout"}, "advantage.kl"),
        ("loss", {"old_source": "rollout"}, "loss.policy"),
    ],
)
def test_a_changed_setting_is_found_by_the_stage_that_reads_it(
    lake: Lake, section: str, change: dict[str, Any], found: str
) -> None:
    write_whole(lake, drawn())
    for rank in (0, 1):
        change_json(
            lake, step_key(rank), lambda tree: tree["settings_tree"][section].update(change)
        )
    assert the_cohort(lake.replay()).first_divergent_stage == found


@pytest.mark.parametrize("column", ["group_id", "loss_mask", "old_log_probs", "advantages"])
def test_a_changed_column_of_a_rollout_shows_at_the_handoff(lake: Lake, column: str) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    write_step(lake, samples)
    token = None if column == "group_id" else 1
    changes: dict[str, Callable[[Any], Any]] = {
        "group_id": lambda _: "g-7",
        "loss_mask": lambda value: 1 - value,
    }
    change = changes.get(column, lambda value: value + 0.25)
    change_value(lake, rollout_key(0), column, 2, change, token)
    step = the_cohort(lake.replay())
    assert step.first_divergent_stage == "sample"
    named = {(one.check, one.sample_id, one.token) for one in step.findings}
    assert (f"handoff.{column}", "s-4", token) in named


def test_rows_in_another_order_change_nothing_but_their_numbers(lake: Lake) -> None:
    write_whole(lake, drawn())
    before = the_cohort(lake.replay()).to_json()

    def reversed_rows(data: pa.Table) -> pa.Table:
        turned = data.take(pa.array(np.arange(data.num_rows)[::-1]))
        index = turned.column_names.index("row")
        return turned.set_column(index, "row", data["row"])

    change_table(lake, step_key(0), reversed_rows)
    after = the_cohort(lake.replay()).to_json()
    for one in (*before["stages"], *after["stages"]):
        del one["max_abs_error"], one["chained_error"]
    assert before == after


def test_a_sample_named_twice_in_one_shard_is_refused(lake: Lake) -> None:
    write_whole(lake, drawn())
    change_value(lake, step_key(0), "sample_id", 2, lambda _: "s-0")
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "'s-0'" in refusals(cohort)


@pytest.mark.parametrize("column", ["log_probs", "kl", "advantages", "loss_mask"])
def test_a_ragged_tensor_is_refused_by_name(lake: Lake, column: str) -> None:
    write_whole(lake, drawn())
    change_value(lake, step_key(0), column, 2, lambda values: values[:-1])
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert f"'s-4' (rank 0): {column} has 4 values, expected response_length = 5" in refusals(
        cohort
    )


def test_a_column_taken_out_is_missing(lake: Lake) -> None:
    write_whole(lake, drawn())
    drop_columns(lake, step_key(0), "entropy")
    assert the_cohort(lake.replay()).verdict == "refused"


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where an entry holds something."""
    items: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
    return [path, *(found for key, one in items for found in _paths(one, (*path, key)))]


ODD: list[Any] = [None, -1, 0, 2**70, True, "", "x", "0x1.8p+1", "nan:0", [], [[]], {}]


@given(number=st.integers(0, 10_000), value=st.sampled_from(ODD))
def test_a_signed_entry_of_any_content_gives_a_verdict_or_an_error(
    whole: Path, number: int, value: Any
) -> None:
    def change(tree: dict[str, Any]) -> None:
        paths = _paths(tree)[1:]
        path = paths[number % len(paths)]
        at: Any = tree
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    with copied(whole) as lake:
        change_json(lake, step_key(0), change)
        try:
            report = lake.replay()
        except TrajReplayError:
            return
        assert report.exit_code in (0, 1, 3)
        assert json.dumps(report.to_json())


def test_an_output_of_a_stage_that_has_none_is_ignored(lake: Lake) -> None:
    write_whole(lake, drawn())
    odd = Output("advantage.kl", "mean", value=1.0, scope="rank", reduction="mean")
    change_entry(lake, step_key(0), lambda entry: replace(entry, outputs=(*entry.outputs, odd)))
    assert lake.replay().verdict == "pass"


def test_a_list_of_sources_that_the_rows_contradict_is_refused(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    write_step(lake, samples)
    change_entry(lake, step_key(0), lambda entry: replace(entry, sources=((0, 9),)))
    step = the_cohort(lake.replay())
    assert step.verdict == "refused"
    assert "its entry lists [(0, 9)]" in refusals(step)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_that_the_values_contradict_is_not_believed(lake: Lake, dtype: str) -> None:
    samples = drawn()
    expected = rank_sums(Trainer(WAY), halves(samples))
    samples[0].columns["advantages"][0] *= 1.0005
    write_whole(lake, samples, expected=expected)

    def claim(tree: dict[str, Any]) -> None:
        tree["files"][0]["columns"]["advantages"][4] = dtype

    change_json(lake, step_key(0), claim)
    cohort = the_cohort(lake.replay())
    assert places(the_stage(cohort, "advantage.estimate")) == {("advantages", "s-0", 0)}
    (warning,) = (one for one in cohort.findings if one.check == "dtype")
    assert f"held advantages in {dtype}" in warning.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dtype_that_the_values_fit_is_believed(lake: Lake, dtype: torch.dtype) -> None:
    samples = drawn()
    trainer = Trainer(WAY, dtype=dtype)
    trainer.estimate(samples)
    write_whole(lake, samples)
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "pass"
    assert {one.check for one in cohort.findings} == {"handoff"}
