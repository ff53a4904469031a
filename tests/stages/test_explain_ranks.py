"""A mistake of some ranks is named with them, and one of all ranks is not said to be of some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cohorts import rank_sums
from tests.helpers.scenes import WAY, drawn, halves, write_whole
from tests.helpers.trainer import Arithmetic, Trainer
from trajreplay import Lake
from trajreplay.stages.explain import Explanation

WRONG = {
    "entropy": (replace(WAY, entropy_coef=-WAY.entropy_coef), "loss.entropy"),
}


def _losses(
    folder: Path, seed: int, wrong: dict[int, Arithmetic], offset: float = 0.0
) -> Explanation:
    lake = Lake.create(folder / "lake")
    shares = halves(drawn(seed=seed))
    found = {}
    for rank in shares:
        (one,) = rank_sums(Trainer(wrong.get(rank, WAY)), shares)[rank]
        moved = {**one.values, "loss": one.values["loss"] + (offset if rank in wrong else 0.0)}
        found[rank] = [replace(one, values=moved)]
    write_whole(lake, shares, expected=found)
    (told,) = [one for one in lake.explain().explanations if one.stage == "loss.policy"]
    return told


@settings(max_examples=6)
@given(seed=st.integers(0, 2**16), rank=st.sampled_from([0, 1]))
def test_a_mistake_of_one_rank_is_named_with_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, rank: int
) -> None:
    way, fault = WRONG["entropy"]
    found = _losses(tmp_path_factory.mktemp("one"), seed, {rank: way})
    assert found.first is not None, found.text
    assert (fault,) in [one.faults for one in found.hypotheses], found.text
    assert f", at rank {rank} alone" in found.text


def test_a_mistake_of_all_ranks_is_of_all(tmp_path: Path) -> None:
    way, fault = WRONG["entropy"]
    found = _losses(tmp_path, 3, {0: way, 1: way})
    assert found.first is not None
    assert found.first.faults == (fault,)
    assert "alone" not in found.first.sentence


def test_what_a_fault_does_not_give_at_that_rank_is_none_of_it(tmp_path: Path) -> None:
    way, _ = WRONG["entropy"]
    found = _losses(tmp_path, 3, {1: way}, offset=0.137)
    assert found.first is None, found.text
