"""Real faults with numbers: what a right run shows passes, what a faulty one shows is named."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cohorts import Expected
from tests.helpers.scenes import (
    diverged,
    refusals,
    the_cohort,
    the_stage,
    write_rollout,
    write_step,
    write_whole,
)
from tests.helpers.trainer import Arithmetic, Sample
from trajreplay import Lake, RecomputeConfig
from trajreplay.stages import CohortReport

FILE = Path(__file__).parent.parent / "cases" / "fault_cases.json"
CASES = {one["id"]: one for one in json.loads(FILE.read_text()) if one["level"] == "pipeline"}

# Held by test_fault_cases_composed.py and test_trajectories.py, under later settings.
COMPOSED = {
    "K-006",
    "K-011",
    "K-012",
    "K-018",
    "K-019",
    "K-021",
    "K-024",
    "K-025",
    "K-028",
    "K-029",
    "K-030",
    "K-043",
    "K-044",
    "K-046",
    "K-055",
}
# Held by test_fault_cases_log_probs.py: findings of the stage sample.
LOG_PROBS = {"K-031", "K-034", "K-035", "K-050"}
# Held by test_witness.py of the recorder.
WITNESSED = {"K-062"}
# Held by test_explain.py.
EXPLAINED = {"K-069"}
SIDES = ["right", "wrong"]


def _values(case: dict[str, Any], side: str, name: str) -> Any:
    found = case[side][name]
    if isinstance(found, list):
        return [float(one) for one in found]
    return float(found)


def _sample(number: int, group: str | None, raw: float, reward: float, length: int = 2) -> Sample:
    sample = Sample(f"s-{number}", group, [1] * length, raw, reward=reward)
    advantages = torch.full((length,), reward, dtype=torch.float32)
    sample.columns = {"advantages": advantages}
    return sample


REWARD_STAGES = ("sample", "reward.raw", "reward.post_process", "advantage.estimate")


def _rewards(
    lake: Lake, way: Arithmetic, raw: Sequence[float], groups: Sequence[int], rewards: list[float]
) -> CohortReport:
    """The replay of a rollout with these rewards, all advantages made of them."""
    samples = [
        _sample(row, f"g-{group}", given, used)
        for row, (given, group, used) in enumerate(zip(raw, groups, rewards, strict=True))
    ]
    write_rollout(lake, samples, way, settings=way.full, stages=REWARD_STAGES)
    return the_cohort(lake.replay(), step_id=None)


def _judge(side: str, cohort: CohortReport, name: str, stage: str = "") -> None:
    """Hold a verdict against a case; it names the stage that the case names unless told."""
    stage = stage or CASES[name]["stage"]
    if side == "right":
        assert cohort.verdict in ("pass", "precision")
    else:
        assert cohort.first_divergent_stage == stage
        assert diverged(cohort) == [stage]


def _normalised(
    case: dict[str, Any], way: Arithmetic, name: str = "advantage"
) -> Callable[..., None]:
    def check(lake: Lake, side: str) -> None:
        inputs = case["inputs"]
        rewards = _values(case, side, name)
        cohort = _rewards(lake, way, inputs["rewards"], inputs["group_index"], rewards)
        _judge(side, cohort, case["id"])
        if side == "wrong":
            right = _values(case, "right", name)
            off = {
                f"s-{row}"
                for row, pair in enumerate(zip(right, rewards, strict=True))
                if abs(pair[0] - pair[1]) > 1.1e-5 * abs(pair[0])
            }
            found = the_stage(cohort, "reward.post_process")
            assert found.mismatches == len(off)
            assert {one.sample_id for one in found.divergences} <= off
            assert the_stage(cohort, "advantage.estimate").inherited

    return check


def _k022(lake: Lake, side: str) -> None:
    """The reply as received is recorded beside the score that was used."""
    case = CASES["K-022"]
    sample = _sample(0, None, _values(case, side, "score"), 0.0)
    sample.reward = sample.raw_reward
    reply = Expected(
        {"raw_rewards": [case["inputs"]["reply"]["scores"]]}, {"scope": "sample"}, "reward.raw"
    )
    way = Arithmetic(grouped=False)
    write_rollout(lake, {0: [sample]}, way, stages=REWARD_STAGES[:3], expected={0: [reply]})
    _judge(side, the_cohort(lake.replay(), step_id=None), "K-022")


def _k027(lake: Lake, side: str) -> None:
    """The KL of k1 is a difference, so that the reference is the policy less the KL."""
    case = CASES["K-027"]
    sample = _sample(0, "g-0", 1.0, 0.0, length=3)
    kl = torch.tensor(_values(case, "right", "recorded_kl"))
    sample.columns["old_log_probs"] = torch.tensor([-0.5, -0.25, -1.0])
    sample.columns["ref_log_probs"] = sample.columns["old_log_probs"] - kl
    sample.columns["kl"] = torch.tensor(_values(case, side, "recorded_kl"))
    stages = [*REWARD_STAGES, "advantage.kl"]
    write_rollout(lake, {0: [sample]}, Arithmetic(kl_coef=0.05), stages=stages)
    _judge(side, the_cohort(lake.replay(), step_id=None), "K-027")


def _k039(lake: Lake, side: str) -> None:
    """The cast on the way into the batch shows at the handoff."""
    case = CASES["K-039"]
    sample = _sample(0, "g-0", 1.0, 0.0, length=3)
    sample.columns["rollout_log_probs"] = torch.tensor(case["inputs"]["rollout_logp"])
    write_rollout(lake, {0: [sample]}, Arithmetic(), stages=REWARD_STAGES)
    consumed = sample.copy()
    consumed.columns["rollout_log_probs"] = torch.tensor(_values(case, side, "rollout_logp"))
    write_step(lake, {0: [consumed]}, Arithmetic(), stages=["sample"], expected={})
    _judge(side, the_cohort(lake.replay()), "K-039")


def _trained(losses: Sequence[float], mask: Sequence[int], number: int = 0) -> Sample:
    """A sample of these token losses: the ratio is 1, and the advantage the loss's opposite."""
    sample = _sample(number, None, 0.0, 0.0, length=len(losses))
    sample.mask = list(mask)
    sample.columns = {
        name: torch.full((len(losses),), -1.0) for name in ("log_probs", "old_log_probs")
    }
    sample.columns["advantages"] = -torch.tensor(list(losses))
    return sample


