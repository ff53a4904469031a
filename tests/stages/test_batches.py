"""Statistics of a batch that steps hold parts of: of the stated samples, or not verified at all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cohorts import ALL_COLUMNS, ALL_STAGES, ROLLOUT_STAGES, Expected, capture
from tests.helpers.composed import ComposedTrainer
from tests.helpers.scenes import WAY, drawn, the_cohort, the_stage, write_rollout
from tests.helpers.trainer import Sample
from trajreplay import KlSettings, Lake, LossSettings, RewardSettings, Settings, with_changes
from trajreplay.schema.settings import profile
from trajreplay.stages import StageResult

PLAIN = Settings(
    reward=RewardSettings(n_samples_per_prompt=4),
    kl=KlSettings(coef=0.1),
    loss=LossSettings(batch_reduction="mean"),
)
REWARD, ESTIMATE, POLICY = "reward.post_process", "advantage.estimate", "loss.policy"
BY_STEP, BY_ROLLOUT = {"layout.batch": "step"}, {"layout.batch": "rollout"}
RESCALED = {"reward.rescale": "batch", "reward.batch_epsilon": 1e-4}
PARTS = {
    "reward.weights": {"answer": 1.0, "format": 0.5},
    "reward.combination": "normalise-then-sum",
    "reward.batch_epsilon": 1e-4,
}
NORMED = {
    "loss.correction": "tis",
    "loss.correction_bounds": (0.0, 2.0),
    "loss.correction_norm": "token",
}
# Settings by which all samples of a batch enter, the stage that they enter, and what names them.
OF_BATCHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "whitened": ({"advantage.whiten": "cohort"}, ESTIMATE, "advantage.whiten is 'cohort'"),
    "whitened by rank": ({"advantage.whiten": "rank"}, ESTIMATE, "advantage.whiten is 'rank'"),
    "around the mean of all": (
        {"advantage.whiten": "group", "advantage.whiten_centre": "cohort"},
        ESTIMATE,
        "advantage.whiten_centre is 'cohort'",
    ),
    "one group": (
        {"reward.grouping": "batch", "reward.n_samples_per_prompt": None},
        REWARD,
        "reward.grouping is 'batch'",
    ),
    "over its deviation": (
        {"reward.std_grouping": "batch"},
        REWARD,
        "reward.std_grouping is 'batch'",
    ),
    "rescaled": (RESCALED, REWARD, "reward.rescale is 'batch'"),
    "gpg": ({"reward.rule": "gpg", "reward.divide_by_std": False}, REWARD, "reward.rule is 'gpg'"),
    "components": (PARTS, REWARD, "reward.combination is 'normalise-then-sum'"),
    "weights over their mean": (NORMED, POLICY, "loss.correction_norm_over is 'cohort'"),
}
OTHER = {
    REWARD: "reward.other-batch",
    ESTIMATE: "advantage.other-batch",
    POLICY: "loss.other-batch",
}
PASSING = ("pass", "precision")


def _samples(rollout_id: int = 0) -> list[Sample]:
    samples = drawn(WAY, rollout_id=rollout_id)
    samples[6].raw_reward = 0.0
    for row, one in enumerate(samples):
        one.sample_id, one.group = f"r-{rollout_id}-{row}", f"g-{2 * rollout_id + row // 4}"
        one.raw_reward *= 1.0 + rollout_id * (row % 2)
        one.trajectory_id, one.fragment_index = f"t-{rollout_id}-{row // 4}", row % 4
    return samples


def _write_steps(
    lake: Lake,
    settings: Settings,
    batches: list[list[Sample]],
    steps: list[list[Sample]],
    trained: Settings | None = None,
    **options: Any,
) -> None:
    """Steps of a training whose statistics are of the samples of each batch.

    Args:
        lake: Where to.
        settings: What it computes, and tells.
        batches: Its samples, each once.
        steps: What each step consumes of them.
        trained: What it computes, if not what it tells.
        options: Passed on to `capture`.
    """
    for row, one in enumerate(one for samples in batches for one in samples):
        if settings.reward.weights:
            one.components = {"answer": one.raw_reward, "format": float(row % 3)}
    trainers = [ComposedTrainer(trained or settings, {0: samples}) for samples in batches]
    for trainer in trainers:
        trainer.score()
        trainer.estimate()
    for step_id, samples in enumerate(steps):
        expected = Expected(_loss(trainers, samples), {"scope": "rank", "reduction": "mean"})
        capture(
            lake,
            {0: samples},
            WAY,
            step_id=step_id,
            stages=ALL_STAGES,
            columns=ALL_COLUMNS,
            settings=settings,
            expected={0: [expected]},
            **options,
        )


def _loss(trainers: list[ComposedTrainer], samples: list[Sample]) -> dict[str, float]:
    """The means over samples of a step, each sample's terms as its batch makes them."""
    total: dict[str, float] = {}
    mine = {one.sample_id for one in samples}
    for trainer in trainers:
        terms = [trainer.policy_terms(row) for row in range(len(trainer.samples))]
        rows = [row for row, one in enumerate(trainer.samples) if one.sample_id in mine]
        for name in terms[0] if rows else ():
            share = trainer.scalar("loss.policy", name, terms, rows) * len(rows) / len(samples)
            total[name] = total.get(name, 0.0) + share
    return total


