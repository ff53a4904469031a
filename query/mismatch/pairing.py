"""How train is held against rollout, whatever is measured: runs, the pair, resources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from trajreplay.query.catalog import Catalog, Cohort
from trajreplay.query.connection import MEMORY_BYTES
from trajreplay.query.mismatch.pair import DEFAULT_PAIR
from trajreplay.query.row_masks import SelectedSet
from trajreplay.query.selection import Selected, Selection, select
from trajreplay.schema.errors import DatasetError, QueryError, listed


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

    def chosen(self, catalog: Catalog, selection: Selection | None) -> dict[str, Selected]:
        """What is selected of each run, in the order in which they stand side by side.

        Raises:
            QueryError: The selection is wrong, or there is no run.
        """
        wanted = selection or Selection()
        names = dict.fromkeys(self.runs or ([wanted.run] if wanted.run else catalog.runs))
        if not names:
            raise QueryError("the lake holds no run")
        return {one: select(catalog, replace(wanted, run=one)) for one in names}

    def counting(self, done: int, total: int) -> Callable[[int], None]:
        """Tell how many capture sets of a run were read, of those before it and all."""

        def count(number: int) -> None:
            if self.progress is not None:
                self.progress(min(done + number, total), total)

        return count


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
