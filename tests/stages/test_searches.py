"""What a long run is searched for: nothing that is known stays unnamed for what came before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.scenes import WAY, drawn, write_rollout
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake
from trajreplay.stages.explain import Explanation, searches, target

SCORED = ("sample", "reward.raw", "reward.post_process")


Scoring = Callable[[list[Sample], int], None]


def _noise(samples: list[Sample], rollout: int) -> None:
    """Rewards that nothing explains."""
    numbers = np.random.default_rng(rollout)
    for one in samples:
        assert one.reward is not None
        one.reward = float(np.float32(one.reward + numbers.normal(0, 0.5)))


def _undivided(samples: list[Sample], rollout: int) -> None:
    Trainer(replace(WAY, std=False)).score(samples)


def _by_batch(samples: list[Sample], rollout: int) -> None:
    """All samples normalised as one group: an error without a shape, as noise."""
    groups = [one.group for one in samples]
    for one in samples:
        one.group = "all"
    Trainer(replace(WAY, group_size=len(samples))).score(samples)
    for one, group in zip(samples, groups, strict=True):
        one.group = group


def _write(lake: Lake, rollout: int, spoil: Scoring, run_id: str = "r") -> None:
    samples = drawn(rollout_id=rollout)
    spoil(samples, rollout)
    write_rollout(lake, samples, WAY, settings=WAY.full, stages=SCORED, run_id=run_id)


def _named(found: list[Explanation]) -> list[str]:
    return [one.first.faults[0] if one.first else "" for one in found]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run is searched as a long one is."""
    for name, value in (("SEARCHES", 2), ("OF_A_KIND", 1), ("EVERY", 2)):
        monkeypatch.setattr(searches, name, value)


@pytest.mark.parametrize(
    ("spoil", "fault", "run_id"),
    [
        (_undivided, "reward.not-divided", "r"),
        (_by_batch, "reward.grouped-by-batch", "r"),
        (_by_batch, "reward.grouped-by-batch", "s"),
    ],
)
def test_a_known_fault_is_named_however_late_it_begins(
    lake: Lake, spoil: Scoring, fault: str, run_id: str
) -> None:
    """After many cohorts that nothing explains, of this run or of another one."""
    for rollout in range(3):
        _write(lake, rollout, _noise)
    for rollout in range(3, 7):
        _write(lake, rollout, spoil, run_id)
    assert _named(lake.explain().explanations) == ["", "", "", *[fault] * 4]


def test_a_run_that_nothing_explains_is_searched_here_and_there(lake: Lake) -> None:
    for rollout in range(7):
        _write(lake, rollout, _noise)
    found = lake.explain().explanations
    assert [one.searched for one in found] == [True, True, False, False, True, False, False]
    assert all("no known fault reproduces this" in one.text for one in found)
    assert ["tried only what explained" in one.text for one in found] == [
        not one.searched for one in found
    ]


@pytest.mark.parametrize("spoil", [_undivided, _by_batch, _noise])
def test_what_is_spared_its_bounds_is_named_as_with_them(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, spoil: Scoring
) -> None:
    _write(lake, 0, spoil)
    spared = lake.explain().explanations
    monkeypatch.setattr(target.Lost, "__call__", lambda *given: False)
    assert [one.text for one in lake.explain().explanations] == [one.text for one in spared]