def _named(lake: Lake, stage: str) -> set[str]:
    """The faults that give what a stage of any step recorded."""
    found = [one for one in lake.explain().explanations if one.stage == stage]
    return {name for one in found for each in one.hypotheses for name in each.faults}


def _stage(lake: Lake, stage: str, step_id: int = 0) -> StageResult:
    return the_stage(the_cohort(lake.replay(), 0, step_id), stage)


@pytest.mark.parametrize("captured", [False, True], ids=["not captured", "captured"])
@pytest.mark.parametrize("name", OF_BATCHES)
def test_a_statistic_of_a_cut_rollout_is_not_verified(
    lake: Lake, name: str, captured: bool
) -> None:
    changes, stage, what = OF_BATCHES[name]
    settings, samples = with_changes(PLAIN, changes), _samples()
    if captured:
        write_rollout(lake, {0: samples}, stages=["sample"], settings=settings)
    _write_steps(lake, settings, [samples], [samples[:4], samples[4:]])
    for step_id in (0, 1):
        found = _stage(lake, stage, step_id)
        assert found.verdict == "unverified"
        assert found.message.startswith(f"{what}, and ")
        assert "4 samples of rollout 0 are not in it: state layout.batch" in found.message


@pytest.mark.parametrize("name", OF_BATCHES)
def test_a_statistic_of_each_step_is_of_the_step(tmp_path: Path, name: str) -> None:
    changes, stage, _ = OF_BATCHES[name]
    settings = with_changes(PLAIN, changes | BY_STEP)
    for wrong in (False, True):
        lake, samples = Lake.create(tmp_path / str(wrong)), _samples()
        steps = [samples[:4], samples[4:]]
        _write_steps(lake, settings, [samples] if wrong else steps, steps)
        found = {_stage(lake, stage, step_id).verdict for step_id in (0, 1)}
        assert "diverged" in found if wrong else found <= set(PASSING)


@pytest.mark.parametrize("name", OF_BATCHES)
def test_a_statistic_of_a_cut_rollout_takes_the_others_from_it(tmp_path: Path, name: str) -> None:
    changes, stage, _ = OF_BATCHES[name]
    settings = with_changes(PLAIN, changes | BY_ROLLOUT)
    for wrong in (False, True):
        lake, (samples, whole) = Lake.create(tmp_path / str(wrong)), (_samples(0), _samples(1))
        steps = [samples[:4], samples[4:], whole]
        batches = steps if wrong else [samples, whole]
        _write_steps(lake, settings, batches, steps)
        for rollout_id, one in enumerate((samples, whole)):
            write_rollout(
                lake, {0: one}, stages=["sample"], settings=settings, rollout_id=rollout_id
            )
        report = lake.replay()
        found = [the_stage(the_cohort(report, 0, step_id), stage).verdict for step_id in range(3)]
        assert "diverged" in found if wrong else {*found} <= set(PASSING), found
        assert found[2] in PASSING
        if wrong:
            assert OTHER[stage] in _named(lake, stage)
        else:
            assert {one.verdict for one in report.cohorts if one.step_id is not None} <= {*PASSING}


@pytest.mark.parametrize("name", OF_BATCHES)
def test_statistics_of_the_rollout_are_named_where_those_of_the_step_are_stated(
    lake: Lake, name: str
) -> None:
    changes, stage, _ = OF_BATCHES[name]
    settings, samples = with_changes(PLAIN, changes | BY_STEP), _samples()
    _write_steps(lake, settings, [samples], [samples[:4], samples[4:]])
    write_rollout(lake, {0: samples}, stages=["sample"], settings=settings)
    assert OTHER[stage] in _named(lake, stage)


