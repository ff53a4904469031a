"""What if: stages recomputed under other settings, beside those that were in force."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trajreplay.query import Catalog, Cohort, Selection, select
from trajreplay.schema.columns import has_column
from trajreplay.schema.contracts import STAGE_NAMES
from trajreplay.schema.errors import QueryError, TrajReplayError
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.counterfactuals.changes import CohortChange, FieldChange, WhatIf
from trajreplay.stages.counterfactuals.handing_on import HANDED_ON, Handed, Handover, taken_over
from trajreplay.stages.counterfactuals.sparing import Values
from trajreplay.stages.counterfactuals.values import recompute
from trajreplay.stages.counterfactuals.variants import COMPUTED, Variant, changed_settings, varied
from trajreplay.stages.replaying.judge import DEFAULT_MEMORY_BYTES
from trajreplay.stages.replaying.whole import WholeCohorts, block_of
from trajreplay.stages.report import CohortReport

# Which stages read a section of the settings; what only checks read is recomputed by none.
READ_BY = {
    "reward": ("reward.raw", "reward.post_process"),
    "kl": ("reward.post_process", "advantage.kl", "advantage.estimate"),  # where rewards pay it
    "advantage": ("advantage.estimate",),
    # Baselines may be of the tokens that the loss keeps, and weights of advantages the loss's.
    "loss": ("reward.post_process", "advantage.estimate", "loss.policy", "loss.value"),
    "value": ("loss.value",),
    "layout": ("reward.post_process", "advantage.estimate", "loss.policy", "loss.value"),
    "sampling": (),
    "handoff": (),
}

# What decides which tokens a loss keeps, over which a baseline may be.
_KEEP_TOKENS = ("rejection", "veto", "m2_")


def what_if(
    catalog: Catalog,
    selection: Selection,
    changes: Mapping[str, Any],
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> WhatIf:
    """Recompute selected cohorts, whole, under other settings; see `Lake.what_if`.

    Raises:
        QueryError: Nothing is changed, or the selection is wrong or selects nothing.
        SchemaError: There is no such setting, or a value is of another kind.
    """
    if not changes:
        raise QueryError("no setting is changed", hint="Name one, such as loss.eps_clip_high=0.28")
    cohorts = WholeCohorts(catalog, select(catalog, selection), memory_bytes=memory_bytes)
    turns = list(cohorts.turns())
    handed = Handover(cohorts, [place for place, _ in turns])
    found = []
    for number, (place, chosen) in enumerate(turns):
        change = CohortChange(place)
        loaded = cohorts.load(place)
        if isinstance(loaded, CohortReport):
            change.notes.append(loaded.refusal or "nothing was declared that can be recomputed")
            change.complete = not loaded.refusal
            change.left = _left(loaded)
        elif loaded.table.num_rows:
            handed.keep(place, _change(loaded, changes, handed.of(place), change, selection.stages))
        handed.done(place)
        if chosen:
            found.append(change)
        if progress is not None:
            progress(number + 1, len(turns))
    return WhatIf(dict(changes), found, list(_idle(changes, found)))


def _left(report: CohortReport, wanted: Collection[str] = ()) -> dict[str, str]:
    """Declared stages of a cohort that are not recomputed, each with the reason."""
    return {
        one.stage: f"{one.verdict}{f': {one.message}' if one.message else ''}"
        for one in report.stages
        if one.stage not in wanted and one.verdict not in ("not-declared", "skipped")
    }


def _idle(changes: Mapping[str, Any], cohorts: Sequence[CohortChange]) -> Iterator[str]:
    """Say what changes nothing: what no stage that was recomputed reads, or all that was given."""
    stages = {stage for one in cohorts for stage in one.stages}
    left = {stage: why for one in cohorts[::-1] for stage, why in one.left.items()}
    fields = [one for cohort in cohorts for one in cohort.fields]
    if not stages:
        return
    changed = any(one.changed for one in fields)
    rest = []
    for name in changes:
        readers = _readers(name)
        shown = [one for one in readers if one in left]
        if not readers:
            yield f"{name} changes nothing here: checks read it, and none is made under another one"
        elif not stages.isdisjoint(readers):
            rest += [] if shown else [name]  # what else reads it may well change
        elif shown:
            yield f"{name} is not tried: {shown[0]} reads it, and is {left[shown[0]]}"
        elif not (changed and (len(changes) == 1 or _comes_before(name, stages))):
            yield f"{name} has no effect: none of the stages that are declared reads it"
    complete = all(one.complete for one in cohorts)  # what was not recomputed may well change
    if rest and fields and complete and not changed:
        verb = "has" if len(rest) == 1 else "have"
        yield f"{', '.join(rest)} {verb} no effect: no value that is shown changes"


def _readers(name: str) -> tuple[str, ...]:
    section, _, field = name.partition(".")
    readers = READ_BY[section]
    if section == "loss" and not field.startswith(_KEEP_TOKENS):
        readers = tuple(one for one in readers if one != "reward.post_process")
    return readers


def _comes_before(name: str, stages: Collection[str]) -> bool:
    """Whether a rollout may read a setting, and hand on to these stages what it makes of it."""
    order = STAGE_NAMES.index
    return any(order(reader) < order(stage) for reader in _readers(name) for stage in stages)


def _change(
    cohort: LoadedCohort,
    changes: Mapping[str, Any],
    handed: Mapping[Cohort, Handed],
    report: CohortChange,
    stages: tuple[str, ...],
) -> Handed:
    block = block_of(cohort)
    changed_settings(block.settings, changes)  # refused before anything is recomputed
    wanted = [one for one in COMPUTED if one in cohort.abilities]
    report.stages, report.left = tuple(wanted), _left(cohort.report, wanted)
    blocks = varied(block, Variant(), wanted), varied(block, Variant(changes), wanted)
    sides: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for at in range(2):
        sides[at].update(taken_over(block, handed, at))
    lost = {name for one in handed.values() for name in one.lost}
    for stage in wanted:
        made = {*cohort.abilities[stage].writes} & {*HANDED_ON}
        reads = [one for one in cohort.abilities[stage].reads if one in lost]
        if reads:
            report.notes.append(
                f"{stage}: not recomputed: reads {', '.join(reads)}, which could not be recomputed"
            )
            report.complete, lost = False, lost | made
            continue
        try:
            now, then = map(recompute, blocks, (stage, stage), sides)
            alone = [recompute(one, stage) for one in blocks]
        except TrajReplayError as error:
            why = _unsupported(blocks[1], stage) or error.message
            report.notes.append(f"{stage}: {why}")
            if any(stage in _readers(name) for name in changes):
                report.complete, lost = False, lost | made
            continue
        lost -= made
        for side, values in zip(sides, (now, then), strict=True):
            side.update({one.field: one.recomputed for one in values if one.field in HANDED_ON})
        if not stages or stage in stages:
            report.fields += _compared(block, stage, now, then, alone)
    report.fields.sort(key=lambda one: STAGE_NAMES.index(one.stage))
    ids = cohort.table["sample_id"].combine_chunks()
    return Handed(ids, block.packed.offsets, sides, frozenset(lost))


def _unsupported(block: Block, stage: str) -> str:
    """Why a stage cannot be recomputed under the changed settings, where they are the reason."""
    from trajreplay.schema.identity import ParallelCoordinates
    from trajreplay.stages.capability import ability

    found = ability(stage, block.settings, ParallelCoordinates(), block.packed.table.column_names)
    if found.capability != "recompute":
        return found.reason
    lacking = [one for one in found.reads if not has_column(block.packed.table, one)]
    return f"reads {', '.join(lacking)}, which was not captured" if lacking else ""


def _compared(
    block: Block,
    stage: str,
    now: list[Values],
    then: list[Values],
    alone: list[list[Values]],
) -> Iterable[FieldChange]:
    others = {one.key: one for one in then}
    agree, then_agree = ({one.key: one for one in side} for side in alone)
    for one in now:
        other = others.get(one.key)
        if other is None or len(one.recomputed) != len(other.recomputed):
            continue
        change = (other.recomputed - one.recomputed).abs()
        same = (one.recomputed == other.recomputed) | (
            one.recomputed.isnan() & other.recomputed.isnan()
        )
        change = torch.where(same | ~one.counts, 0.0, change)
        differs = (change != 0) & one.counts
        at = int(torch.where(change.isnan(), torch.inf, change).argmax()) if len(change) else -1
        yield FieldChange(
            stage,
            one.field,
            one.per,
            int(one.counts.sum()),
            int(differs.sum()),
            float(change[at]) if at >= 0 else 0.0,
            _place(block, one, at) if at >= 0 and bool(differs.any()) else "",
            float(one.recorded[at]) if at >= 0 else torch.nan,
            float(one.recomputed[at]) if at >= 0 else torch.nan,
            float(other.recomputed[at]) if at >= 0 else torch.nan,
            _agreeing(agree[one.key]),
            _agreeing(then_agree[one.key]) if one.key in then_agree else 0,
        )


def _agreeing(one: Values) -> int:
    return int((one.counts & ~one.disagree).sum())


def _place(block: Block, one: Values, at: int) -> str:
    if one.places:
        return one.places[at]
    sample = int(one.samples[at])
    name = block.packed.text("sample_id", sample) or ""
    if one.per != "token":
        return name
    return f"{name} token {at - int(block.packed.offsets[sample])}"
