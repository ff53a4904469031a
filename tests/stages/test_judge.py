"""Cohorts are judged together, and each as if it were alone."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cohorts import rank_sums
from tests.helpers.mutate import change_json
from tests.helpers.scenes import (
    WAY,
    diverged,
    drawn,
    halves,
    step_key,
    the_cohort,
    the_stage,
    verdicts,
    write_rollout,
    write_step,
    write_whole,
)
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake
from trajreplay.stages import CohortReport


def _nan_input(samples: list[Sample]) -> None:
    samples[0].columns["log_probs"][0] = torch.nan


def _infinite_output(samples: list[Sample]) -> None:
    samples[2].columns["kl"][0] = torch.inf


def _nan_reward(samples: list[Sample]) -> None:
    samples[0].raw_reward = torch.nan
    Trainer(WAY).score(samples)
    Trainer(WAY).estimate(samples)


def _masked_nan(samples: list[Sample]) -> None:
    samples[4].columns["ref_log_probs"][3] = torch.nan


def _wrong_reward(samples: list[Sample]) -> None:
    samples[1].reward = 9.0
    Trainer(WAY).estimate(samples)


def _overwritten_reward(samples: list[Sample]) -> None:
    samples[6].reward = 9.0


def _wrong_advantage(samples: list[Sample]) -> None:
    samples[7].columns["advantages"][1] += 1.0


def _another_group(samples: list[Sample]) -> None:
    samples[3].group = "g-1"


def _huge(samples: list[Sample]) -> None:
    for one in samples:
        one.raw_reward *= 1e6
    Trainer(WAY).score(samples)
    Trainer(WAY).estimate(samples)


FAULTS: list[Callable[[list[Sample]], None]] = [
    lambda samples: None,
    _nan_input,
    _infinite_output,
    _nan_reward,
    _masked_nan,
    _wrong_reward,
    _overwritten_reward,
    _wrong_advantage,
    _another_group,
    _huge,
    lambda samples: None,
]


def _faulty(lake: Lake) -> None:
    """A step with all six stages for each fault."""
    for step, fault in enumerate(FAULTS):
        samples = drawn(seed=step)
        expected = rank_sums(Trainer(WAY), halves(samples))
        fault(samples)
        if fault in (_wrong_reward, _nan_reward, _huge):
            expected = rank_sums(Trainer(WAY), halves(samples))
        write_whole(lake, samples, step_id=step, expected=expected)


def _told(cohort: CohortReport) -> dict[str, Any]:
    """What a report says of a cohort; NaN equals itself."""
    found: dict[str, Any] = cohort.to_json()
    return found


def test_a_cohort_is_judged_as_if_it_were_alone(lake: Lake) -> None:
    _faulty(lake)
    together = lake.replay()
    assert len(together.cohorts) == len(FAULTS)
    for step, cohort in enumerate(together.cohorts):
        (alone,) = lake.replay(steps=[(0, step)]).cohorts
        assert _told(alone) == _told(cohort), step
    assert [one.verdict for one in together.cohorts] == [
        "pass",
        "diverged",
        "diverged",
        "diverged",
        "pass",
        *["diverged"] * 4,
        "pass",
        "pass",
    ]


@pytest.mark.parametrize("memory_bytes", [20_000, 50_000, 200_000])
def test_how_much_is_in_memory_at_once_does_not_matter(lake: Lake, memory_bytes: int) -> None:
    for rollout_id in range(4):
        samples = drawn(rollout_id=rollout_id)
        if rollout_id == 2:
            _wrong_reward(samples)
        write_rollout(lake, samples)
        changed = [one.copy() for one in samples]
        if rollout_id == 1:
            changed[2].columns["old_log_probs"][0] += 1.0
        write_step(lake, changed, rollout_id=rollout_id)
    seen: list[tuple[int, int]] = []
    small = lake.replay(
        memory_bytes=memory_bytes, progress=lambda done, total: seen.append((done, total))
    )
    assert small.to_json() == lake.replay().to_json()
    assert seen == sorted(seen)
    assert seen[-1] == (8, 8)
    assert [one.verdict for one in small.cohorts] == [
        "pass",
        "pass",
        "pass",
        "diverged",
        "diverged",
        "pass",
        "pass",
        "pass",
    ]
    assert the_stage(the_cohort(small, 2, 0), "loss.policy").inherited


PEAK = """
import resource, sys
from trajreplay import Lake
report = Lake.open(sys.argv[1]).replay(memory_bytes=64 << 20)
print(len(report.cohorts), report.exit_code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_peak_memory_is_bounded_by_the_batch_of_cohorts(tmp_path: Path) -> None:
    """Eight times the cohorts, 250 MB of float64 columns in all, take hardly more memory."""
    samples = drawn()
    for one in samples:
        one.mask = one.mask * 1500
        one.columns = {name: values.repeat(1500) for name, values in one.columns.items()}
    Trainer(WAY).estimate(samples)
    expected = rank_sums(Trainer(WAY), halves(samples))
    peaks = []
    for count in (6, 48):
        lake = Lake.create(tmp_path / str(count))
        for rollout_id in range(count):
            write_whole(lake, samples, expected=expected, rollout_id=rollout_id)
        told = subprocess.run(
            [sys.executable, "-c", PEAK, str(lake.path)], check=True, capture_output=True, text=True
        )
        cohorts, code, peak_kib = map(int, told.stdout.split())
        assert (cohorts, code) == (count, 0)
        peaks.append(peak_kib / 1024)
    few, many = peaks
    assert many < few + 64, peaks


def test_a_step_is_judged_after_the_later_rollout_that_it_consumed_from(lake: Lake) -> None:
    first, second = drawn(rollout_id=0), drawn(rollout_id=1)
    _wrong_reward(second)
    write_rollout(lake, first)
    write_rollout(lake, second)
    write_step(lake, [*first, *second], rollout_id=0)
    report = lake.replay(memory_bytes=20_000)
    loss = the_stage(the_cohort(report, 0, 0), "loss.policy")
    assert (loss.verdict, loss.inherited) == ("pass", True)


def test_cohorts_of_different_settings_columns_and_dtypes_are_judged_each_by_its_own(
    lake: Lake,
) -> None:
    ways = [WAY, replace(WAY, std=False), replace(WAY, kl="k3"), replace(WAY, entropy_coef=0.0)]
    for step, way in enumerate(ways):
        samples = drawn(way)
        if step == 3:
            for one in samples:
                del one.columns["entropy"]
        write_whole(lake, samples, way, step_id=step)
    halved = drawn()
    Trainer(WAY, dtype=torch.bfloat16).estimate(halved)
    write_whole(lake, halved, step_id=4)
    declared = ["sample", "advantage.kl"]
    write_whole(lake, drawn(), step_id=5, stages=declared)
    report = lake.replay()
    assert report.verdict == "pass"
    assert verdicts(the_cohort(report, step_id=5)) == dict.fromkeys(declared, "pass")


def test_a_refused_cohort_leaves_the_others_alone(lake: Lake) -> None:
    for step in range(3):
        write_whole(lake, drawn(), step_id=step)
    change_json(lake, step_key(0, 1), lambda tree: tree["settings_tree"].update(kl=[]))
    report = lake.replay()
    assert [one.verdict for one in report.cohorts] == ["pass", "refused", "pass"]
    assert diverged(report.cohorts[1]) == []


def test_a_report_is_in_the_order_of_runs_rollouts_and_steps(lake: Lake) -> None:
    for run in ("b", "a"):
        for rollout_id in (1, 0):
            for step in (1, 0):
                samples = drawn(rollout_id=rollout_id)
                write_step(lake, samples, rollout_id=rollout_id, step_id=step, run_id=run)
            write_rollout(lake, drawn(rollout_id=rollout_id), run_id=run)
    places = [(one.run_id, one.rollout_id, one.step_id) for one in lake.replay().cohorts]
    expected = [(run, rollout, step) for run in "ab" for rollout in (0, 1) for step in (None, 0, 1)]
    assert places == expected


def test_a_replay_changes_nothing_and_gives_the_same_answer_again(lake: Lake) -> None:
    _faulty(lake)
    threads = torch.get_num_threads()
    assert lake.replay().to_json() == lake.replay().to_json()
    assert torch.get_num_threads() == threads
