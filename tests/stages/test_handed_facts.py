"""Facts of a sample that decide arithmetic: read from the rollout, and held against it."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.cohorts import capture
from tests.helpers.composed import ComposedTrainer
from tests.helpers.scenes import WAY, the_cohort, the_stage
from tests.helpers.trainer import Sample
from tests.stages.test_composed import COLUMNS, PLAIN, _shares
from trajreplay import Lake, with_changes

Change = Callable[[Sample], None]
# Each fact, and another value of it for sample s-3, that no stage has to read.
OTHERS: dict[str, Any] = {
    "trajectory_id": "t-9",
    "fragment_index": 5,
    "agent_id": "solver",
    "episode_id": "e-9",
    "turns": 9,
    "truncated": True,
}
FRAGMENTS = {"loss.fragments": "shared"}


def _write(lake: Lake, changes: dict[str, Any], change: Change, without: tuple[str, ...]) -> None:
    """A rollout, and a step that consumed it after a change of its samples."""
    settings = with_changes(PLAIN, changes)
    shares = _shares()
    for row, one in enumerate(one for own in shares.values() for one in own):
        one.agent_id, one.episode_id = f"a-{row % 2}", f"e-{row // 2}"
        one.turns, one.truncated = row % 3 + 1, row % 4 == 1
    trainer = ComposedTrainer(settings, shares)
    trainer.score()
    trainer.estimate()
    stages = ("sample", "reward.raw", "advantage.kl")
    capture(lake, shares, WAY, stages=stages, columns=COLUMNS, settings=settings)
    for one in trainer.samples:
        change(one)
    policy, value = trainer.policy_scalars(), trainer.value_scalars()
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        stages=("sample", "loss.policy", "loss.value"),
        columns=COLUMNS,
        settings=settings,
        expected={rank: [*policy[rank], *value[rank]] for rank in shares},
        without=without,
    )


def _nothing(sample: Sample) -> None:
    """What is handed on as it was."""


@pytest.mark.parametrize("fact", OTHERS)
def test_a_fact_that_a_step_has_otherwise_is_found(lake: Lake, fact: str) -> None:
    """The loss of a step is consistent with what it consumed; its rollout says what that was."""

    def change(one: Sample) -> None:
        if one.sample_id == "s-3":
            setattr(one, fact, OTHERS[fact])

    _write(lake, FRAGMENTS if fact == "trajectory_id" else {}, change, ())
    cohort = the_cohort(lake.replay())
    assert cohort.first_divergent_stage == "sample"
    (finding,) = [one for one in cohort.findings if one.check.startswith("handoff.")]
    assert (finding.check, finding.sample_id) == (f"handoff.{fact}", "s-3")
    assert the_stage(cohort, "loss.policy").isolated in ("pass", "precision")


def test_facts_that_agree_are_no_fault(lake: Lake) -> None:
    _write(lake, FRAGMENTS, _nothing, ())
    cohort = the_cohort(lake.replay())
    assert cohort.verdict in ("pass", "precision"), cohort.to_json()


def test_a_step_reads_the_facts_that_it_lacks_from_its_rollouts(lake: Lake) -> None:
    _write(lake, FRAGMENTS, _nothing, (*OTHERS,))
    cohort = the_cohort(lake.replay())
    for stage in ("loss.policy", "loss.value"):
        assert the_stage(cohort, stage).verdict in ("pass", "precision"), cohort.to_json()


def test_values_of_before_the_update_are_those_of_the_rollouts(lake: Lake) -> None:
    """A step that keeps only the critic's new values has advantages made of its rollouts' own."""
    settings = with_changes(PLAIN, {"advantage.estimator": "gae", "advantage.lam": 0.95})
    shares = _shares()
    trainer = ComposedTrainer(settings, shares)
    trainer.score()
    trainer.estimate()
    capture(lake, shares, WAY, stages=("sample",), columns=COLUMNS, settings=settings)
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        stages=("sample", "advantage.estimate"),
        columns=[name for name in COLUMNS if name != "old_values"],
        settings=settings,
    )
    stage = the_stage(the_cohort(lake.replay()), "advantage.estimate")
    assert stage.verdict in ("pass", "precision"), stage
