"""Every fault, put into drawn cohorts of any settings: its explanation is found."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.faulty import blocks, explained, with_fault
from tests.helpers.healthy_composed import Draw
from tests.stages.test_composed import CHANGES, STAGES
from trajreplay.schema.settings import PROFILES
from trajreplay.stages.faults import FAULTS

NAMED = {name: changes for name, (changes, _) in CHANGES.items()}
MADE = [one for one in FAULTS if one.tries is not None]
# Faults put into each stage; more of them, for a longer look.
DRAWS = int(os.environ.get("TRAJREPLAY_FAULT_DRAWS", "12"))
AT_LEAST = 0.95


@pytest.mark.parametrize("stage", sorted({one.stage for one in MADE}))
def test_the_fault_that_was_made_is_named(tmp_path: Path, stage: str) -> None:
    """Another one may be named before it only where both give the same numbers, which is said."""
    named, first, made = Counter[str](), Counter[str](), Counter[str]()
    lost: list[tuple[int, str, str]] = []
    seed = 0
    while made.total() < DRAWS:
        draw = Draw(7_000 + seed, NAMED, STAGES)
        profile = [None, *PROFILES][seed % (len(PROFILES) + 1)]
        (block,) = blocks(tmp_path / str(seed), draw, profile, 1)
        faults = [one for one in MADE if one.stage == stage]
        draw.choose.shuffle(faults)
        for fault in sorted(faults, key=lambda one: made[one.id])[:4]:
            assert fault.tries is not None
            told = list(fault.tries(block))
            draw.choose.shuffle(told)
            faulty = next(filter(None, (with_fault(block, stage, one) for one in told[:4])), None)
            if faulty is None:
                continue
            found = explained(faulty, stage, FAULTS)
            said = [one.faults for one in found.hypotheses]
            made[fault.id] += 1
            first[fault.id] += said[:1] == [(fault.id,)]
            named[fault.id] += (fault.id,) in said
            if (fault.id,) not in said:
                lost.append((7_000 + seed, fault.id, found.text))
        seed += 1
    for one in made:
        print(f"{one}: made {made[one]}, first {first[one]}, named {named[one]}")  # noqa: T201
    assert named.total() >= AT_LEAST * made.total(), lost