@pytest.mark.parametrize("name", ["slime", "verl", "trl", "nemo-rl", "openrlhf"])
def test_who_names_a_framework_that_whitens_before_its_steps_need_not_say_so(
    tmp_path: Path, name: str
) -> None:
    white = {"advantage.whiten": "cohort", "reward.n_samples_per_prompt": 4, "kl.coef": 0.1}
    settings = with_changes(profile(name).settings, white)
    for wrong in (False, True):
        lake, samples = Lake.create(tmp_path / str(wrong)), _samples()
        steps = [samples[:4], samples[4:]]
        for own in steps if wrong else [samples]:
            trainer = ComposedTrainer(settings, {0: own})
            trainer.score()
            trainer.estimate()
        write_rollout(lake, {0: samples}, stages=["sample"], settings=settings)
        for step_id, own in enumerate(steps):
            stages, columns = ["sample", ESTIMATE], ALL_COLUMNS
            capture(
                lake,
                {0: own},
                WAY,
                step_id=step_id,
                stages=stages,
                columns=columns,
                settings=settings,
            )
        found = {_stage(lake, ESTIMATE, step_id).verdict for step_id in (0, 1)}
        assert "diverged" in found if wrong else found <= set(PASSING)


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("alike", [True, False], ids=["the ranks that consume", "one rank"])
@pytest.mark.parametrize("wrong", [False, True])
def test_what_a_rank_whitens_of_a_cut_rollout_is_known_from_the_ranks_that_captured_it(
    lake: Lake, alike: bool, wrong: bool, centre: bool
) -> None:
    changes = {"advantage.whiten": "rank", **BY_ROLLOUT}
    if centre:
        changes |= {"advantage.whiten": "cohort", "advantage.whiten_centre": "rank"}
    settings, samples = with_changes(PLAIN, changes), _samples()
    shares = {0: samples[::2], 1: samples[1::2]}
    trainer = ComposedTrainer(settings, {0: samples} if wrong else shares)
    trainer.score()
    trainer.estimate()
    write_rollout(lake, shares if alike else {0: samples}, stages=["sample"], settings=settings)
    for step_id, part in enumerate((slice(0, 2), slice(2, 4))):
        capture(
            lake,
            {rank: own[part] for rank, own in shares.items()},
            WAY,
            step_id=step_id,
            stages=["sample", ESTIMATE],
            columns=ALL_COLUMNS,
            settings=settings,
        )
    found = [_stage(lake, ESTIMATE, step_id) for step_id in (0, 1)]
    if alike:
        verdicts = {one.verdict for one in found}
        assert "diverged" in verdicts if wrong else verdicts <= {*PASSING}
    else:
        assert {one.verdict for one in found} == {"unverified"}
        assert found[0].message.endswith(
            "4 samples of rollout 0 are not in it; declare the stage at the rollout, whose "
            "capture holds them all; rollout 0 was captured by other ranks than consumed it"
        )


# What a step cannot take from its rollouts, and why.
NOT_THERE: dict[str, tuple[dict[str, Any], str, str]] = {
    "weights of the current policy": (
        NORMED | {"loss.proximal": "current"},
        POLICY,
        "loss.proximal is 'current', of which rollouts hold nothing",
    ),
    "sums of rows": (
        RESCALED | {"reward.grouping": "stride"},
        REWARD,
        "reward.grouping is 'stride', which counts the rows that a rank consumed",
    ),
}


@pytest.mark.parametrize("how", ["recomputed", "bfloat16"])
def test_columns_that_change_on_the_way_are_not_taken_from_a_rollout(lake: Lake, how: str) -> None:
    settings, samples = with_changes(PLAIN, NORMED | BY_ROLLOUT), _samples()
    settings = replace(settings, handoff={"old_log_probs": how})
    _write_steps(lake, settings, [samples], [samples[:4], samples[4:]])
    write_rollout(lake, {0: samples}, stages=["sample"], settings=settings)
    found = _stage(lake, POLICY)
    assert found.verdict == "unverified"
    assert found.message.endswith(f"handoff.old_log_probs is {how!r}")


