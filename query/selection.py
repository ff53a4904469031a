"""What a replay was asked for, and the rows of which capture sets that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from trajreplay.query.capture_sets import CaptureSets
from trajreplay.query.catalog import Catalog, Cohort, cohort_of
from trajreplay.query.lineage import lineages
from trajreplay.query.predicates import matching_rows
from trajreplay.query.row_masks import Named, RowFinder, SelectedSet, all_rows, refuse_absent
from trajreplay.query.visible import Visible
from trajreplay.schema.contracts import STAGE_NAMES
from trajreplay.schema.errors import QueryError


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

    def check(self) -> None:
        """Refuse conditions that contradict each other.

        Raises:
            QueryError: They do, or a stage is unknown.
        """
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
    if not selection.by_row:
        return Selected(selection, sets, _found(cohorts, selection, sets))
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
    finder.check_all_found()
    return Selected(selection, sets, _found(list(chosen), selection, sets), chosen)


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
        refuse_absent("--step", selection.steps, {(one.rollout_id, one.step_id) for one in there})
    else:
        refuse_absent("--rollout", selection.rollouts, {one.rollout_id for one in there})
    return sorted(there, key=lambda cohort: cohort.order)


def _found(cohorts: list[Cohort], selection: Selection, sets: CaptureSets) -> tuple[Cohort, ...]:
    if not cohorts:
        what = f"--where {selection.where!r}" if selection.where else "the selection"
        raise QueryError(
            f"{what} selects nothing of {len(sets)} capture sets in {sets.catalog.store}",
            hint="To list what is there: trajreplay info",
        )
    return tuple(cohorts)
