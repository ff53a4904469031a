"""Real faults with numbers, under settings that V1 did not have."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.helpers.cohorts import Expected, capture
from tests.helpers.scenes import WAY, the_cohort, the_stage
from tests.helpers.trainer import Sample
from tests.stages.test_fault_cases import CASES, SIDES
from trajreplay import Lake, Settings, with_changes
from trajreplay.stages import CohortReport

ESTIMATE = ("sample", "reward.raw", "reward.post_process", "advantage.estimate")


def _side(name: str, side: str, field: str) -> list[float]:
    values = CASES[name][side][field]
    values = values if isinstance(values, list) else [values]
    return [float(one) for row in values for one in (row if isinstance(row, list) else [row])]


def _settings(**changes: Any) -> Settings:
    return with_changes(
        Settings(), {name.replace("__", "."): value for name, value in changes.items()}
    )


def _sample(
    number: int, mask: Sequence[float], reward: float, **columns: Sequence[float]
) -> Sample:
    one = Sample(f"s-{number}", "g-0", [int(m) for m in mask], reward, reward=reward)
    one.columns = {
        name: torch.tensor(list(values), dtype=torch.float32) for name, values in columns.items()
    }
    return one


def _replay(
    lake: Lake,
    settings: Settings,
    samples: Sequence[Sample],
    stages: Sequence[str],
    scalars: dict[str, float] | None = None,
) -> CohortReport:
    meaning = {"scope": "rank", "reduction": settings.loss.batch_reduction}
    capture(
        lake,
        {0: list(samples)},
        WAY,
        step_id=0,
        stages=stages,
        columns=sorted({name for one in samples for name in one.columns}),
        settings=settings,
        expected=None if scalars is None else {0: [Expected(scalars, meaning)]},
    )
    return the_cohort(lake.replay())


def _k006(lake: Lake, side: str) -> CohortReport:
    """Tokens of their own samples: what is whitened is the reward of each."""
    inputs = CASES["K-006"]["inputs"]
    settings = _settings(
        reward__grouping="none", advantage__whiten="cohort", advantage__whiten_ddof=0
    )
    found = _side("K-006", side, "advantages")
    rows = zip(inputs["loss_mask"], inputs["advantages"], found, strict=True)
    samples = [
        _sample(number, [mask], reward, advantages=[one])
        for number, (mask, reward, one) in enumerate(rows)
    ]
    return _replay(lake, settings, samples, ESTIMATE)


def _k018(lake: Lake, side: str) -> CohortReport:
    """A reward that is missing is not a number of the others."""
    case = CASES["K-018"]
    epsilon = case["config"]["eps"]
    settings = _settings(
        reward__weights=dict(zip("ab", case["config"]["weights"], strict=True)),
        reward__combination="normalise-then-sum",
        reward__epsilon=epsilon,
        reward__batch_epsilon=epsilon,
        reward__missing="exclude",
    )
    samples = []
    rows = zip(case["inputs"]["rewards_per_func"], _side("K-018", side, "advantage"), strict=True)
    for number, (row, advantage) in enumerate(rows):
        sample = _sample(number, [1], advantage, advantages=[advantage])
        sample.raw_reward = 0.0
        sample.components = {name: float(one) for name, one in zip("ab", row, strict=True)}
        samples.append(sample)
    return _replay(lake, settings, samples, ESTIMATE)


def _k021(lake: Lake, side: str) -> CohortReport:
    """Each row is whitened by itself; without a discount a return is the token's own reward."""
    case = CASES["K-021"]
    settings = _settings(
        reward__grouping="none",
        advantage__estimator="reinforce++",
        advantage__reward_source="token",
        advantage__gamma=0.0,
        advantage__whiten="sample",
        advantage__whiten_ddof=0,
        advantage__whiten_form="std",
        advantage__whiten_epsilon=1e-8,
    )
    samples = [
        _sample(number, [int(m) for m in mask], 0.0, token_rewards=x, advantages=y)
        for number, (mask, x, y) in enumerate(
            zip(case["inputs"]["mask"], case["inputs"]["x"], case[side]["y"], strict=True)
        )
    ]
    return _replay(lake, settings, samples, ESTIMATE)


