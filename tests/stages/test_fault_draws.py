"""Every fault, put into drawn cohorts of any settings: its explanation comes first, or is said."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.helpers.fault_draws import Tally, can_be_put_in, explanation_of
from trajreplay.stages.explain import Explanation
from trajreplay.stages.faults import FAULTS, Fault

MADE = [one for one in FAULTS if can_be_put_in(one)]
STAGES = sorted({one.stage for one in MADE})
# Draws of each stage; more of them for a longer look, as `benchmarks/faults.py` takes.
DRAWS = int(os.environ.get("TRAJREPLAY_FAULT_DRAWS", "12"))
AT_LEAST = 0.95


def _of(stage: str) -> Sequence[Fault]:
    return [one for one in MADE if one.stage == stage]


@pytest.mark.parametrize("stage", STAGES)
def test_the_fault_that_was_made_is_named(
    tmp_path_factory: pytest.TempPathFactory, stage: str
) -> None:
    """First in 95 of 100 draws in which nothing else gives the same numbers; else it is said."""
    tallies: dict[str, Tally] = {}
    wrong: list[str] = []

    @settings(
        max_examples=DRAWS,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(fault=st.sampled_from(_of(stage)), seed=st.integers(0, 2**20))
    def draw(fault: Fault, seed: int) -> None:
        found = explanation_of(fault, seed, tmp_path_factory.mktemp("draw") / "lake")
        if found is not None:
            tallies.setdefault(fault.id, Tally(fault.id)).add(found)
            wrong.extend(_misses(fault, found))

    draw()
    draws = sum(one.draws for one in tallies.values())
    identifiable = sum(one.identifiable for one in tallies.values())
    assert draws >= DRAWS / 3
    lost = [text for one in tallies.values() for text in one.lost]
    assert identifiable - len(lost) >= AT_LEAST * identifiable, lost
    assert not wrong


def _misses(fault: Fault, found: Explanation) -> list[str]:
    """What is said of a draw without what has to be said: what else it may have been."""
    ways = [way for one in found.hypotheses for way in (one.sentence, *one.alike)]
    if len(ways) > 1 and not found.told and "On this cohort the same as" not in found.text:
        return [f"{fault.id}: {found.text}"]
    return []
