"""Fragments of one trajectory: scored once, and averaged over the tokens of all of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.helpers.scenes import the_cohort, the_stage
from tests.stages.test_fault_cases import CASES, SIDES
from trajreplay import Lake, ProducerInfo, SampleRecord, Settings, with_changes
from trajreplay.stages import CohortReport

MASKS = [[1, 1, 1, 0], [1, 1], [1], [1, 1, 1]]
TRAJECTORIES = ["t-0", "t-0", "t-1", "t-2"]
LOSSES = [[1.0, 2.0, 3.0, 9.0], [4.0, 5.0], [6.0], [7.0, 8.0, 9.0]]


def _capture(
    lake: Lake,
    settings: Settings,
    trajectories: Sequence[str | None],
    *,
    rewards: Sequence[tuple[float, float]] | None = None,
    places: Sequence[int | None] = (0, 1, 0, 0),
    scalars: dict[str, Any] | None = None,
) -> CohortReport:
    """Two ranks, the fragments of the first trajectory on both."""
    stages = ["sample", *(["reward.post_process"] if rewards else []), "loss.policy"]
    for rank, rows in enumerate(([0, 2], [1, 3])):
        with lake.capture(
            run_id="r",
            rollout_id=0,
            step_id=0,
            rank=rank,
            expected_ranks=[0, 1],
            settings=settings,
            stages=stages if scalars else stages[:-1],
            producer=ProducerInfo(commit="abc", torch_version="2"),
        ) as capture:
            given = rewards or [(0.0, 0.0)] * len(MASKS)
            capture.samples(
                [
                    SampleRecord(
                        sample_id=f"s-{row}",
                        group_index=0,
                        response_length=len(MASKS[row]),
                        total_length=len(MASKS[row]) + 2,
                        loss_mask=MASKS[row],
                        raw_reward=given[row][0],
                        reward=given[row][1],
                        trajectory_id=trajectories[row],
                        fragment_index=places[row],
                    )
                    for row in rows
                ]
            )
            capture.tensor("log_probs", [[-1.0] * len(MASKS[row]) for row in rows])
            capture.tensor("advantages", [[-one for one in LOSSES[row]] for row in rows])
            if scalars and rank == 0:
                capture.expected("loss.policy", scope="global", reduction="mean", **scalars)
    return the_cohort(lake.replay())


def _loss(**changes: Any) -> Settings:
    plain = {"loss.ratio": "one", "loss.batch_reduction": "mean"}
    return with_changes(Settings(), plain | changes)


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        # Tokens 1 2 3 4 5 of one trajectory over 5; then 6; then 7 8 9 over 3: three trajectories.
        (_loss(**{"loss.fragments": "shared"}), (15 / 5 + 6 + 8) / 3),
        (_loss(), (6 / 3 + 9 / 2 + 6 + 8) / 4),
    ],
)
def test_fragments_divide_by_what_the_settings_say(
    lake: Lake, settings: Settings, loss: float
) -> None:
    scalars = {"loss": loss, "pg_loss": loss}
    cohort = _capture(lake, settings, TRAJECTORIES, scalars=scalars)
    assert the_stage(cohort, "loss.policy").verdict == "pass", cohort.to_json()


def test_own_denominators_are_found_where_shared_ones_are_stated(lake: Lake) -> None:
    wrong = (6 / 3 + 9 / 2 + 6 + 8) / 4
    settings = _loss(**{"loss.fragments": "shared"})
    cohort = _capture(lake, settings, TRAJECTORIES, scalars={"loss": wrong, "pg_loss": wrong})
    assert cohort.first_divergent_stage == "loss.policy"


def test_a_sample_of_no_trajectory_refuses_shared_denominators(lake: Lake) -> None:
    settings = _loss(**{"loss.fragments": "shared"})
    names = ["t-0", None, "t-1", "t-2"]
    cohort = _capture(lake, settings, names, scalars={"loss": 1.0, "pg_loss": 1.0})
    found = the_stage(cohort, "loss.policy")
    assert found.verdict == "refused"
    assert "trajectory_id is missing for 1 of 4 samples" in found.message


@pytest.mark.parametrize("side", SIDES)
def test_a_baseline_is_of_trajectories_not_of_fragments(lake: Lake, side: str) -> None:
    case = CASES["K-012"]
    names = [f"t-{one}" for one in case["inputs"]["trajectory_id"]]
    rewards = list(zip(case["inputs"]["reward"], case[side]["advantage_of_fragments"], strict=True))
    settings = with_changes(
        Settings(), {"reward.unit": "trajectory", "reward.divide_by_std": False}
    )
    cohort = _capture(lake, settings, names, rewards=rewards)
    found = the_stage(cohort, case["stage"])
    assert found.verdict == ("pass" if side == "right" else "diverged")


def test_fragments_with_rewards_of_their_own_are_no_trajectory(lake: Lake) -> None:
    settings = with_changes(Settings(), {"reward.unit": "trajectory"})
    rewards = [(1.0, 0.0), (0.5, 0.0), (0.0, 0.0), (0.0, 0.0)]
    cohort = _capture(lake, settings, TRAJECTORIES, rewards=rewards)
    assert cohort.verdict == "refused"
    found = the_stage(cohort, "reward.post_process")
    assert "1 fragments have another raw reward" in found.message


@pytest.mark.parametrize(("expected", "verdict"), [(3, "pass"), (4, "diverged")])
def test_a_prompt_has_trajectories_not_fragments(lake: Lake, expected: int, verdict: str) -> None:
    changes = {"reward.unit": "trajectory", "reward.n_samples_per_prompt": expected}
    settings = with_changes(Settings(), {**changes, "reward.divide_by_std": False})
    rewards = [(1.0, 0.5), (1.0, 0.5), (0.5, 0.0), (0.0, -0.5)]
    found = the_stage(
        _capture(lake, settings, TRAJECTORIES, rewards=rewards), "reward.post_process"
    )
    assert found.verdict == verdict
    if verdict == "diverged":
        (one,) = found.divergences
        assert (one.field, one.recorded, one.recomputed) == ("group_size", 3.0, 4.0)


# Steps of 1 and 2 in one trajectory, of 5 and 3 in two others that have one each: the returns of
# the first steps are 1 + 2 / 2 = 2, 5 and 3, and the second step is alone.
STEPS = {"reward.unit": "step", "reward.step_gamma": 0.5, "reward.divide_by_std": False}
BY_STEP = [(1.0, 2 - 10 / 3), (2.0, 0.0), (5.0, 5 - 10 / 3), (3.0, 3 - 10 / 3)]


@pytest.mark.parametrize("side", SIDES)
def test_a_step_is_scored_against_the_same_steps_of_others(lake: Lake, side: str) -> None:
    rewards = list(BY_STEP)
    if side == "wrong":  # a step that gets no reward of later ones
        rewards[0] = (1.0, 1 - 3.0)
    cohort = _capture(lake, with_changes(Settings(), STEPS), TRAJECTORIES, rewards=rewards)
    found = the_stage(cohort, "reward.post_process")
    assert found.verdict == ("pass" if side == "right" else "diverged")
    assert [one.sample_id for one in found.divergences] == (["s-0"] if side == "wrong" else [])


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ((0, None, 0, 0), "input fragment_index is missing for 1 of 4 samples"),
        ((0, 2, 0, 0), "the steps of 1 of 3 trajectories are not 0, 1, 2, ... each once"),
        ((0, 0, 0, 0), "the steps of 1 of 3 trajectories are not 0, 1, 2, ... each once"),
    ],
)
def test_steps_without_their_places_are_refused(
    lake: Lake, places: Sequence[int | None], reason: str
) -> None:
    settings = with_changes(Settings(), STEPS)
    cohort = _capture(lake, settings, TRAJECTORIES, rewards=BY_STEP, places=places)
    found = the_stage(cohort, "reward.post_process")
    assert (found.verdict, reason in found.message) == ("refused", True), found.message
