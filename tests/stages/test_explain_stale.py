"""Log-probs of an earlier step or of the rollout are named, and only where the lake holds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cohorts import STEP_COLUMNS, rank_sums
from tests.helpers.scenes import WAY, drawn, halves, write_rollout, write_step
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake
from trajreplay.stages.explain import Explanation

OLD = "old_log_probs"


def _epochs(count: int, seed: int) -> list[list[Sample]]:
    """The samples of one rollout as steps consumed them, each with log-probs of its own."""
    numbers = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        samples = drawn(seed=seed)
        for one in samples:
            drift = numbers.normal(0.0, 0.3, one.length)
            new = one.columns[OLD] + torch.tensor(drift, dtype=torch.float32)
            one.columns["log_probs"] = new.clamp(max=-1e-3)
        found.append(samples)
    return found


def _with(
    samples: Sequence[Sample], name: str, theirs: Sequence[Sample], other: str
) -> list[Sample]:
    """Samples with a column of the same ones at another time."""
    found = [one.copy() for one in samples]
    by_id = {one.sample_id: one for one in theirs}
    for one in found:
        one.columns[name] = by_id[one.sample_id].columns[other].clone()
    return found


def _of(lake: Lake, stage: str, step_id: int) -> list[Explanation]:
    found = lake.explain().explanations
    return [one for one in found if (one.stage, one.cohort.step_id) == (stage, step_id)]


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), steps=st.integers(2, 4), data=st.data())
def test_a_loss_with_log_probs_of_an_earlier_step_is_named(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: int, data: st.DataObject
) -> None:
    lake = Lake.create(tmp_path_factory.mktemp("stale") / "lake")
    epochs = _epochs(steps, seed)
    write_rollout(lake, epochs[0])
    for number, samples in enumerate(epochs[:-1]):
        write_step(lake, samples, step_id=number)
    which = data.draw(st.sampled_from([0, steps - 2]))
    stale = _with(epochs[-1], OLD, epochs[which], "log_probs")
    expected = rank_sums(Trainer(WAY), halves(stale))
    write_step(lake, epochs[-1], step_id=steps - 1, expected=expected)
    (found,) = _of(lake, "loss.policy", steps - 1)
    assert found.first is not None, found.text
    assert found.first.faults == ("loss.stale",), found.text
    when = "rollout 0 step 0"
    if steps > 2:
        when = "the step before" if which else "the first step"
    assert f"the loss with the log_probs of {when}" in found.text
    assert f"for {OLD}" in found.text


@settings(max_examples=5)
@given(seed=st.integers(0, 2**16))
def test_old_log_probs_that_are_those_of_an_earlier_step_are_named(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """The step records what it consumed, so that its loss is right and the handoff is not."""
    lake = Lake.create(tmp_path_factory.mktemp("handed") / "lake")
    first, second = _epochs(2, seed)
    write_rollout(lake, first)
    write_step(lake, first)
    write_step(lake, _with(second, OLD, first, "log_probs"), step_id=1)
    named = [one for one in _of(lake, "sample", 1) if one.first and not one.told]
    assert [one.first.faults for one in named if one.first] == [("handoff.stale",)]
    assert f"the {OLD}: the log_probs of rollout 0 step 0" in named[0].text


def test_each_sample_is_looked_for_in_the_step_that_consumed_it(tmp_path: Path) -> None:
    """Two steps hold one half each, the third both: what is stale is of two steps."""
    lake = Lake.create(tmp_path / "lake")
    first, second = _epochs(2, 3)
    write_rollout(lake, first)
    write_step(lake, first[:4])
    write_step(lake, first[4:], step_id=1)
    stale = _with(second, OLD, first, "log_probs")
    write_step(lake, second, step_id=2, expected=rank_sums(Trainer(WAY), halves(stale)))
    (found,) = _of(lake, "loss.policy", 2)
    assert found.first is not None, found.text
    assert found.first.faults == ("loss.stale",), found.text


@pytest.mark.parametrize("kept", ["no step before", "a part of the samples"])
def test_what_the_lake_does_not_hold_is_not_guessed(tmp_path: Path, kept: str) -> None:
    lake = Lake.create(tmp_path / "lake")
    first, second = _epochs(2, 5)
    write_rollout(lake, first)
    if kept == "a part of the samples":
        write_step(lake, first[:4])
    stale = _with(second, OLD, first, "log_probs")
    write_step(lake, second, step_id=1, expected=rank_sums(Trainer(WAY), halves(stale)))
    (found,) = _of(lake, "loss.policy", 1)
    assert all("stale" not in name for one in found.hypotheses for name in one.faults), found.text
    assert found.first is None, found.text


def test_what_a_later_step_holds_is_not_tried(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    first, second = _epochs(2, 9)
    write_rollout(lake, first)
    newer = _with(first, OLD, second, "log_probs")
    write_step(lake, first, expected=rank_sums(Trainer(WAY), halves(newer)))
    write_step(lake, second, step_id=1)
    (found,) = _of(lake, "loss.policy", 0)
    assert found.first is None, found.text


def test_what_the_rollout_captured_is_tried_where_the_step_has_another(tmp_path: Path) -> None:
    """The step recomputed its old log-probs, said so, and its loss read those of the rollout."""
    lake = Lake.create(tmp_path / "lake")
    first, second = _epochs(2, 11)
    write_rollout(lake, first)
    moved = _with(first, OLD, second, "log_probs")
    expected = rank_sums(Trainer(WAY), halves(first))
    write_step(lake, moved, expected=expected, columns=STEP_COLUMNS)
    (found,) = _of(lake, "loss.policy", 0)
    assert found.first is not None, found.text
    assert f"{OLD} of the rollout for {OLD}" in found.text