@pytest.mark.parametrize("name", NOT_THERE)
def test_what_no_rollout_holds_is_not_verified(lake: Lake, name: str) -> None:
    changes, stage, why = NOT_THERE[name]
    settings, samples = with_changes(PLAIN, changes | BY_ROLLOUT), _samples()
    plain = with_changes(PLAIN, BY_ROLLOUT)
    _write_steps(lake, settings, [samples], [samples[:4], samples[4:]], trained=plain)
    write_rollout(lake, {0: samples}, stages=["sample"], settings=settings)
    found = _stage(lake, stage)
    assert found.verdict == "unverified"
    assert "layout.batch is 'rollout' and 4 samples of rollout 0" in found.message
    assert found.message.endswith(why)


def test_a_rollout_that_lacks_what_its_other_samples_need_is_named(lake: Lake) -> None:
    settings = with_changes(PLAIN, {"advantage.whiten": "cohort", **BY_ROLLOUT})
    samples = _samples()
    _write_steps(lake, settings, [samples], [samples[:4], samples[4:]])
    write_rollout(lake, {0: samples}, stages=["sample"], settings=settings, without=["reward"])
    found = _stage(lake, ESTIMATE)
    assert found.verdict == "unverified"
    assert found.message.endswith("rollout 0 lacks reward of samples that the step does not hold")


@pytest.mark.parametrize("name", OF_BATCHES)
def test_a_rollout_that_steps_consume_whole_is_its_own_batch(lake: Lake, name: str) -> None:
    changes, stage, _ = OF_BATCHES[name]
    settings, samples = with_changes(PLAIN, changes), _samples()
    _write_steps(lake, settings, [samples], [samples, samples])
    assert _stage(lake, stage, 0).verdict in PASSING
    assert _stage(lake, stage, 1).verdict in PASSING


@pytest.mark.parametrize("name", OF_BATCHES)
def test_a_statistic_of_each_rollout_of_a_step_is_of_the_rollout(tmp_path: Path, name: str) -> None:
    changes, stage, what = OF_BATCHES[name]
    for batch, wrong in ((None, False), ("rollout", False), ("rollout", True)):
        stated = {"layout.batch": batch} if batch else {}
        settings, two = with_changes(PLAIN, changes | stated), [_samples(0), _samples(1)]
        lake, together = Lake.create(tmp_path / f"{batch} {wrong}"), [*two[0], *two[1]]
        _write_steps(lake, settings, [together] if wrong else two, [together])
        found = _stage(lake, stage)
        if batch is None:
            assert found.verdict == "unverified"
            assert found.message.startswith(f"{what}, and it consumed from 2 rollouts: state")
        else:
            assert found.verdict in (("diverged",) if wrong else PASSING), found.message
        if wrong:
            assert OTHER[stage] in _named(lake, stage)


def test_a_rollout_does_not_know_the_statistics_of_its_steps(lake: Lake) -> None:
    settings = with_changes(PLAIN, {"advantage.whiten": "cohort", **BY_STEP})
    trainer = ComposedTrainer(settings, {0: _samples()})
    trainer.score()
    trainer.estimate()
    write_rollout(lake, {0: trainer.samples}, stages=ROLLOUT_STAGES, settings=settings)
    found = the_stage(the_cohort(lake.replay(), 0, None), ESTIMATE)
    assert found.verdict == "unverified"
    assert found.message.endswith("layout.batch is 'step': declare the stage at the steps")


@pytest.mark.parametrize("captured", [False, True], ids=["not captured", "captured"])
@pytest.mark.parametrize("stage", [REWARD, POLICY])
def test_a_trajectory_of_which_a_step_holds_a_part_is_not_verified(
    lake: Lake, stage: str, captured: bool
) -> None:
    changes: dict[str, Any] = {"loss.fragments": "shared"}
    if stage == REWARD:
        changes = {"reward.unit": "trajectory", "reward.grouping": "none"}
    settings, samples = with_changes(PLAIN, changes), _samples()
    for row, one in enumerate(samples):
        one.trajectory_id, one.raw_reward = f"t-{row % 3}", float(row % 3)
        one.group = "g-0"
    if captured:
        write_rollout(lake, {0: samples}, stages=["sample"], settings=settings)
    _write_steps(lake, settings, [samples], [samples[:6], samples[6:]])
    found = _stage(lake, stage)
    assert found.verdict == "unverified"
    assert "2 samples of rollout 0 are not in it" in found.message
