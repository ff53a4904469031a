"""Faults that cannot change what disagrees are tried last, and what is named stays the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.fault_draws import can_be_put_in, faulty_of
from tests.helpers.faulty import explained
from trajreplay.schema import TrajReplayError
from trajreplay.stages.counterfactuals.values import recompute
from trajreplay.stages.counterfactuals.variants import Variant, varied
from trajreplay.stages.explain.fit import largest_error
from trajreplay.stages.faults import FAULTS, Fault

STAGE = "loss.policy"
SEARCHED = [one for one in FAULTS if one.stage == STAGE and can_be_put_in(one)]
BOUND = [one for one in SEARCHED if one.touches]
_SEEDS = st.integers(0, 2**16)


def test_some_faults_are_bound_to_some_scalars() -> None:
    assert len(BOUND) > 10


@settings(max_examples=15)
@given(fault=st.sampled_from(BOUND), seed=_SEEDS)
def test_a_fault_changes_no_scalar_beside_those_that_it_touches(
    tmp_path_factory: pytest.TempPathFactory, fault: Fault, seed: int
) -> None:
    block = faulty_of(fault, seed, tmp_path_factory.mktemp("touched"))
    if block is None:
        return
    own = recompute(varied(block, Variant(), (STAGE,)), STAGE)
    assert fault.tries is not None
    for told in fault.tries(block):
        try:
            under = {one.key: one for one in recompute(varied(block, told.variant), STAGE)}
        except (TrajReplayError, KeyError):
            continue
        for one in own:
            other = under.get(one.key)
            if other is not None and one.field.partition(".")[0] not in fault.touches:
                moved = replace(other, recorded=one.recomputed)
                assert largest_error(moved, one.counts) < 1e-12, (fault.id, told.detail, one.field)


@settings(max_examples=10)
@given(fault=st.sampled_from(SEARCHED), seed=_SEEDS)
def test_what_is_named_is_what_a_search_of_everything_names(
    tmp_path_factory: pytest.TempPathFactory, fault: Fault, seed: int
) -> None:
    block = faulty_of(fault, seed, tmp_path_factory.mktemp("pruned"))
    if block is None:
        return
    pruned = explained(block, STAGE, FAULTS)
    whole = explained(block, STAGE, [replace(one, touches=()) for one in FAULTS])
    assert [one.faults for one in pruned.hypotheses] == [one.faults for one in whole.hypotheses]
    assert pruned.text == whole.text
