"""What a replay was asked for, and the rows of which capture sets that is."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trajreplay.query.manifest.capture_sets import CaptureSets
from trajreplay.query.manifest.catalog import Catalog, Cohort, cohort_of
from trajreplay.query.manifest.lineage import lineages
from trajreplay.query.selecting.predicates import matching_rows
from trajreplay.query.selecting.row_masks import Named, RowFinder, SelectedSet, all_rows
from trajreplay.query.tables.errors import check_text
from trajreplay.query.tables.visible import Visible
from trajreplay.schema.contracts import STAGE_NAMES
from trajreplay.schema.errors import QueryError

_SHOWN_VALUES = 3


@dataclass(frozen=True)
class Selection:
    """Which samples of which cohorts; what is left empty restricts nothing.

    A sample has to satisfy every kind of condition, and one value of each kind.

    Args:
        where: One boolean expression over the columns of rollouts or steps.
        run: The run.
        attempt: The lineage of this attempt: itself and what it continues.
        rollouts: Rollouts and the steps counted in them.
        steps: Steps (rollout_id, step_id), without their rollouts.
        ranks: Ranks that captured the samples; of a parallel copy, those of its owner.
        samples: Sample ids.
        groups: Group ids.
        batches: Micro-batch ids.
        stages: Stages to recompute.
        closure: Whether the samples are widened to whole groups or to the whole cohort.
        allow_partial: Whether incomplete capture sets may be used.
    """

    where: str | None = None
    run: str | None = None
    attempt: int | None = None
    rollouts: tuple[int, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()
    ranks: tuple[int, ...] = ()
    samples: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    batches: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    closure: Literal["group", "cohort"] | None = None
    allow_partial: bool = False

    @classmethod
    def of(cls, where: str | None, named: Mapping[str, Any], **more: Any) -> Selection:
        """A selection from conditions by name, sequences of any type.

        Raises:
            TypeError: There is no condition of a name.
        """
        given = {**named, **more}
        kept: dict[str, Any] = {
            name: one if one is None or isinstance(one, str | int) else tuple(one)
            for name, one in given.items()
        }
        return cls(where=where, **kept)

    def check(self) -> None:
        """Refuse conditions that contradict each other.

        Raises:
            QueryError: They do, a stage is unknown, or an id is no valid text.
        """
        for one in (self.run or "", *self.samples, *self.groups, *self.batches):
            check_text(one)
        if self.steps and self.rollouts:
            raise QueryError(
                "--step R:S and --rollout R were both given; a step names its rollout",
                hint="Give --step alone for the step, --rollout alone for it and all its steps.",
            )
        if self.batches and not self.steps:
            raise QueryError(
                "--batch was given without --step: every step counts its micro-batches anew",
                hint="Name the step: --step 120:0 --batch mb-0007",
            )
        unknown = [stage for stage in self.stages if stage not in STAGE_NAMES]
        if unknown:
            raise QueryError(
                f"unknown stage {unknown[0]!r}, expected one of {', '.join(STAGE_NAMES)}",
                hint="To list the stages: trajreplay schema --stages",
                stage=unknown[0],
            )

    @property
    def text(self) -> str:
        """What it asks for, as options of the command line; of many values the first."""
        given: dict[str, Sequence[object]] = {
            "--where": () if self.where is None else (self.where,),
            "--run": () if self.run is None else (self.run,),
            "--attempt": () if self.attempt is None else (self.attempt,),
            "--rollout": self.rollouts,
            "--step": [f"{rollout}:{step}" for rollout, step in self.steps],
            "--rank": self.ranks,
            "--sample": self.samples,
            "--group": self.groups,
            "--batch": self.batches,
        }
        return " ".join(_as_options(name, values) for name, values in given.items() if values)

    @property
    def by_row(self) -> bool:
        """Whether it can take some rows of a capture set and leave others."""
        narrowed = self.ranks or self.samples or self.groups or self.batches
        return self.where is not None or bool(narrowed)


@dataclass(frozen=True)
class Selected:
    """The selected capture sets in report order; the entries of one are read when it is reached."""

    selection: Selection
    sets: CaptureSets
    cohorts: tuple[Cohort, ...]
    _chosen: dict[Cohort, SelectedSet] = field(default_factory=dict, repr=False)

    def __iter__(self) -> Iterator[SelectedSet]:
        return map(self.of, self.cohorts)

    def __len__(self) -> int:
        return len(self.cohorts)

    def of(self, cohort: Cohort) -> SelectedSet:
        """The selected rows of a cohort."""
        return self._chosen.get(cohort) or all_rows(self.sets[cohort])


def select(catalog: Catalog, selection: Selection) -> Selected:
    """Find what a selection names.

    Of the data only ids, and the columns that `where` reads, are looked at. Incomplete and damaged
    capture sets are selected like others, so that a replay can refuse them.

    Raises:
        QueryError: It is wrong, or something that it names is not there.
        DatasetError: An attempt record is damaged.
    """
    selection.check()
    sets = CaptureSets(catalog, lineages(catalog, selection.run, selection.attempt))
    cohorts = _cohorts(sets, selection)
    if not cohorts:
        raise _nothing(selection, sets, len(sets))
    if not selection.by_row:
        return Selected(selection, sets, tuple(cohorts))
    visible = Visible(catalog, run_id=selection.run, only=frozenset(cohorts), tolerant=True)
    matches = None if selection.where is None else matching_rows(visible, selection.where)
    unreadable = {cohort_of(key): error.message for key, error in visible.damaged.items()}
    named = Named(samples=selection.samples, groups=selection.groups, batches=selection.batches)
    finder = RowFinder(catalog.store, named, selection.ranks, matches)
    chosen: dict[Cohort, SelectedSet] = {}
    for cohort in cohorts:
        if matches is None or cohort in matches or cohort in unreadable:
            one = finder.rows_of(sets[cohort], unreadable.get(cohort))
            if one.problems or one.count:
                chosen[cohort] = one
    if not chosen and matches is not None:  # no name is to blame for a predicate
        raise _nothing(selection, sets, len(cohorts))
    if finder.absent or not chosen:
        raise _nothing(selection, sets, len(cohorts), finder.absent)
    return Selected(selection, sets, tuple(chosen), chosen)


def _cohorts(sets: CaptureSets, selection: Selection) -> list[Cohort]:
    if not selection.rollouts and not selection.steps:
        return list(sets)
    named = selection.rollouts or tuple(rollout for rollout, _ in selection.steps)
    there = [
        cohort
        for run_id, lineage in sets.lineages.items()
        for attempt in lineage.attempts
        for rollout in dict.fromkeys(named)
        for cohort in sets.catalog.by_rollout.get((run_id, attempt, rollout), ())
        if cohort in sets
    ]
    if selection.steps:
        there = [one for one in there if (one.rollout_id, one.step_id) in selection.steps]
        found = {(one.rollout_id, one.step_id) for one in there}
        absent = [
            f"--step {one}:{step}" for one, step in selection.steps if (one, step) not in found
        ]
    else:
        rollouts = {one.rollout_id for one in there}
        absent = [f"--rollout {one}" for one in selection.rollouts if one not in rollouts]
    if absent:
        raise _nothing(selection, sets, len(sets), absent[0])
    return sorted(there, key=lambda cohort: cohort.order)


def _as_options(name: str, values: Sequence[object]) -> str:
    shown = " ".join(f"{name} {shlex.quote(str(one))}" for one in values[:_SHOWN_VALUES])
    more = len(values) - _SHOWN_VALUES
    return f"{shown} (and {more} more)" if more > 0 else shown


def _nothing(
    selection: Selection, sets: CaptureSets, looked_at: int, absent: str = ""
) -> QueryError:
    """The error of a selection without result.

    Args:
        selection: What was asked.
        sets: The capture sets that are visible.
        looked_at: How many of them were looked into.
        absent: The one value of which nothing was found; all together if omitted.
    """
    asked = selection.text
    where = f"{looked_at} capture set{'' if looked_at == 1 else 's'} in {sets.catalog.store}"
    found = f"{absent or asked or 'a lake without captures'} selects nothing: looked at {where}"
    if absent and absent != asked:
        found += f" for {asked}"
    return QueryError(found, hint="To list what is there: trajreplay info", selected=0)
