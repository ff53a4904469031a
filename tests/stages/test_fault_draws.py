"""Every fault, put into drawn cohorts of any settings: its explanation comes first, or is said."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.helpers.fault_draws import Tally, can_be_put_in, explanation_of
from trajreplay.stages.explain import Explanation
from trajreplay.stages.faults import FAULTS, Fault

MADE = [one for one in FAULTS if can_be_put_in(one)]
STAGES = sorted({one.stage for one in MADE})
# Draws of each fault; more of them for a longer look, as `benchmarks/faults.py` takes.
DRAWS = int(os.environ.get("TRAJREPLAY_FAULT_DRAWS", "1"))
# Cohorts that are drawn until one has a place for a fault, and the share of faults that find one.
PATIENCE, PLACED = 8, 0.85
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
    @given(seed=st.integers(0, 2**20))
    def draw(seed: int) -> None:
        for fault in _of(stage):
            found = _drawn(fault, seed ^ zlib.crc32(fault.id.encode()), tmp_path_factory)
            if found is not None:
                tallies.setdefault(fault.id, Tally(fault.id)).add(found)
                wrong.extend(_misses(fault, found))

    draw()
    identifiable = sum(one.identifiable for one in tallies.values())
    assert len(tallies) >= PLACED * len(_of(stage)), {one.id for one in _of(stage)} - {*tallies}
    lost = [text for one in tallies.values() for text in one.lost]
    assert identifiable - len(lost) >= AT_LEAST * identifiable, lost
    assert not wrong


def _drawn(fault: Fault, seed: int, folders: pytest.TempPathFactory) -> Explanation | None:
    """What is said of the fault in the first cohort that it happens to."""
    folder = folders.mktemp("draw")
    for number in range(PATIENCE):
        found = explanation_of(fault, seed + number, folder / f"lake-{number}")
        if found is not None:
            return found
    return None


def _misses(fault: Fault, found: Explanation) -> list[str]:
    """What is said of a draw without what has to be said: what else it may have been."""
    ways = [way for one in found.hypotheses for way in (one.sentence, *one.alike)]
    if len(ways) > 1 and not found.told and "On this cohort the same as" not in found.text:
        return [f"{fault.id}: {found.text}"]
    return []
