"""A policy held against each rollout or step as it completes."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.helpers.gates import HEALTHY, RUN, beat, reserve
from tests.helpers.mismatches import write_pair
from tests.helpers.queried import catalog_of
from tests.helpers.small_lakes import rollout
from trajreplay import Lake, QueryError, query
from trajreplay.schema.identity import ResumePoint
from trajreplay.stages import CohortReport
from trajreplay.stages.gate import Policy, captured, gate
from trajreplay.stages.gate.checks import CHECKS, CHECKS_BY_NAME
from trajreplay.stages.watch import Watch

LIMITS = Policy(checks={"delta_tail": {}, "generation_kl": {"below": 0.001}}, run="intermediate")


def step(lake: Lake, step_id: int, delta: float, **options: Any) -> None:
    """A step whose trainer is off by so much in every token."""
    sampler = [[-1.0, -2.0, -0.5], [-0.25, -3.0]]
    trainer = [[one + delta for one in row] for row in sampler]
    write_pair(lake, trainer, sampler, step_id=step_id, **options)


def failing(watch: Watch) -> dict[int | None, list[str]]:
    """By step of the last look, the checks that it fails."""
    found = {}
    for one in watch.poll():
        checks = watch.gate(one)
        found[one.step_id] = [check.check for check in checks if check.verdict == "fail"]
        watch.done(one)
    return found


@pytest.mark.parametrize(
    ("delta", "fails"),
    [(0.001, []), (0.25, ["generation_kl"]), (-1.5, ["delta_tail", "generation_kl"])],
)
def test_only_the_step_that_is_off_fails(lake: Lake, delta: float, fails: list[str]) -> None:
    for step_id, off in enumerate((0.001, delta, 0.001)):
        step(lake, step_id, off)
    assert failing(lake.watch(policy=LIMITS, wait=0)) == {0: [], 1: fails, 2: []}


def test_a_step_that_lacks_the_values_fails(lake: Lake) -> None:
    write_pair(lake, [[-1.0]], [[-1.0]], masks=[[0]])
    assert failing(lake.watch(policy=LIMITS, wait=0)) == {0: ["delta_tail", "generation_kl"]}


def test_a_rollout_is_held_against_replay_alone(lake: Lake) -> None:
    rollout(lake, 0)
    rollout(lake, 1, reward=5.5)
    watch = lake.watch(policy="replay-clean")
    told = {one.rollout_id: watch.gate(one) for one in watch.poll()}
    assert [(one.check, one.verdict) for one in told[0]] == [
        ("captures", "pass"),
        ("replay", "pass"),
    ]
    assert [(one.check, one.verdict, one.reason) for one in told[1]] == [
        ("replay", "fail", "it is diverged"),
        ("captures", "pass", ""),
    ]


def test_the_baseline_is_that_of_the_steps_before_also_after_a_restart(lake: Lake) -> None:
    policy = Policy(checks={"mismatch_baseline": {"window": 2, "factor": 3.0, "patience": 1}})
    for step_id, delta in enumerate((0.01, 0.01, 0.02, 0.5)):
        step(lake, step_id, delta)
    first = lake.watch(policy=policy, wait=0)
    told = {}
    for one in first.poll():
        told[one.step_id] = watched(first, one)
        first.done(one)
    assert told == {0: "not-judged", 1: "not-judged", 2: "pass", 3: "fail"}
    step(lake, 4, 0.01)
    again = lake.watch(policy=policy, seen=first.seen, wait=0)
    assert {one.step_id: watched(again, one) for one in again.poll()} == {4: "fail"}


def test_the_baseline_of_a_resumed_attempt_is_that_of_its_chain(lake: Lake) -> None:
    """Its own first steps would hide what had drifted before it was resumed."""
    policy = Policy(checks={"mismatch_baseline": {"window": 2, "factor": 3.0, "patience": 1}})
    for rollout_id, delta in enumerate((0.01, 0.01, 0.5, 0.5)):
        step(lake, 0, delta, rollout_id=rollout_id)
    reserve(lake, 1, ResumePoint(0, 2))
    for rollout_id in (2, 3, 4):
        step(lake, 0, 0.5, rollout_id=rollout_id, attempt=1)
    watch = lake.watch(policy=policy, wait=0)
    told = {(one.attempt, one.rollout_id): watched(watch, one) for one in watch.poll()}
    assert told == {
        (0, 0): "not-judged",
        (0, 1): "not-judged",
        (1, 2): "fail",
        (1, 3): "fail",
        (1, 4): "fail",
    }
    (alone,) = gate(catalog_of(lake), policy, RUN, [1]).checks
    assert (alone.verdict, "--attempts 0,1" in alone.reason) == ("fail", True)
    (chain,) = gate(catalog_of(lake), policy, RUN, [0, 1]).checks
    assert chain.reason.startswith("step 2:0 is the first above, 0.5 nat against 0.03 nat, 3 x the")


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize(
    ("captured_rollouts", "last"),
    [((0, 1, 2, 4), 0.5), ((0, 1, 2, 4), 0.001), ((0, 4, 5), 0.5), ((4, 5, 6, 7), 0.5)],
)
def test_the_baseline_of_a_step_is_that_of_the_gate_up_to_it(
    lake: Lake, captured_rollouts: Sequence[int], last: float, heard: bool
) -> None:
    """Whichever steps were captured, and whether or not heartbeats tell of the others."""
    policy = Policy(checks={"mismatch_baseline": {}})
    reserve(lake, 0)
    for rollout_id in captured_rollouts:
        delta = last if rollout_id == captured_rollouts[-1] else 0.001
        step(lake, 0, delta, rollout_id=rollout_id, run_id=RUN)
    for rollout_id in range(captured_rollouts[-1] + 1) if heard else ():
        beat(lake, 0, rollout_id + 1, HEALTHY | {"abs_delta": 0.001})
    watch = lake.watch(policy=policy, wait=0)
    (*_, judged) = (watched(watch, one) for one in watch.poll())
    checks = {one.check: one for one in gate(catalog_of(lake), policy, RUN, [0]).checks}
    assert judged == checks["mismatch_baseline"].verdict


@pytest.mark.parametrize("heard", [False, True])
def test_a_capture_that_is_refused_fails_the_attempt(lake: Lake, heard: bool) -> None:
    step(lake, 0, 0.0, source="copy:rollout_log_probs", run_id=RUN)
    if heard:
        beat(lake, 0, 1, HEALTHY)
    assert failing(lake.watch(policy=LIMITS, wait=0)) == {
        0: ["attempt", "delta_tail", "generation_kl"]
    }


@pytest.mark.parametrize(
    ("checks", "reads"),
    [
        (("captures", "replay"), set()),
        (("captures", "truncation"), {"signal"}),
        (("delta_tail", "replay"), {"mismatch"}),
        (("mismatch_baseline", "truncation"), {"mismatch", "signal"}),
    ],
)
def test_of_a_step_is_read_what_the_policy_asks_for(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, checks: tuple[str, ...], reads: set[str]
) -> None:
    real, seen = query.run_sql, []

    def reading(catalog: Any, text: str, **options: Any) -> Any:
        seen.append("signal" if "advantage_abs_max" in text else "loss")
        return real(catalog, text, **options)

    def measuring(*args: Any, **options: Any) -> Any:
        seen.append("mismatch")
        return query.mismatch(*args, **options)

    monkeypatch.setattr(captured, "run_sql", reading)
    monkeypatch.setattr(captured, "mismatch", measuring)
    step(lake, 0, 0.001)
    watch = lake.watch(policy=Policy(checks={one: {} for one in checks}), wait=0)
    for one in watch.poll():
        watch.gate(one)
    assert set(seen) == reads


def watched(watch: Watch, one: CohortReport) -> str:
    (check,) = watch.gate(one)
    return check.verdict


def test_a_policy_of_the_run_as_a_whole_is_refused(lake: Lake) -> None:
    policy = Policy(checks={"command": {}, "complete": {}}, max_steps=3)
    with pytest.raises(QueryError, match="nothing of a single rollout or step") as refused:
        lake.watch(policy=policy, wait=0)
    assert "trajreplay gate" in str(refused.value)


def test_a_check_that_counts_steps_is_of_no_single_one() -> None:
    assert not [one.name for one in CHECKS if one.of and one.counts_steps]
    assert CHECKS_BY_NAME["replay"].of == "any"
