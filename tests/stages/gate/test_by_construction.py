"""A mismatch that is small by construction, and ends that are told twice, certify nothing."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.gates import RUN, beat, end, healthy_run, reserve
from tests.helpers.mismatches import write_pair
from trajreplay import Lake
from trajreplay.query import Catalog
from trajreplay.schema.events import ENDED_CLEAN, TERMINAL, dump_detail
from trajreplay.schema.identity import make_key
from trajreplay.schema.lakefile import open_lake
from trajreplay.stages.gate import GateVerdict, Policy
from trajreplay.stages.gate.checks import CHECKS_BY_NAME, judged
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.writer import Event, commit_events

SAMPLED = [[-1.0, -2.0, -0.5], [-0.25, -3.0]]
MISMATCH = ("delta_tail", "delta_fraction", "generation_kl")


def gated(lake: Lake, *checks: str, **options: Any) -> GateVerdict:
    policy = Policy(checks={one: {} for one in checks})
    return Lake.open(lake.path).gate(policy, RUN, (0,), **options)


def step(lake: Lake, rollout_id: int, delta: float, **options: Any) -> None:
    trained = [[one + delta for one in row] for row in SAMPLED]
    write_pair(lake, trained, SAMPLED, run_id=RUN, rollout_id=rollout_id, **options)


@pytest.mark.parametrize("equal", [(), (1,), (1, 3, 4), (0, 1, 2, 3, 4, 5)])
def test_a_step_that_is_equal_in_every_bit_fails(lake: Lake, equal: Sequence[int]) -> None:
    reserve(lake, 0)
    for rollout_id in range(6):
        step(lake, rollout_id, 0.0 if rollout_id in equal else 0.001)
    checks = (*MISMATCH, "mismatch_baseline")
    verdict = gated(lake, "attempt", *checks)
    assert set(verdict.failing) == (set(checks) if equal else set())
    assert verdict.certifies is not bool(equal)


@pytest.mark.parametrize("source", ["trainer", "detached", "interpolated"])
def test_interpolated_log_probs_are_not_recomputed(lake: Lake, source: str) -> None:
    reserve(lake, 0)
    step(lake, 0, 0.001)
    step(lake, 1, 0.001, source=source)
    failing = set(gated(lake, "attempt", *MISMATCH).failing)
    assert failing == (set(MISMATCH) if source == "interpolated" else set())


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1e-5]), st.sampled_from([None, 0, 0.0, 1e-3])),
        min_size=1,
        max_size=5,
    )
)
def test_heartbeats_of_a_mismatch_that_is_0_throughout_fail(
    catalog: Catalog, told: list[tuple[float, float | None]]
) -> None:
    steps = {
        number: {"attempt": 0, "generation_kl": kl, "abs_delta_max": largest}
        for number, (kl, largest) in enumerate(told, 1)
    }
    found = Evidence(catalog, RUN, (0,), steps, records=1)
    passed = judged(CHECKS_BY_NAME["generation_kl"], found, Policy()).passed
    assert passed is any(kl or largest for kl, largest in told)


@pytest.mark.parametrize("ends", [["failed", ENDED_CLEAN], [ENDED_CLEAN, "failed"]])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_clean_end_hides_another_one_of_its_rank(
    lake: Lake, ends: Sequence[str], rank: int
) -> None:
    healthy_run(lake, 3)
    end(lake, 0, rank=1)
    assert gated(lake, "terminal").verdict == "pass"
    for place, status in enumerate(ends):
        key = make_key(RUN, 0, "events", 7 + place, 0, rank)
        event = Event(TERMINAL, dump_detail(TERMINAL, {"status": status, "reason": "boom"}))
        commit_events(open_lake(lake.path), key, [event])
    assert gated(lake, "terminal").failing == ("terminal",)


@pytest.mark.parametrize(
    "ended", [{}, {"command_exit": 0}, {"command_exit": 3}, {"command_signal": 9}]
)
def test_a_command_that_failed_fails_also_where_no_policy_names_it(
    lake: Lake, ended: dict[str, int]
) -> None:
    reserve(lake, 0)
    for number in range(1, 4):
        beat(lake, 0, number, {"loss": 0.1})
    failed = ended not in ({}, {"command_exit": 0})
    verdict = gated(lake, "attempt", **ended)
    assert verdict.failing == (("command",) if failed else ())
    assert verdict.certifies is not failed
    assert len(verdict.checks) == 1 + failed
