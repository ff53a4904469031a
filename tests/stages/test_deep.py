"""A validation that looks at values finds what a replay does, and says what it left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.captures import record, sample
from tests.helpers.cohorts import ALL_STAGES
from tests.helpers.mutate import change_value, data_file
from tests.helpers.scenes import (
    WAY,
    drawn,
    halves,
    rollout_key,
    write_rollout,
    write_step,
    write_whole,
)
from tests.helpers.trainer import Sample
from trajreplay import Lake, with_changes
from trajreplay.query import ValidationFinding

NORMALISED = ("sample", "reward.raw", "reward.post_process")


def _told(lake: Lake, **options: Any) -> list[ValidationFinding]:
    return lake.validate(deep=True, **options).findings


def _errors(lake: Lake) -> set[str]:
    return {one.check for one in _told(lake) if one.severity == "error"}


@pytest.mark.parametrize("stages", [("sample",), ALL_STAGES])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "column", ["rollout_log_probs", "ref_log_probs", "kl", "advantages", "log_probs", "entropy"]
)
def test_what_is_no_number_on_a_trained_token_is_an_error_of_both(
    lake: Lake, column: str, value: float, stages: tuple[str, ...]
) -> None:
    samples = drawn()
    samples[4].columns[column][1] = value
    write_whole(lake, samples, stages=stages)
    assert lake.replay().verdict == "diverged"
    (found,) = [one for one in _told(lake) if one.check == "non-finite.trained"]
    assert found.severity == "error"
    assert found.message.startswith(f"run 'r' rollout 0 step 0 s-4 token 1: {column} holds 1 NaN")


def test_what_is_no_number_under_the_mask_is_a_warning_of_both(lake: Lake) -> None:
    samples = drawn()
    samples[4].columns["rollout_log_probs"][3] = torch.nan
    write_rollout(lake, samples, stages=["sample"])
    assert lake.replay().verdict == "pass"
    assert [(one.check, one.severity) for one in _told(lake)] == [("non-finite.masked", "warning")]


@pytest.mark.parametrize("missing", ["exclude", "keep"])
def test_a_missing_reward_is_no_error_where_it_is_part_of_the_arithmetic(
    lake: Lake, missing: str
) -> None:
    samples = drawn()
    samples[2].raw_reward = float("nan")
    settings = with_changes(WAY.full, {"reward.missing": missing})
    write_rollout(lake, samples, stages=("sample", "reward.raw"), settings=settings)
    diverged = missing == "keep"
    assert (lake.replay().verdict == "diverged") == diverged
    assert ("non-finite.trained" in _errors(lake)) == diverged


@pytest.mark.parametrize(("kept", "check"), [(7, "group.short"), (8, None)])
def test_a_group_of_another_size_is_an_error_of_both(
    lake: Lake, kept: int, check: str | None
) -> None:
    samples = drawn()
    settings = with_changes(WAY.full, {"reward.n_samples_per_prompt": 4})
    write_rollout(lake, {0: samples[:kept]}, stages=NORMALISED, settings=settings)
    assert (lake.replay().first_divergent_stage == "reward.post_process") == (check is not None)
    assert _errors(lake) == ({check} if check else set())


def test_a_group_of_too_many_is_told_from_one_of_too_few(lake: Lake) -> None:
    settings = with_changes(WAY.full, {"reward.n_samples_per_prompt": 3})
    write_rollout(lake, {0: drawn()}, stages=NORMALISED, settings=settings)
    (found,) = [one for one in _told(lake) if one.severity == "error"]
    assert found.check == "group.large"
    assert "group g-0 and 1 more has 4 members" in found.message


def _other_group(samples: list[Sample]) -> None:
    for one in samples:
        one.group = "g-0"


def _other_id(samples: list[Sample]) -> None:
    samples[0].sample_id = "zzz"


def _other_mask(samples: list[Sample]) -> None:
    samples[0].mask = [0, *samples[0].mask[1:]]


def _narrow(samples: list[Sample]) -> None:
    for one in samples:
        one.columns["old_log_probs"] = one.columns["old_log_probs"].bfloat16().float()


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        (_other_group, "handoff.group_id"),
        (_other_id, "handoff.sample_id"),
        (_other_mask, "handoff.loss_mask"),
        (_narrow, "handoff.old_log_probs"),
    ],
)
def test_what_a_step_took_over_otherwise_is_an_error_of_both(
    lake: Lake, spoil: Callable[[list[Sample]], None], check: str
) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    consumed = [one.copy() for one in samples]
    spoil(consumed)
    write_step(lake, consumed, stages=["sample"], expected={})
    replayed = {
        finding.check
        for one in lake.replay().cohorts
        for finding in one.findings
        if finding.severity == "error"
    }
    assert replayed == _errors(lake) == {check}


def test_what_a_step_did_not_capture_is_its_rollouts_alone(lake: Lake) -> None:
    """Not even a handoff that changes a column is looked for in what was never handed over."""
    samples = drawn()
    samples[4].columns["old_log_probs"][1] = torch.nan
    settings = replace(WAY.full, handoff={"old_log_probs": "bfloat16"})
    write_rollout(lake, samples, stages=["sample"], settings=settings)
    columns = ["log_probs", "advantages"]
    options: dict[str, Any] = {"columns": columns, "settings": settings, "expected": {}}
    write_step(lake, samples, stages=["sample"], **options)
    (found,) = _told(lake)
    assert (found.check, found.severity) == ("non-finite.trained", "error")
    assert found.message.startswith("run 'r' rollout 0 s-4 token 1: ")


def test_lengths_and_masks_are_named_by_both(lake: Lake) -> None:
    write_rollout(lake, halves(drawn()), stages=["sample"])
    change_value(lake, rollout_key(0), "total_length", 0, lambda _: 1)
    change_value(lake, rollout_key(1), "loss_mask", 0, lambda _: 3, 0)
    (cohort,) = lake.replay().cohorts
    found = {one.check: (one.severity, one.sample_id, one.token) for one in cohort.findings}
    assert found == {"sample.length": ("error", "s-0", None), "sample.mask": ("error", "s-1", 0)}
    assert _errors(lake) >= {"sample.length", "sample.mask"}


def test_one_run_that_cannot_be_read_hides_nothing_of_another(lake: Lake) -> None:
    samples = drawn()
    for one in samples:
        one.columns["rollout_log_probs"][0] = 0.25
    write_rollout(lake, samples, stages=["sample"])
    for attempt in (0, 1):
        record(lake, lambda one: one.samples([sample(0)]), run_id="zz", attempt=attempt)
    found = {(one.severity, one.check) for one in _told(lake)}
    assert {("warning", "log-prob.positive"), ("error", "completeness")} <= found
    told = [one for one in _told(lake) if one.check == "contracts.unchecked"]
    assert told
    assert all(one.message.startswith("run 'zz'") for one in told)
    assert all("was not checked: attempts 0, 1 all hold" in one.message for one in told)
    assert {one.severity for one in told} == {"info"}  # the error beside it says why


def test_a_cohort_that_takes_too_much_memory_is_no_ok(lake: Lake) -> None:
    write_rollout(lake, drawn(), stages=["sample"])
    assert lake.validate(deep=True).ok
    report = lake.validate(deep=True, memory_bytes=100)
    (found,) = report.findings
    assert (report.ok, found.check, found.severity) == (False, "contracts.unchecked", "error")
    assert found.message.startswith("run 'r' rollout 0: was not checked: ")
    assert "allow more with --memory" in found.message


def test_a_damaged_cohort_is_said_not_to_be_checked_and_the_others_are(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, samples, stages=["sample"])
    other = drawn(rollout_id=1)
    for one in other:
        one.columns["rollout_log_probs"][0] = 0.25
    write_rollout(lake, other, stages=["sample"])
    write_rollout(lake, drawn(rollout_id=2), stages=["sample"])
    path = data_file(lake, rollout_key(0, 2))
    path.write_bytes(path.read_bytes()[:-20])
    found = {(one.severity, one.check) for one in _told(lake)}
    assert ("warning", "log-prob.positive") in found
    (told,) = [one for one in _told(lake) if one.check == "contracts.unchecked"]
    assert "rollout 2" in told.message
