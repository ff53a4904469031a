"""Other settings: what is recomputed under them is what a training under them records."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.cohorts import Expected, rank_sums
from tests.helpers.scenes import WAY, drawn, halves, write_rollout, write_step, write_whole
from tests.helpers.trainer import Arithmetic, Trainer
from trajreplay import Lake
from trajreplay.schema import QueryError, SchemaError
from trajreplay.schema.settings.words import setting_of
from trajreplay.stages import FieldChange, WhatIf
from trajreplay.stages.counterfactuals.handing_on import Handed

OTHERS: dict[str, tuple[dict[str, Any], Arithmetic]] = {
    "no division": ({"reward.divide_by_std": False}, replace(WAY, std=False)),
    "another epsilon": ({"reward.epsilon": 0.5}, replace(WAY, epsilon=0.5)),
    "another divisor": ({"reward.ddof": 0}, replace(WAY, ddof=0)),
    "another estimator": ({"kl.estimator": "k3"}, replace(WAY, kl="k3")),
    "a wider clip": ({"loss.eps_clip_high": 0.6}, replace(WAY, eps_clip_high=0.6)),
    "no bonus": ({"loss.entropy_coef": 0.0}, replace(WAY, entropy_coef=0.0)),
    "the sampler's": (
        {"loss.old_source": "rollout", "kl.policy_source": "rollout"},
        replace(WAY, old_source="rollout"),
    ),
}


def _fields(found: WhatIf) -> dict[tuple[int | None, str], FieldChange]:
    return {
        (one.cohort.step_id, field.field): field for one in found.cohorts for field in one.fields
    }


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_recomputed_is_what_a_training_under_these_settings_records(
    lake: Lake, name: str
) -> None:
    changes, other = OTHERS[name]
    write_whole(lake, drawn(other), other, settings=WAY.full)
    found = _fields(lake.what_if(changes))
    assert {field.then_agree for field in found.values()} != {0}
    assert all(field.then_agree == field.values for field in found.values())
    assert any(field.agree < field.values and field.changed for field in found.values())


def test_settings_that_are_in_force_change_nothing(lake: Lake) -> None:
    write_whole(lake, drawn())
    found = lake.what_if({"reward.epsilon": WAY.epsilon})
    assert all(one.changed == 0 and one.max_change == 0 for one in _fields(found).values())
    assert all(one.agree == one.then_agree == one.values for one in _fields(found).values())
    assert found.notes == ["reward.epsilon has no effect: no value that is shown changes"]


def test_a_setting_that_no_declared_stage_reads_is_said_to_have_no_effect(lake: Lake) -> None:
    write_rollout(lake, drawn())
    found = lake.what_if({"reward.ddof": 0, "value.clip": 0.5})
    assert found.notes == [
        "value.clip has no effect: none of the stages that are declared reads it"
    ]
    assert lake.what_if({"reward.ddof": 0}).notes == []


def test_what_a_rollout_reads_has_an_effect_on_the_step_that_consumed_it(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    write_step(lake, samples)
    (step,) = (
        found := lake.what_if({"reward.ddof": 0}, steps=[(samples[0].rollout_id, 0)])
    ).cohorts
    assert any(one.changed for one in step.fields)
    assert found.notes == []


def test_rewards_of_a_rollout_change_the_loss_of_the_step_that_consumed_it(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, {0: samples})
    write_step(lake, {0: samples})
    fields = _fields(lake.what_if({"reward.divide_by_std": False}, steps=[(0, 0)]))
    assert {step for step, _ in fields} == {0}
    assert fields[0, "pg_loss"].changed == fields[0, "pg_loss"].values
    assert fields[0, "ppo_kl"].changed == 0
    # The loss follows the advantages that the other rewards give, whatever it recorded.
    alone = drawn(replace(WAY, std=False))
    other = Lake.create(f"{lake.path}-other")
    write_whole(other, {0: alone}, replace(WAY, std=False), settings=WAY.full)
    (recorded,) = (
        one.recorded
        for one in _fields(other.what_if({"reward.ddof": 1})).values()
        if one.field == "pg_loss"
    )
    assert fields[0, "pg_loss"].then == pytest.approx(recorded, abs=1e-6)


def test_what_a_rollout_hands_on_is_kept_until_the_last_step_that_takes_it(lake: Lake) -> None:
    """However many rollouts are looked at, those that no later step consumed from are forgotten."""
    for rollout in range(6):
        samples = drawn(rollout_id=rollout)
        write_rollout(lake, {0: samples})
        write_step(lake, {0: samples}, rollout_id=rollout)
    write_step(lake, {0: drawn()}, rollout_id=5, step_id=1)  # late, of the first rollout
    kept: list[int] = []

    def count(done: int, of: int) -> None:
        kept.append(sum(type(one) is Handed for one in gc.get_objects()))

    changes = {"reward.divide_by_std": False}
    whole = lake.what_if(changes, progress=count)
    assert len(kept) == 13
    assert max(kept) <= 2  # that of the first rollout, and of the one at hand
    assert kept[-1] == 0
    for step in ((5, 1), (3, 0)):
        (alone,) = lake.what_if(changes, steps=[step]).cohorts
        (same,) = [one for one in whole.cohorts if one.cohort == alone.cohort]
        assert same.to_json() == alone.to_json()
        assert any(one.changed for one in alone.fields)


@pytest.mark.parametrize("sample_first", [True, False])
@pytest.mark.parametrize("rank_too", [True, False])
def test_a_field_of_samples_and_of_ranks_is_shown_of_each(
    lake: Lake, sample_first: bool, rank_too: bool
) -> None:
    samples = drawn()
    shares = halves(samples)
    scalars = rank_sums(Trainer(WAY), shares)
    logged = {}
    for rank, own in shares.items():
        values = [float(Trainer(WAY).sample_loss(one)["pg_loss"]) for one in own]
        by_sample = Expected({"pg_loss": values}, {"scope": "sample", "reduction": "mean"})
        both = [by_sample, *scalars[rank]] if sample_first else [*scalars[rank], by_sample]
        logged[rank] = both if rank_too else [by_sample]
    write_whole(lake, shares, expected=logged)
    (cohort,) = lake.what_if({"loss.eps_clip": 0.01}).cohorts
    found = {(one.field, one.per): one for one in cohort.fields if one.field == "pg_loss"}
    assert {*found} == {("pg_loss", "sample"), *([("pg_loss", "scalar")] if rank_too else [])}
    assert found["pg_loss", "sample"].where.startswith("s-")
    assert found["pg_loss", "sample"].agree == found["pg_loss", "sample"].values == len(samples)
    if rank_too:
        assert found["pg_loss", "scalar"].where in ("rank 0", "rank 1")
        assert found["pg_loss", "scalar"].values == 2


def test_settings_that_contradict_each_other_are_said_and_not_recomputed(lake: Lake) -> None:
    write_whole(lake, drawn())
    (cohort,) = lake.what_if({"loss.aggregation": "constant-norm"}).cohorts
    assert cohort.notes == [
        "loss.policy: loss.aggregation is 'constant-norm' and loss.constant_norm is not stated"
    ]
    assert "loss.policy" not in {one.stage for one in cohort.fields}


@pytest.mark.parametrize("apart", [True, False])
def test_what_could_not_be_recomputed_is_never_said_to_be_without_effect(
    lake: Lake, apart: bool
) -> None:
    """Nor is what reads it shown as unchanged, in the same cohort or in the step that took it."""
    samples = drawn()
    if apart:
        write_rollout(lake, {0: samples})
        write_step(lake, {0: samples})
    else:
        write_whole(lake, samples)
    found = lake.what_if({"reward.weights": {"a": 1.0}})
    assert not [one for one in found.notes if "no effect" in one]
    shown = {field.stage for one in found.cohorts for field in one.fields}
    assert shown.isdisjoint({"reward.post_process", "advantage.estimate", "loss.policy"})
    said = "\n".join(note for one in found.cohorts for note in one.notes)
    assert "advantage.estimate: not recomputed: reads reward, which could not be" in said
    assert "loss.policy: not recomputed: reads advantages, which could not be" in said


def test_a_change_of_nothing_and_of_an_unknown_setting_are_refused(lake: Lake) -> None:
    write_whole(lake, drawn())
    with pytest.raises(QueryError, match="no setting is changed"):
        lake.what_if({})
    with pytest.raises(SchemaError, match=r"no setting 'loss\.eps_high'"):
        lake.what_if({"loss.eps_high": 0.28})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("reward.n_samples_per_prompt=8", 8),
        ("reward.n_samples_per_prompt=none", None),
        ("reward.divide_by_std=false", False),
        ("loss.dual_clip=3", 3.0),
        ("reward.clip_after=-10,10", (-10.0, 10.0)),
        ("loss.aggregation=token-mean", "token-mean"),
        ("reward.weights=a: 1;b:0.5", {"a": 1.0, "b": 0.5}),
        ("reward.costs=", {}),
        ("reward.episode_agents=solver, judge", ("solver", "judge")),
    ],
)
def test_a_change_is_read_as_its_setting_holds_it(text: str, value: object) -> None:
    assert setting_of(text) == (text.partition("=")[0], value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("loss.eps_high=0.28", "no setting 'loss.eps_high'"),
        ("loss.eps_clip", "has no ="),
        ("loss.eps_clip=nan", "expected a number"),
        ("reward.grouping=prompt", "expected group, none, batch"),
        ("reward.divide_by_std=1", "expected true or false"),
        ("reward.clip_after=3,1", "expected a pair"),
        ("reward.epsilon=none", "expected a number"),
        ("reward.weights=1", "expected an object of numbers"),
        ("reward.costs=time:1", "expected output, input, turns"),
    ],
)
def test_a_change_that_is_none_says_what_one_is(text: str, said: str) -> None:
    with pytest.raises(SchemaError, match=said.replace(".", r"\.")):
        setting_of(text)
