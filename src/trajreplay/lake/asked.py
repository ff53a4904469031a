"""What a lake holds: SQL, overviews, and whether it is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trajreplay.lake.opened import Opened

if TYPE_CHECKING:
    import pyarrow

    from trajreplay.query import Inspection, SqlQuery, ValidationReport


class Asked(Opened):
    """A lake that is asked what it holds."""

    def sql(
        self,
        text: str,
        *,
        run: str | None = None,
        attempt: int | None = None,
        allow_partial: bool = False,
        memory_bytes: int = 2 << 30,
        threads: int | None = None,
    ) -> SqlQuery:
        """One SELECT over the tables of the lake; it runs when its rows are asked for.

        Args:
            text: The statement, in DuckDB's dialect.
            run: Show this run only.
            attempt: Show the lineage of this attempt, instead of the newest.
            allow_partial: Show incomplete capture sets and superseded attempts too.
            memory_bytes: What DuckDB may take.
            threads: Threads of DuckDB; all cores if omitted. Sums of floats depend on the order
                in which threads finish: give 1 where the last bit matters.

        Returns:
            The statement: `.arrow()`, `.polars()`, or `with query.relation() as relation`.

        Raises:
            DatasetError: The lake cannot be listed.
        """
        from trajreplay.query import SqlQuery

        return SqlQuery(
            self._catalog,
            text,
            run=run,
            attempt=attempt,
            allow_partial=allow_partial,
            memory_bytes=memory_bytes,
            threads=threads,
        )

    def info(
        self,
        run: str | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> pyarrow.Table:
        """One row a capture set: its coordinates, ranks, completeness, samples, tokens and bytes.

        Args:
            run: Only this run.
            progress: Called with the capture sets done and all of them.

        Raises:
            QueryError: There is no such run.
            DatasetError: The lake cannot be listed.
        """
        from trajreplay.query import info

        return info(self._catalog, run, progress=progress)

    def attempts(
        self,
        run: str | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> pyarrow.Table:
        """One row an attempt, also of one that captured nothing: what it holds, and how whole.

        Args:
            run: Only this run.
            progress: Called with the capture sets done and all of them.

        Raises:
            QueryError: There is no such run.
            DatasetError: The lake cannot be listed.
        """
        from trajreplay.query import attempts

        return attempts(self._catalog, run, progress=progress)

    def inspect(
        self,
        rollout_id: int,
        step_id: int | None = None,
        *,
        run: str | None = None,
        attempt: int | None = None,
    ) -> Inspection:
        """Everything known of one capture set, whole or not.

        Args:
            rollout_id: Its rollout.
            step_id: Its step; None for the rollout's own captures.
            run: Its run; may be left out where only one has such a capture set.
            attempt: Its attempt, superseded or not; the one in the lineage if omitted.

        Returns:
            Identity, producer, settings, contracts and payload; `.to_json()`.

        Raises:
            QueryError: There is none, or several.
            DatasetError: The lake cannot be listed.
        """
        from trajreplay.query import inspect

        return inspect(self._catalog, rollout_id, step_id, run_id=run, attempt=attempt)

    def validate(
        self,
        *,
        deep: bool = False,
        memory_bytes: int = 2 << 30,
        progress: Callable[[int, int], None] | None = None,
    ) -> ValidationReport:
        """Check every file: format, integrity, safety, completeness, closure, redaction.

        Nothing is recomputed, and the lake is listed anew.

        Args:
            deep: Also decode the lists of numbers, and make the digest of each anew: whether the
                program that captured sealed what it wrote. And check of each cohort what no
                healthy training records: shifted columns, doubled ranks and the like.
            memory_bytes: What the samples of one cohort may take in memory for that.
            progress: Called with the captures done and all of them.

        Returns:
            The findings; `report.ok` is false where a replay would refuse something.
        """
        from trajreplay.query import validate

        report = validate(self._store, deep=deep, progress=progress)
        for path, problem in self._refused.items():
            report.add("error", "import", path, problem)
        if deep:
            from trajreplay.query import Catalog
            from trajreplay.stages.replaying.deep import UNCHECKED, contract_findings

            broken = not report.ok  # what a check cannot read is, as a rule, told already
            catalog = Catalog.open(self._store, strict=False)
            for place, found in contract_findings(catalog, memory_bytes=memory_bytes):
                where = f" {found.sample_id}" if found.sample_id is not None else ""
                where += f" token {found.token}" if found.token is not None else ""
                told = broken and found.check == UNCHECKED
                severity = "info" if told else found.severity
                report.add(severity, found.check, None, f"{place}{where}: {found.message}")
        return report
