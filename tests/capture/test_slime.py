"""slime's rollout data, as its hook hands it over, replays; what is not recomputed says why."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.recorded import captured
from tests.helpers.scenes import WAY, drawn
from trajreplay import Lake, ParallelCoordinates, capture
from trajreplay.capture import hooks, slime
from trajreplay.capture.slime import identity
from trajreplay.stages import CohortReport

ARGS = {
    "advantage_estimator": "gspo",
    "n_samples_per_prompt": WAY.group_size,
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "kl_loss_type": WAY.kl,
    "kl_coef": WAY.kl_coef,
    "eps_clip": WAY.eps_clip,
    "eps_clip_high": WAY.eps_clip_high,
    "start_rollout_id": 0,
}


@pytest.fixture(autouse=True)
def _on(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_asked", [])
    monkeypatch.setenv("TRAJREPLAY_CAPTURE", "1")
    monkeypatch.setenv("TRAJREPLAY_CAPTURE_STRICT", "1")
    monkeypatch.setenv("TRAJREPLAY_LAKE", lake.path)
    monkeypatch.setenv("TRAJREPLAY_RUN_ID", "r")


def rollout_data(rollout_id: int) -> dict[str, Any]:
    """What slime's actor holds of the drawn samples, by its own names."""
    samples = drawn(rollout_id=rollout_id)
    names = {"log_probs": "old_log_probs", **dict.fromkeys(("kl", "advantages", "returns"), "")}
    names |= dict.fromkeys(("ref_log_probs", "rollout_log_probs"), "")
    return {
        "tokens": [torch.arange(one.length + 3) for one in samples],
        "response_lengths": [one.length for one in samples],
        "loss_masks": [torch.tensor(one.mask) for one in samples],
        "rewards": [one.reward for one in samples],
        "raw_reward": [one.raw_reward for one in samples],
        "sample_indices": [8 * rollout_id + row for row in range(len(samples))],
        **{name: [one.columns[of or name] for one in samples] for name, of in names.items()},
    }


def replayed(lake: Lake, **changes: Any) -> list[CohortReport]:
    for rollout_id in range(2):
        slime.record_rollout(
            SimpleNamespace(**ARGS | changes), rollout_id, rollout_data(rollout_id)
        )
    capture.recorder().close()
    report = lake.replay()
    assert report.verdict == "pass", report.to_json()
    return report.cohorts


def test_rollouts_replay_from_rewards_to_advantages(lake: Lake) -> None:
    cohorts = replayed(lake)
    assert [one.rollout_id for one in cohorts] == [0, 1]
    assert {stage.verdict for one in cohorts for stage in one.stages} == {"pass", "not-declared"}
    assert all(one.stages[3].stage == "advantage.kl" and one.stages[3].compared for one in cohorts)


