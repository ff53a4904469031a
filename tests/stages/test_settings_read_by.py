"""Which stages read which section of the settings, found by changing each setting."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cohorts import ALL_STAGES
from tests.helpers.queried import catalog_of
from tests.helpers.scenes import WAY, drawn, write_rollout, write_whole
from tests.stages.test_composed import CHANGES, PLAIN, _record, _shares
from tests.stages.test_settings_not_read import TRIED
from trajreplay import Lake, SchemaError, TrajReplayError, with_changes
from trajreplay.query import Selection, select
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.settings import SECTIONS
from trajreplay.schema.settings.knobs import kinds
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.counterfactuals.values import recompute
from trajreplay.stages.counterfactuals.variants import COMPUTED, Variant, varied
from trajreplay.stages.counterfactuals.what_if import READ_BY
from trajreplay.stages.replaying.whole import WholeCohorts, block_of

NAMES = sorted(f"{section}.{name}" for section, kind in SECTIONS.items() for name in kinds(kind))


@cache
def _block(context: str) -> Block:
    """A step with every column, recorded under settings that are composed so."""
    settings = with_changes(PLAIN, CHANGES[context][0])
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(f"{folder}/lake")
        _record(lake, _shares(), settings, settings)
        catalog = catalog_of(lake)
        whole = WholeCohorts(catalog, select(catalog, Selection()))
        ((place, _),) = whole.turns()
        cohort = whole.load(place)
        assert isinstance(cohort, LoadedCohort)
        return block_of(cohort)


def _made(block: Block, stage: str) -> list[torch.Tensor] | None:
    try:
        return [torch.nan_to_num(one.recomputed) for one in recompute(block, stage)]
    except TrajReplayError:
        return None


def _others(block: Block, label: str) -> Iterator[Any]:
    section, _, name = label.partition(".")
    kind = kinds(SECTIONS[section])[name]
    for value in (*TRIED.get(kind.what, kind.known), *((None,) if kind.optional else ())):
        if value != getattr(getattr(block.settings, section), name):
            yield value


@given(context=st.sampled_from(sorted(CHANGES)), label=st.sampled_from(NAMES))
def test_a_stage_that_a_setting_changes_is_said_to_read_it(context: str, label: str) -> None:
    block = _block(context)
    for value in _others(block, label):
        try:
            other = varied(block, Variant({label: value}))
        except SchemaError:
            continue
        for stage in {*COMPUTED} & {*block.cohorts[0].abilities} & {*other.cohorts[0].abilities}:
            now, then = _made(block, stage), _made(other, stage)
            if now is None or then is None:
                continue
            same = len(now) == len(then) and all(map(torch.equal, now, then))
            assert same or stage in READ_BY[label.partition(".")[0]], (stage, value)


@pytest.mark.parametrize(
    ("context", "label", "value", "stage"),
    [
        ("kl within a divided reward", "kl.coef", 0.5, "reward.post_process"),
        ("kl within a divided reward", "kl.estimator", "k1", "reward.post_process"),
        (
            "weighted by kept tokens",
            "loss.rejection",
            {"token-ratio": (0.2, 5.0)},
            "reward.post_process",
        ),
    ],
)
def test_a_setting_of_one_section_may_change_the_stage_of_another(
    context: str, label: str, value: object, stage: str
) -> None:
    block = _block(context)
    now, then = _made(block, stage), _made(varied(block, Variant({label: value})), stage)
    assert now is not None
    assert then is not None
    assert not all(map(torch.equal, now, then))
    assert stage in READ_BY[label.partition(".")[0]]


def test_every_section_has_its_readers() -> None:
    assert {*READ_BY} == {*SECTIONS, "handoff"}


def test_a_batch_that_changes_advantages_is_not_said_to_have_no_effect(lake: Lake) -> None:
    settings = with_changes(WAY.full, {"advantage.whiten": "cohort", "layout.batch": "rollout"})
    first, second = drawn(), drawn(rollout_id=1, seed=1)
    for one in second:
        one.sample_id, one.group = f"{one.sample_id}-x", f"{one.group}-x"
    write_whole(lake, [*first, *second], settings=settings, rollout_id=1)
    found = lake.what_if({"layout.batch": "step"})
    assert any(field.changed for one in found.cohorts for field in one.fields)
    assert found.notes == []


@pytest.mark.parametrize(
    ("name", "value"), [("sampling.max_staleness", 0), ("sampling.partial", True)]
)
def test_what_only_checks_read_is_said_to_be_theirs(lake: Lake, name: str, value: object) -> None:
    write_whole(lake, drawn())
    (note,) = lake.what_if({name: value}).notes
    assert note.startswith(f"{name} changes nothing here: checks read it")


def test_what_a_stage_reads_that_is_only_inspected_is_not_unread(lake: Lake) -> None:
    settings = with_changes(WAY.full, {"loss.surrogate": "odd"})
    samples = drawn()
    write_rollout(lake, samples, settings=settings, stages=ALL_STAGES[:4])
    inspected = StageContract("loss.policy", "inspect-only", reason="by a tool of ours")
    assert lake.what_if({"loss.eps_clip": 0.5}).notes == [
        "loss.eps_clip has no effect: none of the stages that are declared reads it"
    ]
    other = Lake.create(f"{lake.path}-other")
    write_rollout(other, samples, settings=settings, stages=[*ALL_STAGES[:4], inspected])
    (note,) = other.what_if({"loss.eps_clip": 0.5}).notes
    assert note.startswith(
        "loss.eps_clip is not tried: loss.policy reads it, and is inspect-only: by a tool of ours"
    )


def test_what_is_recomputed_and_read_elsewhere_too_is_not_said_to_have_no_effect(
    lake: Lake,
) -> None:
    """Nor is a stage named that could not be recomputed, beside one that was."""
    inspected = StageContract("loss.value", "unsupported", reason="no critic")
    write_whole(lake, drawn(), stages=[*ALL_STAGES, inspected])
    assert lake.what_if({"loss.eps_clip": WAY.eps_clip}).notes == []