def _k030(lake: Lake, side: str) -> CohortReport:
    """A penalty on the tokens of one message reaches no other token."""
    inputs = CASES["K-030"]["inputs"]
    length, (start, stop) = inputs["row_length"], inputs["span"]
    faults = [1 if start <= token < stop else 0 for token in range(length)]
    sample = _sample(
        0, [1] * length, inputs["scalar_advantage"], advantages=_side("K-030", side, "advantages")
    )
    sample.columns["message_faults"] = torch.tensor(faults, dtype=torch.uint8)
    settings = _settings(reward__grouping="none", advantage__invalid_tool_call=-1.0)
    return _replay(lake, settings, [sample], ESTIMATE)


def _gae(name: str) -> Callable[[Lake, str], CohortReport]:
    def replay(lake: Lake, side: str) -> CohortReport:
        case = CASES[name]
        mask = case["inputs"].get("response_mask") or case["inputs"]["loss_mask"]
        settings = _settings(
            reward__grouping="none",
            advantage__estimator="gae",
            advantage__gamma=case["config"]["gamma"],
            advantage__lam=case["config"]["lambda"],
            advantage__masking="carry",
            advantage__reward_at="last-unmasked",
        )
        values, found = case["inputs"]["values"], _side(name, side, "advantages")
        sample = _sample(0, mask, 1.0, values=values, advantages=found)
        return _replay(lake, settings, [sample], ESTIMATE)

    return replay


def _k028(lake: Lake, side: str) -> CohortReport:
    """Three tokens of a tool's output do not make a response longer."""
    case = CASES["K-028"]
    rule, (penalty,) = case["config"]["overlong"], _side("K-028", side, "penalty")
    settings = _settings(
        reward__grouping="none",
        reward__overlong_max_length=rule["max_len"],
        reward__overlong_buffer=rule["buffer"],
        reward__overlong_penalty=rule["factor"],
        reward__overlong_counts="trained",
        reward__overlong_floored=True,
    )
    sample = _sample(0, case["inputs"]["action_mask"], 0.5, advantages=[0.5 + penalty] * 10)
    sample.reward = 0.5 + penalty
    return _replay(lake, settings, [sample], ESTIMATE)


def _policy(lake: Lake, settings: Settings, samples: Sequence[Sample], loss: float) -> CohortReport:
    scalars = {"loss": loss, "pg_loss": loss}
    return _replay(lake, settings, samples, ("sample", "loss.policy"), scalars)


def _k011(lake: Lake, side: str) -> CohortReport:
    """The critic's values are masked on the way to the step: of each sample by its own mask."""
    inputs = CASES["K-011"]["inputs"]
    settings = Settings(handoff={"old_values": "masked"})
    found = iter(_side("K-011", side, "values"))
    rows = zip(
        reversed(inputs["values_in_micro_batch_order"]),
        inputs["response_mask_in_batch_order"],
        strict=True,
    )
    made, consumed = [], []
    for number, (values, mask) in enumerate(rows):
        made.append(_sample(number, mask, 0.0, old_values=values))
        consumed.append(_sample(number, mask, 0.0, old_values=[next(found) for _ in values]))
    for step_id, samples in ((None, made), (0, consumed)):
        stages, columns = ("sample",), ("old_values",)
        capture(
            lake,
            {0: samples},
            WAY,
            step_id=step_id,
            stages=stages,
            columns=columns,
            settings=settings,
        )
    return the_cohort(lake.replay())


def _k029(lake: Lake, side: str) -> CohortReport:
    """What is averaged over a sample is what is trained of it."""
    inputs = CASES["K-029"]["inputs"]
    settings = _settings(loss__ratio="sequence-mean", loss__advantage_level="sequence-mean")
    (advantages,), (mask,) = inputs["advantages"], inputs["loss_mask"]
    zeros = [0.0] * len(mask)
    sample = _sample(0, mask, 0.0, log_probs=zeros, old_log_probs=zeros, advantages=advantages)
    (mean,) = _side("K-029", side, "seq_advantage")
    scalars = {"loss": -mean, "pg_loss": -mean, "pg_clipfrac": 0.0, "ppo_kl": 0.0}
    return _replay(lake, settings, [sample], ("sample", "loss.policy"), scalars)


def _k043(lake: Lake, side: str) -> CohortReport:
    """The weight is of old against rollout, not of current against rollout."""
    inputs = CASES["K-043"]["inputs"]
    settings = _settings(
        loss__surrogate="reinforce", loss__correction="tis", loss__correction_bounds=(0.0, 2.0)
    )
    weights = _side("K-043", side, "weight")
    current = inputs["current_logp"]
    sample = _sample(
        0,
        [1, 1],
        0.0,
        log_probs=current,
        old_log_probs=inputs["old_logp"],
        rollout_log_probs=inputs["rollout_logp"],
        advantages=[1.0, 1.0],
    )
    loss = sum(-w * lp for w, lp in zip(weights, current, strict=True)) / 2
    return _policy(lake, settings, [sample], loss)


