"""How train is held against rollout, whatever is measured: runs, the pair, resources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from trajreplay.query.manifest.catalog import Catalog, Cohort
from trajreplay.query.mismatch.pair import DEFAULT_PAIR
from trajreplay.query.mismatch.report import MismatchFinding
from trajreplay.query.selecting.row_masks import SelectedSet
from trajreplay.query.selecting.selection import Selected, Selection, select
from trajreplay.query.tables.connection import MEMORY_BYTES
from trajreplay.schema.errors import DatasetError, QueryError, listed

_TO_LIST = "To list what is there: trajreplay info"


@dataclass(frozen=True)
class Chosen:
    """What is measured.

    Args:
        runs: What is selected of each run.
        empty: Runs that nobody named and that lack what is selected, each with what they are.
    """

    runs: dict[str, Selected]
    empty: dict[str, str]

    def findings(self) -> tuple[MismatchFinding, ...]:
        """That runs are left out, one finding each."""
        return tuple(
            MismatchFinding("warning", run_id, f"left out: it {why}")
            for run_id, why in self.empty.items()
        )


@dataclass(frozen=True)
class Pairing:
    """What every measurement of train against rollout is asked with.

    Args:
        runs: The runs, side by side, the first the one that others are compared with; all of the
            lake if empty.
        pair: The columns of log-probs compared, `TRAINER:SAMPLER`.
        any_version: Count tokens, too, that are known to be sampled by other weights than those
            that recomputed them.
        memory_bytes: What DuckDB may take before it spills.
        threads: Threads of DuckDB, all cores if omitted; no result depends on it.
        progress: Called with the capture sets read and all of them.
    """

    runs: Sequence[str] = ()
    pair: str = DEFAULT_PAIR
    any_version: bool = False
    memory_bytes: int = MEMORY_BYTES
    threads: int | None = None
    progress: Callable[[int, int], None] | None = None

    def chosen(self, catalog: Catalog, selection: Selection | None) -> Chosen:
        """What is selected of each run, in the order in which they stand side by side.

        Of runs that nobody named, those of which nothing is selected are left out.

        Raises:
            QueryError: The selection is wrong or selects nothing, or there is no run.
        """
        wanted = selection or Selection()
        if not catalog.runs:
            raise QueryError("the lake holds no run", hint=_TO_LIST)
        named = self.runs or ([wanted.run] if wanted.run else ())
        found: dict[str, Selected] = {}
        empty: dict[str, str] = {}
        refusal = QueryError("no run is selected")
        for one in dict.fromkeys(named or catalog.runs):
            try:
                found[one] = select(catalog, replace(wanted, run=one))
            except QueryError as error:
                if named or error.facts.get("selected") != 0:
                    raise
                why = "captured nothing" if _is_empty(catalog, one) else "lacks what is selected"
                empty[one], refusal = why, error
        if not found:
            select(catalog, wanted)  # says what is not there of any run
            raise refusal
        return Chosen(found, empty)

    def counting(self, done: int, total: int) -> Callable[[int], None]:
        """Tell how many capture sets of a run were read, of those before it and all."""

        def count(number: int) -> None:
            if self.progress is not None:
                self.progress(min(done + number, total), total)

        return count


def _is_empty(catalog: Catalog, run_id: str) -> bool:
    return not any(one.run_id == run_id for one in catalog.by_cohort)


def usable(
    selected: Selected, level: str, left_out: list[str], count: Callable[[int], None]
) -> Iterator[SelectedSet]:
    """The capture sets of a level that may be read.

    Args:
        selected: What is selected.
        level: `step` or `rollout`.
        left_out: Takes those that may not, each with the first reason.
        count: Called with the number of those seen.

    Raises:
        DatasetError: One is damaged.
    """
    cohorts: list[Cohort] = [
        one for one in selected.cohorts if (one.step_id is None) == (level == "rollout")
    ]
    for number, cohort in enumerate(cohorts, 1):
        one = selected.of(cohort)
        if one.problems:
            raise DatasetError(f"{cohort}: {listed(one.problems)}")
        refusals = one.captures.refusals(allow_partial=selected.selection.allow_partial)
        if refusals:
            left_out.append(f"{cohort}: {refusals[0]}")
        else:
            yield one
        count(number)
