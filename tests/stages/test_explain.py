"""Real faults are named: the first explanation of a faulty run is the mistake that it made."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.captures import sample, start
from tests.helpers.cohorts import Expected, capture
from tests.helpers.scenes import WAY, drawn, the_cohort, the_stage, write_rollout
from tests.helpers.trainer import Sample
from tests.stages import test_fault_cases as plain
from tests.stages import test_fault_cases_composed as composed
from trajreplay import Lake, Settings, with_changes
from trajreplay.stages.explain import Explanation, clusters

# By case, the ids of the faults that explain its wrong side, the first of them first.
NAMED: dict[str, str] = {
    "K-001": "reward.grouped-by-batch",
    "K-005 group": "reward.not-divided",
    "K-005 none": "reward.divided",
    "K-015": "reward.no-brackets",
    "K-027": "kl.overwritten",
    "K-038": "loss.mask",
    "K-039": "handoff.rounded",
    "K-051": "loss.dual-clip-positive",
    "K-056": "loss.parts-averaged",
    "K-057": "loss.factor",
    "K-059": "loss.denominator-dropped",
    "K-060": "loss.mask",
    "K-064": "loss.nan",
    "K-065": "loss.nan",
    "K-068": "loss.entropy",
}


def _first(lake: Lake, stage: str) -> Explanation:
    found = [one for one in lake.explain().explanations if one.stage == stage]
    assert found, [one.text for one in lake.explain().explanations]
    return found[0]


def _check(lake: Lake, stage: str, fault: str) -> None:
    found = _first(lake, stage)
    assert found.first is not None, found.text
    assert found.first.faults == (fault,), found.text
    assert found.first.known_as in found.text
    assert f"trajreplay faults {fault}" in found.text


@pytest.mark.parametrize("case", NAMED)
def test_the_fault_of_a_case_is_the_first_explanation(lake: Lake, case: str) -> None:
    plain.COVERED[case](lake, "wrong")
    stage = plain.CASES[case.split(maxsplit=1)[0]]["stage"]
    _check(lake, "loss.policy" if case == "K-064" else stage, NAMED[case])


COMPOSED = {
    "K-018": "reward.missing-counted",
    "K-021": "advantage.wrong-axis",
    "K-030": "advantage.broadcast-view",
    "K-024": "advantage.through-masked",
    "K-025": "advantage.through-masked",
    "K-028": "reward.length-of-tool-tokens",
    "K-043": "loss.weight-of-current",
    "K-044": "loss.infinite-weight",
    "K-046": "loss.ratio",
    "K-055": "loss.factor",
    "K-011": "handoff.zeroed",
    "K-029": "loss.advantages",
}


# Cases with a test of their own, below and in test_fault_cases_composed.py.
WRITTEN_OUT = ("K-003", "K-006", "K-012", "K-019", "K-061", "K-066", "K-069", "K-073")


@pytest.mark.parametrize("case", COMPOSED)
def test_the_fault_of_a_composed_case_is_the_first_explanation(lake: Lake, case: str) -> None:
    replay, stage = composed.CHECKS[case]
    replay(lake, "wrong")
    _check(lake, stage, COMPOSED[case])


@pytest.mark.parametrize("case", [one for one in plain.COVERED if one != "K-061"])
def test_a_right_run_needs_no_explanation(lake: Lake, case: str) -> None:
    plain.COVERED[case](lake, "right")
    assert lake.explain().explanations == []


def _rewarded(
    lake: Lake, settings: Settings, raw: list[float], groups: list[int], rewards: list[float]
) -> None:
    """Rewards of one rank, in the order in which it had them."""
    samples = [
        Sample(f"s-{row}", f"g-{group}", [1], given, reward=used)
        for row, (given, group, used) in enumerate(zip(raw, groups, rewards, strict=True))
    ]
    stages = ("sample", "reward.raw", "reward.post_process")
    capture(lake, {0: samples}, WAY, settings=settings, stages=stages, columns=())


def test_rows_after_the_last_stride_are_named(lake: Lake) -> None:
    case = plain.CASES["K-003"]
    inputs = case["inputs"]
    settings = with_changes(Settings(), {"reward.ddof": 0, "reward.epsilon": 1e-5})
    _rewarded(lake, settings, inputs["rewards"], inputs["group_index"], case["wrong"]["advantage"])
    _check(lake, "reward.post_process", "reward.stride-tail")


@pytest.mark.parametrize("scale", ["scale=group", "scale=batch", "scale=none"])
def test_exchanged_branches_of_scaling_are_named(lake: Lake, scale: str) -> None:
    case = plain.CASES["K-005"]
    declared: dict[str, dict[str, Any]] = {
        "scale=group": {},
        "scale=batch": {"reward.std_grouping": "batch"},
        "scale=none": {"reward.divide_by_std": False},
    }
    named = {
        "scale=group": "reward.not-divided",
        "scale=batch": "reward.std-of-other-set",
        "scale=none": "reward.divided",
    }
    settings = with_changes(Settings(), {"reward.epsilon": 1e-4, **declared[scale]})
    inputs = case["inputs"]
    _rewarded(lake, settings, inputs["rewards"], inputs["group_index"], case["wrong"][scale])
    _check(lake, "reward.post_process", named[scale])


def test_fragments_counted_one_by_one_are_named(lake: Lake) -> None:
    case = plain.CASES["K-012"]
    changes = {"reward.unit": "trajectory", "reward.divide_by_std": False}
    settings = with_changes(Settings(), changes)
    wrong = case["wrong"]["advantage_of_fragments"]
    inputs = case["inputs"]
    with start(lake, settings=settings, stages=["sample", "reward.post_process"]) as builder:
        builder.samples(
            [
                sample(row, trajectory_id=f"t-{trajectory}", raw_reward=raw, reward=used)
                for row, (raw, trajectory, used) in enumerate(
                    zip(inputs["reward"], inputs["trajectory_id"], wrong, strict=True)
                )
            ],
            reward_dtype="float32",
        )
    _check(lake, "reward.post_process", "reward.per-fragment")


def test_whitening_of_each_rank_is_named(lake: Lake) -> None:
    """K-006: a sample a token, on the rank that held it."""
    case = plain.CASES["K-006"]
    inputs = case["inputs"]
    changes = {
        "reward.grouping": "none",
        "advantage.whiten": "cohort",
        "advantage.whiten_ddof": 0,
    }
    shares: dict[int, list[Sample]] = {0: [], 1: []}
    rows = zip(
        inputs["advantages"],
        inputs["loss_mask"],
        inputs["cp_rank_of_token"],
        case["wrong"]["advantages"],
        strict=True,
    )
    for number, (reward, mask, rank, wrong) in enumerate(rows):
        one = Sample(f"s-{number}", "g-0", [int(mask)], reward, reward=reward)
        one.columns = {"advantages": torch.tensor([wrong])}
        shares[rank].append(one)
    stages = ("sample", "reward.raw", "reward.post_process", "advantage.estimate")
    settings = with_changes(Settings(), changes)
    capture(lake, shares, WAY, settings=settings, stages=stages, columns=("advantages",))
    _check(lake, "advantage.estimate", "advantage.whitened-over")


def _trained(
    lake: Lake, settings: Settings, samples: list[Sample], values: dict[str, float]
) -> None:
    meaning = {"scope": "rank", "reduction": settings.loss.batch_reduction}
    capture(
        lake,
        {0: samples},
        WAY,
        step_id=0,
        settings=settings,
        stages=("sample", "loss.policy"),
        columns=sorted({name for one in samples for name in one.columns}),
        expected={0: [Expected(values, meaning)]},
    )


def test_a_subtracted_kl_loss_is_named(lake: Lake) -> None:
    """K-061: k1 of a token is the KL of the case."""
    case = plain.CASES["K-061"]
    inputs, coef = case["inputs"], case["config"]["kl_coef"]
    one = Sample("s-0", "g-0", [1], 0.0, reward=0.0)
    one.columns = {
        "log_probs": torch.tensor([-1.0]),
        "old_log_probs": torch.tensor([-1.0]),
        "ref_log_probs": torch.tensor([-1.0 - inputs["kl"]]),
        "advantages": torch.tensor([-inputs["policy_loss"]]),
    }
    values = {
        "loss": case["wrong"]["loss"],
        "pg_loss": inputs["policy_loss"],
        "kl_loss": inputs["kl"],
        "pg_clipfrac": 0.0,
        "ppo_kl": 0.0,
    }
    _trained(lake, with_changes(Settings(), {"loss.kl_loss_coef": coef}), [one], values)
    _check(lake, "loss.policy", "loss.kl-sign")


@pytest.mark.parametrize("side", ["right", "wrong"])
def test_old_log_probs_of_newer_weights_are_named(lake: Lake, side: str) -> None:
    """K-069: the settings say the sampler's, the loss took the recomputed ones."""
    case = plain.CASES["K-069"]
    inputs = case["inputs"]
    taken = inputs["rollout_logp" if side == "right" else "recomputed_logp"]
    gap = taken - inputs["current_logp"]
    assert math.exp(-gap) == pytest.approx(case[side]["ratio"], abs=case["tol"])
    one = Sample("s-0", "g-0", [1], 0.0, reward=0.0)
    one.columns = {
        "log_probs": torch.tensor([inputs["current_logp"]]),
        "old_log_probs": torch.tensor([inputs["recomputed_logp"]]),
        "rollout_log_probs": torch.tensor([inputs["rollout_logp"]]),
        "advantages": torch.tensor([inputs["advantage"]]),
    }
    loss, clipped = case[side]["loss"], float(side == "right")
    values = {"loss": loss, "pg_loss": loss, "pg_clipfrac": clipped, "ppo_kl": gap}
    _trained(lake, with_changes(Settings(), {"loss.old_source": "rollout"}), [one], values)
    if side == "right":
        cohort = the_cohort(lake.replay())
        assert the_stage(cohort, "loss.policy").verdict in ("pass", "precision")
        assert lake.explain().explanations == []
    else:
        _check(lake, "loss.policy", "loss.old-source")


