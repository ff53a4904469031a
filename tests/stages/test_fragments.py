"""Fragments of trajectories under every rule that looks at them: losses, rewards, and parts."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cohorts import capture
from tests.helpers.composed import ComposedTrainer
from tests.helpers.scenes import WAY, refusals, the_cohort, the_stage
from tests.helpers.trainer import Sample
from tests.stages.test_composed import COLUMNS, PLAIN, STAGES, _shares
from trajreplay import Lake, with_changes

SHARED = {"loss.fragments": "shared"}
TRAJECTORIES = {"reward.unit": "trajectory", "reward.n_samples_per_prompt": None}
STEPS = {"reward.unit": "step", "reward.n_samples_per_prompt": None}
NAMES = ("a", "a", "b", "c", "d", "d", "d", "e")


def _record(
    lake: Lake,
    made: dict[str, Any],
    told: dict[str, Any],
    names: Sequence[str] = NAMES,
    rollouts: Sequence[int] = (0,) * 8,
) -> list[Sample]:
    """Eight samples on two ranks, each a fragment of the trajectory that is named, and scored."""
    shares = _shares()
    samples = [one for own in shares.values() for one in own]
    raw: dict[str, float] = {}
    for one, name, rollout in zip(samples, names, rollouts, strict=True):
        one.trajectory_id, one.rollout_id = name, rollout
        one.raw_reward = raw.setdefault(f"{rollout} {name}", one.raw_reward)
    trainer = ComposedTrainer(with_changes(PLAIN, made), shares)
    trainer.score()
    trainer.estimate()
    policy, value = trainer.policy_scalars(), trainer.value_scalars()
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        stages=STAGES,
        columns=COLUMNS,
        settings=with_changes(PLAIN, told),
        expected={rank: [*policy[rank], *value[rank]] for rank in shares},
    )
    return samples


@given(
    st.lists(st.sampled_from("abc"), min_size=8, max_size=8),
    st.lists(st.integers(0, 2), min_size=8, max_size=8),
    st.sampled_from(["all", "with-tokens"]),
)
def test_losses_divide_by_trajectories_of_their_own_rollout(
    names: list[str], rollouts: list[int], rows: str
) -> None:
    changes = {**SHARED, "loss.denominator_rows": rows, "loss.batch_reduction": "mean"}
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        _record(lake, changes, changes, names, rollouts)
        cohort = the_cohort(lake.replay())
    for stage in ("loss.policy", "loss.value"):
        assert the_stage(cohort, stage).verdict in ("pass", "precision"), cohort.to_json()


@pytest.mark.parametrize("stage", ["loss.policy", "loss.value"])
@pytest.mark.parametrize(("made", "told"), [({}, SHARED), (SHARED, {})])
def test_a_loss_of_other_denominators_is_found(
    lake: Lake, made: dict[str, Any], told: dict[str, Any], stage: str
) -> None:
    _record(lake, made, told)
    assert the_stage(the_cohort(lake.replay()), stage).verdict == "diverged"


def test_shared_denominators_wait_for_all_fragments(lake: Lake) -> None:
    """One trajectory has a fragment in either group, of which one is selected."""
    _record(lake, SHARED, SHARED, ("a", "b", "c", "d", "a", "e", "f", "g"))
    part = the_cohort(lake.replay(groups=["g-0"]))
    for stage in ("loss.policy", "loss.value"):
        found = the_stage(part, stage)
        assert (found.verdict, "--closure cohort" in found.message) == ("skipped", True)
    whole = the_cohort(lake.replay(groups=["g-0"], closure="cohort"))
    assert the_stage(whole, "loss.policy").verdict in ("pass", "precision")


@pytest.mark.parametrize("told", [TRAJECTORIES, STEPS])
def test_a_trajectory_in_two_groups_is_refused(lake: Lake, told: dict[str, Any]) -> None:
    _record(lake, {}, told, ("a", "b", "c", "d", "a", "e", "f", "g"))
    text = refusals(the_cohort(lake.replay()))
    assert "reward.post_process: 1 of 7 trajectories have fragments in several groups" in text


def test_one_name_in_two_rollouts_is_two_trajectories(lake: Lake) -> None:
    """Each would be in two groups if it were one."""
    names, rollouts = ("a", "b", "c", "d") * 2, (0,) * 4 + (1,) * 4
    _record(lake, {}, TRAJECTORIES, names, rollouts)
    found = the_stage(the_cohort(lake.replay()), "reward.post_process")
    assert found.verdict in ("pass", "precision")


def test_a_stride_counts_rows_and_no_trajectories(lake: Lake) -> None:
    told = {"reward.unit": "trajectory", "reward.grouping": "stride"}
    _record(lake, {}, told)
    text = refusals(the_cohort(lake.replay()))
    assert "reward.unit is 'trajectory' and reward.grouping is 'stride'" in text
