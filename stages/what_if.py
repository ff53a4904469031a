"""What if: stages recomputed under other settings, beside those that were in force."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from trajreplay.query import Catalog, Cohort, Selection, select
from trajreplay.schema.contracts import STAGE_NAMES
from trajreplay.schema.errors import QueryError, TrajReplayError
from trajreplay.stages.block import Block
from trajreplay.stages.cohort import LoadedCohort
from trajreplay.stages.judge import DEFAULT_MEMORY_BYTES
from trajreplay.stages.report import CohortReport, json_float
from trajreplay.stages.values import Values, recompute
from trajreplay.stages.variants import COMPUTED, Variant, changed_settings, varied
from trajreplay.stages.whole import WholeCohorts, block_of

# Which stages read a section of the settings.
_READ_BY = {
    "reward": ("reward.raw", "reward.post_process"),
    "kl": ("advantage.kl", "advantage.estimate"),
    "advantage": ("advantage.estimate",),
    "loss": ("loss.policy", "loss.value", "advantage.estimate"),  # whose weights may be the loss's
    "value": ("loss.value",),
}
# Columns that a step takes over from the rollouts that it consumed from.
_HANDED_ON = ("reward", "kl", "advantages", "returns")


@dataclass(frozen=True)
class FieldChange:
    """What other settings make of one recorded field of a stage.

    Args:
        stage: The stage.
        field: The column or scalar.
        per: What has a value: sample, token or scalar.
        values: How many values were recomputed, those of masked tokens left out.
        changed: How many of them change.
        max_change: The largest change; NaN where one becomes NaN or ceases to be it.
        where: The sample, rank or micro-batch of that change, or nothing.
        recorded: The recorded value there.
        declared: What the settings in force give there, chained from the raw rewards on.
        then: What the others give there.
        agree: How many recorded values agree with the settings in force, from recorded inputs.
        then_agree: How many would agree with the others.
    """

    stage: str
    field: str
    per: str
    values: int
    changed: int
    max_change: float
    where: str
    recorded: float
    declared: float
    then: float
    agree: int
    then_agree: int

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        facts = dict(vars(self))
        for name in ("max_change", "recorded", "declared", "then"):
            facts[name] = json_float(facts[name])
        return facts


@dataclass
class CohortChange:
    """What other settings make of one cohort.

    Args:
        cohort: Its coordinates.
        fields: By stage and field, in order.
        notes: What could not be recomputed, and why.
        stages: What was recomputed, shown or not.
    """

    cohort: Cohort
    fields: list[FieldChange] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stages: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {
            **self.cohort._asdict(),
            "notes": self.notes,
            "fields": [one.to_json() for one in self.fields],
        }


@dataclass
class WhatIf:
    """The counterfactual over all selected cohorts.

    Args:
        changes: The settings that are others, by `section.field`.
        cohorts: What they make of each cohort, in the order in which these feed each other.
        notes: Settings that have no effect, and why.
        refused: Files that no cohort could be read from, by path, and why.
    """

    changes: dict[str, Any]
    cohorts: list[CohortChange]
    notes: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {
            "changes": {
                name: list(one) if isinstance(one, tuple) else one
                for name, one in self.changes.items()
            },
            "notes": self.notes,
            "cohorts": [one.to_json() for one in self.cohorts],
            **({"refused": self.refused} if self.refused else {}),
        }


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
    handed: dict[Cohort, _Handed] = {}
    found = []
    for number, (place, chosen) in enumerate(turns):
        change = CohortChange(place)
        loaded = cohorts.load(place)
        if isinstance(loaded, CohortReport):
            change.notes.append(loaded.refusal or "nothing was declared that can be recomputed")
        elif loaded.table.num_rows:
            handed[place] = _change(loaded, changes, handed, change, selection.stages)
        if chosen:
            found.append(change)
        if progress is not None:
            progress(number + 1, len(turns))
    return WhatIf(dict(changes), found, list(_idle(changes, found)))


def _idle(changes: Mapping[str, Any], cohorts: Sequence[CohortChange]) -> Iterator[str]:
    """Say what changes nothing: what no stage that was recomputed reads, or all that was given."""
    stages = {stage for one in cohorts for stage in one.stages}
    fields = [one for cohort in cohorts for one in cohort.fields]
    if not stages:
        return
    unread = [
        name for name in changes if stages.isdisjoint(_READ_BY.get(name.partition(".")[0], ()))
    ]
    for name in unread:
        yield f"{name} has no effect: none of the stages that are declared reads it"
    rest = [name for name in changes if name not in unread]
    if rest and fields and not any(one.changed for one in fields):
        verb = "has" if len(rest) == 1 else "have"
        yield f"{', '.join(rest)} {verb} no effect: no value that is shown changes"


@dataclass(frozen=True)
class _Handed:
    """What a rollout recomputed under the settings in force, and under the others."""

    sample_ids: pa.Array
    offsets: Tensor
    sides: tuple[dict[str, Tensor], dict[str, Tensor]]


def _change(
    cohort: LoadedCohort,
    changes: Mapping[str, Any],
    handed: Mapping[Cohort, _Handed],
    report: CohortChange,
    stages: tuple[str, ...],
) -> _Handed:
    block = block_of(cohort)
    changed_settings(block.settings, changes)  # refused before anything is recomputed
    wanted = [one for one in COMPUTED if one in cohort.abilities]
    report.stages = tuple(wanted)
    blocks = varied(block, Variant(), wanted), varied(block, Variant(changes), wanted)
    sides: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for at in range(2):
        sides[at].update(_taken_over(block, handed, at))
    for stage in wanted:
        try:
            now, then = map(recompute, blocks, (stage, stage), sides)
            alone = [recompute(one, stage) for one in blocks]
        except TrajReplayError as error:
            why = _unsupported(blocks[1], stage) or error.message
            report.notes.append(f"{stage}: {why}")
            continue
        for side, values in zip(sides, (now, then), strict=True):
            side.update({one.field: one.recomputed for one in values if one.field in _HANDED_ON})
        if not stages or stage in stages:
            report.fields += _compared(block, stage, now, then, alone)
    report.fields.sort(key=lambda one: STAGE_NAMES.index(one.stage))
    ids = cohort.table["sample_id"].combine_chunks()
    return _Handed(ids, block.packed.offsets, sides)


def _unsupported(block: Block, stage: str) -> str:
    """Why a stage cannot be recomputed under the changed settings, where they are the reason."""
    from trajreplay.schema.identity import ParallelCoordinates
    from trajreplay.stages.capability import ability

    found = ability(stage, block.settings, ParallelCoordinates(), block.packed.table.column_names)
    if found.capability != "recompute":
        return found.reason
    lacking = [one for one in found.reads if one not in block.packed.table.column_names]
    return f"reads {', '.join(lacking)}, which was not captured" if lacking else ""


def _compared(
    block: Block,
    stage: str,
    now: list[Values],
    then: list[Values],
    alone: list[list[Values]],
) -> Iterable[FieldChange]:
    others = {one.field: one for one in then}
    agree, then_agree = ({one.field: one for one in side} for side in alone)
    for one in now:
        other = others.get(one.field)
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
            _agreeing(agree[one.field]),
            _agreeing(then_agree[one.field]) if one.field in then_agree else 0,
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


def _taken_over(block: Block, handed: Mapping[Cohort, _Handed], at: int) -> dict[str, Tensor]:
    """What the rollouts that a step consumed from hand on, in the place of what it recorded."""
    table = block.packed.table
    if "source_rollout_id" not in table.column_names:
        return {}
    (cohort,) = block.cohorts
    report = cohort.report
    pairs = np.stack([table[name].to_numpy() for name in ("source_attempt", "source_rollout_id")])
    found: dict[str, Tensor] = {}
    for attempt, rollout in np.unique(pairs, axis=1).T.tolist():
        source = handed.get(Cohort(report.run_id, attempt, rollout, None))
        if source is None:
            continue
        rows = ((pairs[0] == attempt) & (pairs[1] == rollout)).nonzero()[0]
        ids = table["sample_id"].take(pa.array(rows))
        theirs = pc.fill_null(pc.index_in(ids, value_set=source.sample_ids), -1).to_numpy()
        rows, theirs = rows[theirs >= 0], theirs[theirs >= 0]
        for name, values in source.sides[at].items():
            if name in table.column_names:
                held = found.setdefault(name, block.column(name).clone())
                _put(block, held, name, rows, values, source.offsets, theirs)
    return found


def _put(
    block: Block,
    held: Tensor,
    name: str,
    rows: np.ndarray[Any, Any],
    values: Tensor,
    offsets: Tensor,
    theirs: np.ndarray[Any, Any],
) -> None:
    if not block.per_token(name):
        held[torch.from_numpy(rows)] = values[torch.from_numpy(theirs)]
        return
    for row, other in zip(rows.tolist(), theirs.tolist(), strict=True):
        start, stop = int(block.packed.offsets[row]), int(block.packed.offsets[row + 1])
        first, last = int(offsets[other]), int(offsets[other + 1])
        if stop - start == last - first:  # else the handoff is what is wrong
            held[start:stop] = values[first:last]