def test_a_loss_counted_once_per_rank_is_named(lake: Lake) -> None:
    """K-066: two ranks, and a loss of all that is twice what it should be."""
    cases = json.loads(plain.FILE.read_text())
    case = next(one for one in cases if one["id"] == "K-066")
    (loss,) = set(case["inputs"]["policy_loss_on_each_cp_rank"])
    shares = {}
    for rank in range(2):
        one = Sample(f"s-{rank}", "g-0", [1], 0.0, reward=0.0)
        flat = torch.tensor([-1.0])
        one.columns = {"log_probs": flat, "old_log_probs": flat, "advantages": flat * loss}
        shares[rank] = [one]
    values = {"loss": case["wrong"]["policy_loss"], "pg_loss": loss, "pg_clipfrac": 0.0}
    values["ppo_kl"] = 0.0
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        settings=with_changes(Settings(), {"loss.batch_reduction": "mean"}),
        stages=("sample", "loss.policy"),
        columns=("log_probs", "old_log_probs", "advantages"),
        expected={0: [Expected(values, {"scope": "global", "reduction": "mean"})]},
    )
    _check(lake, "loss.policy", "loss.factor")
    assert "times 2, the ranks" in lake.explain().explanations[0].text


def test_what_no_fault_reproduces_is_said_with_the_shape_of_its_error(lake: Lake) -> None:
    samples = drawn()
    for one in samples:
        if one.raw_reward > 0.5:
            one.reward = 1.375 * (one.reward or 0.0) + 0.0625
    write_rollout(lake, samples, stages=("sample", "reward.raw", "reward.post_process"))
    (found,) = lake.explain().explanations
    assert found.first is None
    assert "no known fault reproduces this" in found.text
    assert "only at positive reward" in found.text