PLAIN = Arithmetic(entropy_coef=0.0, kl_coef=0.0, eps_clip_high=None)


def _loss(
    lake: Lake,
    shares: dict[int, list[Sample]],
    values: dict[str, float],
    meaning: dict[str, Any] | None = None,
    way: Arithmetic = PLAIN,
    **options: Any,
) -> CohortReport:
    """The replay of a step whose recorded loss is this, and whose other terms are right."""
    scalars = {"loss": values["loss"], "pg_loss": values["loss"], "pg_clipfrac": 0.0}
    expected = Expected(
        {**scalars, "ppo_kl": 0.0, **values}, meaning or {"scope": "rank", "reduction": "sum"}
    )
    write_step(lake, shares, way, stages=["loss.policy"], expected={0: [expected]}, **options)
    return the_cohort(lake.replay())


def _masked_loss(case: dict[str, Any], mask: str) -> Callable[..., None]:
    """One sample, whose masked mean is the token mean too."""

    def check(lake: Lake, side: str) -> None:
        inputs = case["inputs"]
        sample = _trained(inputs["per_token_loss"], [int(one) for one in inputs[mask]])
        cohort = _loss(lake, {0: [sample]}, {"loss": _values(case, side, "loss")})
        _judge(side, cohort, case["id"])

    return check


def _k051(lake: Lake, side: str) -> None:
    """Without the token that the lower bound is meant for, a dual clip is none."""
    case = CASES["K-051"]
    kept = [row for row, one in enumerate(case["inputs"]["advantage"]) if one > 0]
    sample = _trained([0.0] * len(kept), [1] * len(kept))
    ratio = torch.tensor([case["inputs"]["ratio"][row] for row in kept])
    sample.columns["log_probs"] = sample.columns["old_log_probs"] + ratio.log()
    sample.columns["advantages"] = torch.tensor([case["inputs"]["advantage"][row] for row in kept])
    losses = [_values(case, side, "per_token_loss")[row] for row in kept]
    mean = sum(losses) / len(kept)
    values = {"loss": mean, "pg_clipfrac": 1 / 3, "ppo_kl": -float(ratio.log().mean())}
    _judge(side, _loss(lake, {0: [sample]}, values), "K-051")


def _k056(lake: Lake, side: str) -> None:
    """A token a sample, so that the mean over samples is the mean over tokens."""
    inputs = CASES["K-056"]["inputs"]
    shares = {
        rank: [_trained([loss], [1], 10 * rank + row) for row, loss in enumerate(inputs[name])]
        for rank, name in enumerate(("rank0_token_losses", "rank1_token_losses"))
    }
    loss = {"loss": _values(CASES["K-056"], side, "loss")}
    cohort = _loss(lake, shares, loss, {"scope": "global", "reduction": "mean"})
    _judge(side, cohort, "K-056")


def _k057(lake: Lake, side: str) -> None:
    inputs = CASES["K-057"]["inputs"]
    losses = [loss for batch in inputs["micro_batch_token_losses"] for loss in batch]
    samples = [_trained([loss], [1], number) for number, loss in enumerate(losses)]
    loss = {"loss": _values(CASES["K-057"], side, "loss")}
    cohort = _loss(lake, {0: samples}, loss, {"scope": "rank", "reduction": "mean"})
    _judge(side, cohort, "K-057")
    if side == "wrong":
        (found, _) = the_stage(cohort, "loss.policy").divergences
        assert found.ratio == pytest.approx(1 / CASES["K-057"]["config"]["grad_accum"])


def _k059(lake: Lake, side: str) -> None:
    inputs = CASES["K-059"]["inputs"]
    sample = _trained(
        [inputs["loss_sum"] / inputs["tokens"]] * inputs["tokens"], [1] * inputs["tokens"]
    )
    cohort = _loss(lake, {0: [sample]}, {"loss": _values(CASES["K-059"], side, "loss")})
    _judge(side, cohort, "K-059")


