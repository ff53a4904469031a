"""slime's steps, as its loop makes them, replay with their rollouts; no parameter changes."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.recorded import captured
from tests.helpers.slime_training import ARGS, NAME, Optimizer, install, train
from trajreplay import Lake, capture
from trajreplay.capture import CaptureWarning, slime
from trajreplay.capture.slime import identity
from trajreplay.stages import Report


@pytest.fixture(autouse=True)
def _on(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_asked", [])
    install(monkeypatch)
    monkeypatch.setenv("TRAJREPLAY_CAPTURE", "1")
    monkeypatch.setenv("TRAJREPLAY_CAPTURE_STRICT", "1")
    monkeypatch.setenv("TRAJREPLAY_LAKE", lake.path)
    monkeypatch.setenv("TRAJREPLAY_RUN_ID", "r")


def replayed(lake: Lake) -> Report:
    capture.recorder().close()
    assert {one.status for one in captured(lake)} == {"complete"}
    return lake.replay()


def stages_of(report: Report, stage: str) -> list[Any]:
    return [one for cohort in report.cohorts for one in cohort.stages if one.stage == stage]


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"calculate_per_token_loss": True},
        {"eps_clip_c": 1.5},
        {"recompute_loss_function": True},
        {"entropy_coef": 0.0, "kl_loss_coef": 0.0},
    ],
    ids=str,
)
def test_steps_replay_with_the_samples_of_their_rollouts(lake: Lake, args: dict[str, Any]) -> None:
    plain = train(hooks=False, **args)
    assert train(**args) == plain
    report = replayed(lake)
    assert report.verdict == "pass", [
        (one.stage, one.verdict, one.message) for cohort in report.cohorts for one in cohort.stages
    ]
    losses = stages_of(report, "loss.policy")
    assert [one.verdict for one in losses if one.verdict != "not-declared"] == ["pass"] * 4
    rows = lake.sql(
        "select rollout_id, step_id, micro_batch_id, count(*) as n from steps group by all"
    )
    assert {one["n"] for one in rows.arrow().to_pylist()} == {4}
    joined = lake.sql(
        "select count(*) as n from steps s join rollouts r "
        "on s.sample_id = r.sample_id and s.source_rollout_id = r.rollout_id"
    )
    assert joined.arrow().to_pylist() == [{"n": 32}]
    norms = lake.sql("select detail from events where event = 'heartbeat'").arrow()["detail"]
    assert all("grad_norm" in one for one in norms.to_pylist())


@pytest.mark.parametrize("crashed_in", [1, 2])
def test_a_training_that_goes_on_from_a_checkpoint_is_one_lineage(
    lake: Lake, crashed_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt before went on beyond its last checkpoint, which the new one does anew."""
    plain = train(hooks=False, rollouts=range(4))
    kept = train(hooks=False, rollouts=range(1))
    train(rollouts=range(crashed_in + 1))
    capture.recorder().retire()  # as a process that ends, and none of whose steps is left out
    identity._asked.clear()
    install(monkeypatch)
    assert train(rollouts=range(1, 4), checkpoint_of=kept) == plain
    report = replayed(lake)
    assert report.verdict == "pass"
    assert [(one.attempt, one.rollout_id, one.step_id) for one in report.cohorts] == [
        (int(rollout > 0), rollout, step) for rollout in range(4) for step in (None, 0, 1)
    ]
    assert {one.resumed_from for one in captured(lake) if one.key.attempt} == {(0, 1)}


@pytest.mark.parametrize(
    ("told", "ends"),
    [
        ({"num_rollout": 2}, True),
        ({"num_rollout": 2, "num_steps_per_rollout": 2, "steps": 2}, True),
        ({"num_rollout": 3}, False),
        ({}, False),
    ],
)
def test_a_clean_end_is_noted_once_the_last_rollout_is_trained_on(
    lake: Lake, told: dict[str, int], ends: bool
) -> None:
    steps = told.get("steps", 1)
    train(**{"steps": 1, **told})  # type: ignore[arg-type]
    capture.recorder().retire()  # as a process that ends, and says nothing
    rows = lake.sql("select detail from events where event = 'terminal'").arrow()["detail"]
    assert ['"status":"ok"' in one for one in rows.to_pylist()] == [True] * ends
    assert len([one for one in captured(lake) if one.status == "complete"]) == 2 + 2 * steps


def test_a_mean_over_several_samples_is_recorded_and_says_why(lake: Lake) -> None:
    train(changes={"rollout_mask_sums": [9] * 8})
    report = replayed(lake)
    found = [one for one in stages_of(report, "loss.policy") if one.verdict != "not-declared"]
    assert {one.verdict for one in found} == {"recorded-only"}
    assert all("several samples of a rollout" in one.message for one in found)


def test_on_policy_the_ratio_is_one(lake: Lake) -> None:
    train(steps=1, changes={"log_probs": None})
    report = replayed(lake)
    losses = [one for one in stages_of(report, "loss.policy") if one.verdict != "not-declared"]
    assert [one.verdict for one in losses] == ["pass"] * 2


def test_a_wrong_advantage_is_found_at_the_step(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[NAME]
    loss = module.policy_loss_function

    def wrong(args: Any, batch: dict[str, Any], *given: Any) -> Any:
        twice = {**batch, "advantages": [2 * one for one in batch["advantages"]]}
        return loss(args, twice, *given)

    monkeypatch.setattr(module, "policy_loss_function", wrong)
    train(steps=1)
    assert replayed(lake).verdict == "diverged"


def test_a_critic_and_a_slime_that_is_not_known_are_left_alone(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Critic:
        role = "critic"

    slime.record_steps(None, 0, 0, [Critic()], None, None)
    assert not capture.recorder().enabled
    monkeypatch.setenv("TRAJREPLAY_CAPTURE_STRICT", "0")
    monkeypatch.delattr(sys.modules[NAME], "get_log_probs_and_entropy")
    optimizer = Optimizer(torch.ones(1, requires_grad=True))
    with pytest.warns(CaptureWarning, match="its steps are not captured"):
        slime.record_steps(SimpleNamespace(**ARGS), 0, 0, [object()], optimizer, None)