def test_cohorts_with_one_explanation_are_one_line(lake: Lake) -> None:
    for rollout in range(6):
        way = WAY if rollout < 2 else replace(WAY, std=False)
        write_rollout(lake, drawn(way, rollout_id=rollout), WAY, settings=WAY.full)
    (found,) = clusters(lake.explain())
    assert (found.stage, found.faults) == ("reward.post_process", ("reward.not-divided",))
    assert (len(found.cohorts), found.judged, found.when) == (4, 6, "since rollout 2")


def test_two_faults_at_once_are_both_named(lake: Lake) -> None:
    way = replace(WAY, ddof=0, epsilon=1e-2)
    stages = ("sample", "reward.raw", "reward.post_process")
    write_rollout(lake, drawn(way), WAY, settings=replace(WAY, epsilon=1e-4).full, stages=stages)
    (found,) = lake.explain().explanations
    assert found.first is None  # no fault of the catalogue has an epsilon of 1e-2
    other = Lake.create(f"{lake.path}-other")
    way = replace(WAY, ddof=0, epsilon=1e-3)
    write_rollout(other, drawn(way), WAY, settings=WAY.full, stages=stages)
    (found,) = other.explain().explanations
    assert found.first is not None
    assert {*found.first.faults} == {"reward.population-std", "reward.other-epsilon"}


def test_the_first_value_that_is_not_finite_is_named(lake: Lake) -> None:
    """K-064: a masked NaN of the old log-probs reaches the KL and a mean of the loss."""
    plain.COVERED["K-064"](lake, "wrong")
    (found,) = lake.explain().non_finite
    assert (found.column, found.token, found.masked) == ("old_log_probs", 1, True)
    assert found.spread == {"old_log_probs": 1, "kl": 1, "ppo_kl": 1}
    assert "the first value that is not finite is old_log_probs of s-0 token 1" in found.text


def test_metrics_are_audited_one_by_one(lake: Lake) -> None:
    plain.COVERED["K-068"](lake, "wrong")
    found = _first(lake, "loss.policy")
    assert {name for name, (bad, _) in found.audit.items() if bad} == {"loss"}
    assert "Of the recorded metrics loss disagree" in found.text