def _k061(lake: Lake, side: str) -> None:
    """A loss with a KL term is refused by name, whatever the sign of the term."""
    case = CASES["K-061"]
    sample = _trained([case["inputs"]["policy_loss"]], [1])
    values = {"loss": _values(case, side, "loss"), "pg_loss": case["inputs"]["policy_loss"]}
    stated = _loss(lake, {0: [sample]}, values, settings=RecomputeConfig(use_kl_loss=True))
    assert stated.verdict == "refused"
    assert "loss.use_kl_loss is True" in refusals(stated)
    other = Lake.create(Path(lake.path).parent / "unstated")
    unstated = _loss(other, {0: [sample]}, values)
    assert diverged(unstated) == ["loss.policy"]
    assert "use_kl_loss" in unstated.findings[0].message


def _k064(lake: Lake, side: str) -> None:
    """The masked NaN is a warning, and on the right side reaches no reduced value."""
    case = CASES["K-064"]
    old, ref = (
        torch.tensor([float(one) for one in case["inputs"][name]]) for name in ("logp", "ref_logp")
    )
    sample = _trained([0.0] * 3, case["inputs"]["mask"])
    sample.group, sample.raw_reward = "g-0", 1.0
    sample.columns |= {
        "old_log_probs": old,
        "ref_log_probs": ref,
        "kl": old - ref,
        "log_probs": ref,
    }
    mean = _values(case, side, "kl_mean")
    stages = ["advantage.kl", "loss.policy"]
    scalars = {"loss": 0.0, "pg_loss": 0.0, "pg_clipfrac": 0.0, "ppo_kl": mean}
    way = replace(PLAIN, kl_coef=0.1)
    write_whole(lake, {0: [sample]}, way, stages=stages, expected={0: [Expected(scalars)]})
    cohort = the_cohort(lake.replay())
    _judge(side, cohort, "K-064", "loss.policy")
    assert the_stage(cohort, "advantage.kl").verdict == "pass"
    warning = next(one for one in cohort.findings if one.check == "non-finite.masked")
    assert (warning.stage, warning.token) == ("advantage.kl", 1)


def _k068(lake: Lake, side: str) -> None:
    case = CASES["K-068"]
    sample = _trained([case["inputs"]["policy_loss"]], [1])
    sample.columns["entropy"] = torch.tensor([case["inputs"]["entropy"]])
    values = {
        "loss": _values(case, side, "loss"),
        "pg_loss": case["inputs"]["policy_loss"],
        "entropy_loss": case["inputs"]["entropy"],
    }
    way = replace(PLAIN, entropy_coef=case["config"]["entropy_coef"])
    cohort = _loss(lake, {0: [sample]}, values, way=way)
    _judge(side, cohort, "K-068")


def _scaled(eps: float, *, std: bool) -> Arithmetic:
    return Arithmetic(group_size=2, std=std, epsilon=eps)


# K-064 names advantage.kl for the mean of a KL; the mean that V1 knows of it is one of the loss.
COVERED: dict[str, Callable[..., None]] = {
    "K-001": _normalised(CASES["K-001"], Arithmetic(group_size=4)),
    "K-003": _normalised(CASES["K-003"], Arithmetic(ddof=0, epsilon=1e-5)),
    "K-005 group": _normalised(CASES["K-005"], _scaled(1e-4, std=True), "scale=group"),
    "K-005 none": _normalised(CASES["K-005"], _scaled(1e-4, std=False), "scale=none"),
    "K-015": _normalised(CASES["K-015"], Arithmetic(group_size=4)),
    "K-022": _k022,
    "K-027": _k027,
    "K-038": _masked_loss(CASES["K-038"], "response_mask"),
    "K-039": _k039,
    "K-051": _k051,
    "K-056": _k056,
    "K-057": _k057,
    "K-059": _k059,
    "K-060": _masked_loss(CASES["K-060"], "loss_mask"),
    "K-061": _k061,
    "K-064": _k064,
    "K-065": _masked_loss(CASES["K-065"], "mask"),
    "K-068": _k068,
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("case", COVERED)
def test_a_right_run_passes_and_a_faulty_one_is_named(lake: Lake, case: str, side: str) -> None:
    COVERED[case](lake, side)


def test_every_case_of_the_pipeline_is_covered_or_says_why_not() -> None:
    covered = {name.split()[0] for name in COVERED}
    assert covered | COMPOSED | LOG_PROBS | EXPLAINED | WITNESSED == CASES.keys()
    assert not covered & WITNESSED


def test_a_short_group_is_no_group_of_two(lake: Lake) -> None:
    case = CASES["K-003"]
    inputs = case["inputs"]
    way = Arithmetic(group_size=case["config"]["group_size"], ddof=0, epsilon=1e-5)
    rewards = _values(case, "right", "advantage")
    cohort = _rewards(lake, way, inputs["rewards"], inputs["group_index"], rewards)
    (found,) = the_stage(cohort, "reward.post_process").divergences
    assert (found.field, found.group_id, found.recorded) == ("group_size", "g-0", 1.0)
    assert math.isclose(found.recomputed, 2.0)