@pytest.mark.parametrize(
    ("changes", "stage", "why"),
    [
        ({"normalize_advantages": True}, "advantage.estimate", "normalised over the batch"),
        ({"advantage_estimator": "ppo"}, "advantage.estimate", "advantage_estimator is 'ppo'"),
        ({"custom_reward_post_process_path": "f"}, "reward.post_process", "a custom function"),
    ],
)
def test_what_is_made_otherwise_is_recorded_and_says_why(
    lake: Lake, changes: dict[str, Any], stage: str, why: str
) -> None:
    for one in replayed(lake, **changes):
        (found,) = [result for result in one.stages if result.stage == stage]
        assert found.verdict == "recorded-only"
        assert why in found.message


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_raw_rewards_handed_over_whole_are_those_of_a_rank_or_none(
    lake: Lake, told: bool, balanced: bool
) -> None:
    """Every data-parallel rank is given the raw rewards of all, and all else by its part."""
    whole = rollout_data(0)
    count = len(whole["tokens"])
    first = list(range(0, count, 2)) if balanced else list(range(3))
    for rank, part in enumerate((first, sorted(set(range(count)) - set(first)))):
        identity._asked[:] = [True]
        capture.enable_from_env(
            parallel=ParallelCoordinates(data_rank=rank, data_size=2),
            rank=rank,
            expected_ranks=[0, 1],
            attempt=0,
        )
        data = {name: [of[row] for row in part] for name, of in whole.items()}
        data["raw_reward"] = whole["raw_reward"]
        if told:
            data["partition"] = part
        slime.record_rollout(SimpleNamespace(**ARGS), 0, data)
        capture.recorder().close()
    rows = lake.sql("select sample_id, raw_reward from rollouts").arrow().to_pylist()
    found = {one["sample_id"]: one["raw_reward"] for one in rows}
    expected = {
        identity.sample_id(index): raw if told else None
        for index, raw in zip(whole["sample_indices"], whole["raw_reward"], strict=True)
    }
    assert found == expected
    (cohort,) = lake.replay().cohorts
    verdicts = {one.stage: one for one in cohort.stages}
    assert cohort.verdict == "pass"
    for stage in ("reward.raw", "reward.post_process"):
        assert verdicts[stage].verdict == ("pass" if told else "recorded-only")
        assert told or "is not handed over" in verdicts[stage].message


@pytest.mark.parametrize("known", [True, False])
def test_routes_of_the_sampler_are_recorded_where_their_form_is_known(
    lake: Lake, known: bool
) -> None:
    data = rollout_data(0)
    shape = (2, 2) if known else (4,)
    data["rollout_routed_experts"] = [
        torch.randint(0, 8, (len(tokens) - 1, *shape), dtype=torch.int32)
        for tokens in data["tokens"]
    ]
    slime.record_rollout(SimpleNamespace(**ARGS, num_experts=8), 0, data)
    capture.recorder().close()
    rows = lake.sql("select rollout_experts, num_experts from routes order by row").arrow()
    expected = [one.reshape(-1).tolist() for one in data["rollout_routed_experts"]]
    assert rows["rollout_experts"].to_pylist() == (expected if known else [])
    assert set(rows["num_experts"].to_pylist()) == ({8} if known else set())
    assert [one.status for one in captured(lake)] == ["complete"]


def test_without_the_switch_nothing_is_looked_at(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRAJREPLAY_CAPTURE")
    slime.record_rollout(None, 0, {})
    assert captured(lake) == []


def test_plain_functions_are_those_of_the_recorder(lake: Lake) -> None:
    capture.enable_from_env(settings=WAY.short, step_stages=["sample"])
    hooks.begin_rollout(0, stages=["sample"])
    hooks.describe_routes(num_experts=8)
    hooks.record([])
    hooks.note("generated", ["x"])
    hooks.note("buffered", ["x"])
    hooks.end_rollout()
    hooks.begin_step(0, 0)
    hooks.record_policy_loss(0, [], scalars={"loss": 0.0})
    hooks.record_value_loss(0, [])
    hooks.record_scalars("loss.policy", {"loss": 0.0}, scale=0.5)
    hooks.end_step(grad_norm=1.0)
    hooks.begin_step(0, 1)
    hooks.drop("loss-spike")
    hooks.end_step()
    hooks.promote("loss-spike")
    assert hooks.flush(60.0)
    assert hooks.close(60.0)
    assert [(one.key.kind, one.status) for one in captured(lake)] == [
        ("rollout", "complete"),
        ("step", "complete"),
        ("step", "dropped"),
    ]
    ends = lake.sql("select event, count(*) as n from events group by 1 order by 1").arrow()
    assert [(one["event"], one["n"]) for one in ends.to_pylist()] == [
        ("buffered", 1),
        ("generated", 1),
        ("heartbeat", 2),
        ("terminal", 1),
    ]
    methods = {name for name in vars(capture.Recorder) if not name.startswith("_")}
    assert set(hooks.__all__) <= methods
