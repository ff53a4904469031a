"""Tokens that other weights sampled than recomputed them count, or fail; they never vanish."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.gates import HEALTHY, RUN, beat
from tests.helpers.mismatches import measured, write_pair
from trajreplay import Lake
from trajreplay.stages.gate import GateVerdict, Policy, load_gate_policy

TOKENS = 100
CHECKS = ("delta_tail", "delta_fraction", "generation_kl")


def step(lake: Lake, rollout: int, spans: list[tuple[int, int, int]], delta: Any) -> None:
    """A step of one sample that was sampled by these weights, and recomputed by those of 5."""
    sampled = np.linspace(-2, -1, TOKENS)
    fields = [{"weight_versions": spans}]
    given: dict[str, Any] = {"run_id": RUN, "rollout_id": rollout, "fields": fields, "version": 5}
    write_pair(lake, [sampled + delta], [sampled], **given)


def judged(lake: Lake, policy: Policy) -> GateVerdict:
    return Lake.open(lake.path).gate(policy, RUN, [0])


def demanding(*checks: str, **stated: Any) -> Policy:
    return Policy(checks={"attempt": {}} | dict.fromkeys(checks, stated))


def test_a_step_passes_no_check_by_the_one_token_whose_weights_are_known_to_be_right(
    lake: Lake,
) -> None:
    delta = np.full(TOKENS, -29.0)
    delta[-1] = 0.001
    step(lake, 0, [(0, TOKENS - 1, 4), (TOKENS - 1, TOKENS, 5)], delta)
    verdict = judged(lake, demanding(*CHECKS))
    assert set(verdict.failing) == set(CHECKS)
    assert all("99 valid tokens of step 0:0 " in one.reason for one in verdict.checks if one.reason)
    counted = judged(lake, demanding(*CHECKS, any_version=True))
    assert set(counted.failing) == set(CHECKS)
    tail = next(one for one in counted.checks if one.check == "delta_tail")
    assert tail.value == pytest.approx(29, rel=1e-6)


@pytest.mark.parametrize("of_old", [1, TOKENS // 2, TOKENS])
@pytest.mark.parametrize("any_version", [False, True])
def test_a_run_behind_is_certified_where_the_policy_counts_it(
    lake: Lake, of_old: int, any_version: bool
) -> None:
    for rollout in range(5):
        step(lake, rollout, [(0, of_old, 4), (of_old, TOKENS, 5)], 0.001)
    verdict = judged(lake, demanding(*CHECKS, "mismatch_baseline", any_version=any_version))
    failing = () if any_version else {*CHECKS, "mismatch_baseline"}
    assert set(verdict.failing) == set(failing)
    assert verdict.certifies is any_version
    told = [one.reason for one in verdict.checks if one.reason]
    assert all(
        f"{5 * of_old} valid tokens of step 0:0, 1:0, 2:0, 3:0, 4:0 were" in one for one in told
    )


def test_a_pass_says_what_only_one_side_states(lake: Lake) -> None:
    """Nobody knows that it is the same; who certifies reads so."""
    sampled = np.linspace(-2, -1, TOKENS)
    given: dict[str, Any] = {"run_id": RUN, "temperatures": (0.7, None), "version": 5}
    for rollout in range(2):
        write_pair(lake, [sampled + 0.001], [sampled], rollout_id=rollout, **given)
    verdict = judged(lake, demanding(*CHECKS))
    assert verdict.verdict == "pass"
    unknown = "is not: whether they are the same is not known"
    weights = (
        "which weights recomputed old_log_probs is stated and which sampled 200 of the valid "
        "tokens is not, of 0:0, 1:0: whether they are the same is not known"
    )
    temperature = (
        f"the temperature of old_log_probs is stated (0.7) and that of rollout_log_probs {unknown}"
    )
    told = {one.check: one.reason for one in verdict.checks if one.check != "attempt"}
    assert told == dict.fromkeys(CHECKS, f"{temperature}; {weights}")


def test_a_pass_says_of_which_steps_heartbeats_alone_tell(lake: Lake) -> None:
    for rollout in range(4):
        beat(lake, 0, rollout + 1, HEALTHY)
        if rollout != 2:
            step(lake, rollout, [(0, TOKENS, 5)], 0.001)
    told = [one.reason for one in judged(lake, demanding(*CHECKS)).checks if one.reason]
    assert told == ["of step 2:0 by what heartbeats tell"] * len(CHECKS)


def test_each_check_counts_the_tokens_that_it_states(lake: Lake) -> None:
    step(lake, 0, [(0, TOKENS, 4)], 0.001)
    policy = Policy(checks={"delta_tail": {"any_version": True}, "generation_kl": {}})
    assert judged(lake, policy).failing == ("generation_kl",)


def test_masked_tokens_of_other_weights_fail_nothing(lake: Lake) -> None:
    sampled = np.linspace(-2, -1, TOKENS)
    fields = [{"weight_versions": [(0, 50, 4), (50, TOKENS, 5)]}]
    masks = [[0] * 50 + [1] * 50]
    write_pair(lake, [sampled + 0.001], [sampled], masks, run_id=RUN, fields=fields, version=5)
    assert judged(lake, demanding(*CHECKS)).verdict == "pass"


def test_a_watch_holds_each_step_to_the_same(lake: Lake) -> None:
    step(lake, 0, [(0, 1, 4), (1, TOKENS, 5)], 0.001)
    for any_version, wanted in ((False, "fail"), (True, "pass")):
        policy = Policy(checks={"delta_tail": {"any_version": any_version}})
        watch = lake.watch(policy=policy, wait=0)
        assert [check.verdict for one in watch.poll() for check in watch.gate(one)] == [wanted]


def test_a_measurement_says_of_which_steps_tokens_are_left_out(lake: Lake) -> None:
    for rollout, old in ((0, 3), (1, 0), (2, 7)):
        step(lake, rollout, [(0, old, 4), (old, TOKENS, 5)] if old else [(0, TOKENS, 5)], 0.001)
    report = measured(lake)
    assert report.of_other_version == {RUN: {(RUN, 0, 0, 0): 3, (RUN, 0, 2, 0): 7}}
    assert ["10 valid tokens are left out" in one.message for one in report.findings] == [True]
    assert measured(lake, any_version=True).of_other_version == {RUN: {}}


@pytest.mark.parametrize("given", [1, "yes", "true"])
def test_whether_tokens_of_other_weights_count_is_true_or_false(tmp_path: Path, given: Any) -> None:
    file = tmp_path / "policy.toml"
    shown = given if isinstance(given, int) else f'"{given}"'
    file.write_text(f"[checks.delta_tail]\nany_version = {shown}\n")
    with pytest.raises(Exception, match="expected true or false"):
        load_gate_policy(file)