def _k044(lake: Lake, side: str) -> CohortReport:
    """A sample that is masked out has no loss, however large its weight."""
    case = CASES["K-044"]
    bounds = (case["config"]["low"], case["config"]["high"])
    settings = _settings(
        loss__ratio="one",
        loss__correction="geometric-mask",
        loss__correction_bounds=bounds,
    )
    samples = [
        _sample(
            number,
            [1, 1, 1],
            0.0,
            log_probs=[-1.0] * 3,
            old_log_probs=row,
            rollout_log_probs=[0.0] * 3,
            advantages=[-1.0] * 3,
        )
        for number, row in enumerate(case["inputs"]["log_ratio"])
    ]
    weighted = _side("K-044", side, "weighted_loss")
    return _policy(lake, settings, samples, sum(weighted) / 3)


def _k046(lake: Lake, side: str) -> CohortReport:
    """The ratio of a sample is of its mean log ratio."""
    delta = CASES["K-046"]["inputs"]["delta_logp"]
    count = delta["count"]
    sample = _sample(
        0,
        [1] * count,
        0.0,
        log_probs=[delta["repeat"]] * count,
        old_log_probs=[0.0] * count,
        advantages=[-1.0] * count,
    )
    settings = _settings(loss__ratio="sequence-mean", loss__eps_clip=10.0)
    (weight,) = _side("K-046", side, "weight")
    return _replay(
        lake,
        settings,
        [sample],
        ("sample", "loss.policy"),
        {"loss": weight, "pg_loss": weight, "pg_clipfrac": 0.0, "ppo_kl": -delta["repeat"]},
    )


def _k055(lake: Lake, side: str) -> CohortReport:
    """Sums over the horizon are still averaged over the sequences."""
    case = CASES["K-055"]
    settings = _settings(
        loss__aggregation="constant-norm",
        loss__constant_norm=float(case["config"]["horizon"] * 2),
        loss__ratio="one",
    )
    rows = zip(case["inputs"]["loss"], case["inputs"]["mask"], strict=True)
    samples = [
        _sample(number, mask, 0.0, log_probs=[-1.0] * 4, advantages=[-one for one in loss])
        for number, (loss, mask) in enumerate(rows)
    ]
    (loss,) = _side("K-055", side, "loss")
    return _policy(lake, settings, samples, loss)


CHECKS: dict[str, tuple[Callable[[Lake, str], CohortReport], str]] = {
    "K-006": (_k006, "advantage.estimate"),
    "K-018": (_k018, "reward.post_process"),
    "K-021": (_k021, "advantage.estimate"),
    "K-024": (_gae("K-024"), "advantage.estimate"),
    "K-025": (_gae("K-025"), "advantage.estimate"),
    "K-028": (_k028, "reward.post_process"),
    "K-011": (_k011, "sample"),
    "K-029": (_k029, "loss.policy"),
    "K-030": (_k030, "advantage.estimate"),
    "K-043": (_k043, "loss.policy"),
    "K-044": (_k044, "loss.policy"),
    "K-046": (_k046, "loss.policy"),
    "K-055": (_k055, "loss.policy"),
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CHECKS)
def test_the_right_side_passes_and_the_wrong_one_is_found(lake: Lake, name: str, side: str) -> None:
    replay, stage = CHECKS[name]
    cohort = replay(lake, side)
    if side == "right":
        assert cohort.verdict in ("pass", "precision"), cohort.to_json()
    else:
        assert (cohort.verdict, cohort.first_divergent_stage) == ("diverged", stage)
    assert CASES[name]["stage"] == stage


def test_a_deviation_of_one_token_refuses_its_cohort(lake: Lake) -> None:
    """K-019: the variance of one value is undefined."""
    settings = _settings(reward__grouping="none", advantage__whiten="cohort")
    (mask,) = CASES["K-019"]["inputs"]["loss_mask"]
    found = _side("K-019", "right", "advantages")
    cohort = _replay(lake, settings, [_sample(0, mask, 0.8, advantages=found)], ESTIMATE)
    assert cohort.verdict == "refused"
    assert "expected 2 or more" in the_stage(cohort, "advantage.estimate").message
