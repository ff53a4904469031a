"""The lake: one object over everything that can be done with one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pyarrow

    from trajreplay.capture.importers import ImportedSource, ImportOptions, ImportReport
    from trajreplay.query import Catalog, Inspection, MismatchReport, SqlQuery, ValidationReport
    from trajreplay.query.catalog import Cohort
    from trajreplay.query.differences import DiffReport
    from trajreplay.schema import (
        ParallelCoordinates,
        ProducerInfo,
        RecomputeConfig,
        ResumePoint,
        Settings,
        StageContract,
        Tolerance,
    )
    from trajreplay.schema.bundles.relax import Written
    from trajreplay.schema.store import Store
    from trajreplay.stages import Report, RewardFunction, WhatIf
    from trajreplay.stages.explain import Explained
    from trajreplay.stages.gate import GateVerdict, Policy
    from trajreplay.stages.watch import Watch
    from trajreplay.writer import CaptureBuilder


class Lake:
    """A lake of captures in a folder.

    Made by `Lake.create` and `Lake.open`. What a method needs is loaded when it is called, so
    that a trainer that captures loads no duckdb.

    Attributes:
        imported: What became of the files of a lake that `Lake.of_files` made; None of any other.
    """

    def __init__(self, store: Store, imported: ImportReport | None = None) -> None:
        self._store = store
        self.imported = imported

    def __repr__(self) -> str:
        return f"Lake({str(self._store)!r})"

    @cached_property
    def _catalog(self) -> Catalog:
        """One listing of the manifest, shared by everything until `refresh`."""
        from trajreplay.query import Catalog

        return Catalog.open(self._store)

    @property
    def _refused(self) -> list[ImportedSource]:
        """Files that this lake was made for and could not be read."""
        return self.imported.refused if self.imported else []

    def refresh(self) -> None:
        """See what was committed since the lake was opened, or since the last refresh."""
        self.__dict__.pop("_catalog", None)

    @property
    def path(self) -> str:
        """The folder, with links resolved."""
        return str(self._store)

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, exist_ok: bool = False) -> Lake:
        """Make a folder a lake and open it.

        Args:
            path: The folder; made where it is missing.
            exist_ok: Open what is already a lake instead of refusing it.

        Raises:
            DatasetError: It is a lake already, or no folder can be made there.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lake = Lake.create(f"{folder}/lake")
        ...     Lake.open(f"{folder}/lake").path == lake.path
        True
        """
        from trajreplay.schema.lakefile import create_lake

        return cls(create_lake(path, exist_ok=exist_ok))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Lake:
        """Open a lake.

        Raises:
            DatasetError: The folder is no lake, is damaged, or has a newer format.
        """
        from trajreplay.schema.lakefile import open_lake

        return cls(open_lake(path))

    @classmethod
    @contextmanager
    def of_files(
        cls,
        *paths: str | os.PathLike[str],
        kind: str | None = None,
        options: ImportOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Lake]:
        """Open files that another tool left, as a lake of their own for the time of a block.

        Args:
            paths: Files and folders.
            kind: What they are; found out if omitted.
            options: What is said beside the files.
            progress: Called with the sources done and all of them.

        Yields:
            A temporary lake, with what became of each source as `lake.imported`. Its `validate` and
            `replay` report those that were refused.

        Raises:
            CaptureError: A path is not there, is of no known kind, or is of several.
        """
        import tempfile

        from trajreplay.capture.importers import import_files, importer_of, recognise
        from trajreplay.schema.bundles.archive import unpacked
        from trajreplay.schema.lakefile import create_lake
        from trajreplay.schema.layout import LAKE_FILE

        with ExitStack() as opened:
            found = [opened.enter_context(unpacked(Path(one))) for one in paths]
            if len(found) == 1 and (found[0] / LAKE_FILE).is_file():
                yield cls.open(found[0])
                return
            importer = importer_of(kind) if kind else recognise(found)
            folder = tempfile.TemporaryDirectory(prefix="trajreplay-files-")
            store = create_lake(opened.enter_context(folder), exist_ok=True)
            report = import_files(store, importer, found, options, progress=progress)
            yield cls(store, report)

    def capture(
        self,
        *,
        run_id: str,
        rollout_id: int,
        step_id: int | None = None,
        rank: int,
        expected_ranks: Sequence[int],
        settings: Settings | RecomputeConfig,
        attempt: int = 0,
        producer: ProducerInfo | None = None,
        stages: Sequence[str | StageContract] = (),
        redaction: Mapping[str, str] | None = None,
        resumed_from: ResumePoint | tuple[int, int] | None = None,
        parallel: ParallelCoordinates | None = None,
        owner: bool | None = None,
        cohort_size: int | None = None,
        tolerances: Mapping[str, Tolerance] | None = None,
    ) -> CaptureBuilder:
        """Start what one rank captures of a rollout or, with `step_id`, of an optimizer step.

        Args:
            run_id: The training job, as people call it.
            rollout_id: Round of sampling, as the trainer counts.
            step_id: Optimizer step within its rollout; None for what is known before any step.
            rank: This process.
            expected_ranks: Every rank that captures its part of the same rollout or step.
            settings: The arithmetic in force, in full or in the short form.
            attempt: Restart of the job, 0 for the first.
            producer: The program that captures.
            stages: Stages that a replay can recompute from this capture, or contracts that say
                what else holds of them.
            redaction: What is kept of each text field: hash, truncate[:N] or drop (the default).
            resumed_from: For an attempt after the first, the attempt and rollout that it was
                resumed from: everything before that rollout is taken from there.
            parallel: Where this rank stands in each parallel dimension.
            owner: Whether its rows count; by default those of tensor rank 0 do, others are copies.
            cohort_size: Samples that the rollout or step had over all ranks, where known.
            tolerances: Stricter comparison than the policy's, by stage.

        Returns:
            A context manager. Leaving its block commits the capture; an exception in it leaves
            nothing visible.

        Raises:
            SchemaError: An id, coordinate, stage, setting or redaction rule is wrong.
            CaptureError: Another run has this id in other case, the attempt is recorded as resumed
                from elsewhere, or, on leaving the block, the capture cannot be committed.
        """
        from trajreplay.writer import CaptureBuilder

        return CaptureBuilder(
            self._store,
            run_id=run_id,
            rollout_id=rollout_id,
            step_id=step_id,
            rank=rank,
            expected_ranks=expected_ranks,
            settings=settings,
            attempt=attempt,
            producer=producer,
            stages=stages,
            redaction=redaction,
            resumed_from=resumed_from,
            parallel=parallel,
            owner=owner,
            cohort_size=cohort_size,
            tolerances=tolerances,
        )

    def import_files(
        self,
        kind: str,
        *paths: str | os.PathLike[str],
        options: ImportOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> ImportReport:
        """Import files that another tool left: each source whole, or refused by itself.

        Args:
            kind: What they are, such as `relax-bundle`.
            paths: Files and folders.
            options: What is said beside the files: the run, the attempt, what ids are local to.
            progress: Called with the sources done and all of them.

        Returns:
            What became of each source; `report.refused`, `report.to_json()`.

        Raises:
            CaptureError: There is no such kind, a path is not there, or nothing of the kind is
                at or below it.
        """
        from trajreplay.capture.importers import import_files, importer_of

        found = [Path(one) for one in paths]
        report = import_files(self._store, importer_of(kind), found, options, progress=progress)
        self.refresh()
        return report

    def export_bundles(
        self,
        folder: str | os.PathLike[str],
        where: str | None = None,
        *,
        run: str | None = None,
        attempt: int | None = None,
        rollouts: Sequence[int] = (),
        steps: Sequence[tuple[int, int]] = (),
    ) -> list[Written]:
        """Write selected rollouts and steps as Relax replay bundles of format 1.0.0.

        Args:
            folder: Where each bundle gets a folder; made where it is missing. A name that ends in
                `.tar.zst` is written as that one file.
            where: One boolean SQL expression; a rollout or step with a row of it is taken whole.
            run: The run; all runs if omitted.
            attempt: Follow this attempt instead of the newest lineage.
            rollouts: Rollouts and their steps.
            steps: (rollout_id, step_id) pairs; excludes `rollouts`.

        Returns:
            The bundles, with what they cannot hold.

        Raises:
            QueryError: The selection is wrong or selects nothing.
            CaptureError: A bundle cannot hold it, or the folder is there already.
            DatasetError: A capture set is incomplete or damaged, or nothing can be written.
        """
        from trajreplay.query import Selection
        from trajreplay.query.exporting import selected_sets
        from trajreplay.query.records import read_record
        from trajreplay.schema.bundles.archive import written_to
        from trajreplay.schema.bundles.relax import write_bundle

        selection = Selection(
            where=where, run=run, attempt=attempt, rollouts=tuple(rollouts), steps=tuple(steps)
        )
        sets = selected_sets(self._catalog, selection)
        with written_to(Path(folder)) as target:
            return [
                write_bundle([read_record(self._store, entry) for entry in one.entries], target)
                for one in sets
            ]

    def export_lake(
        self,
        path: str | os.PathLike[str],
        where: str | None = None,
        *,
        run: str | None = None,
        attempt: int | None = None,
        rollouts: Sequence[int] = (),
        steps: Sequence[tuple[int, int]] = (),
        redaction: Mapping[str, str] | None = None,
    ) -> ValidationReport:
        """Copy selected rollouts and steps into a new lake, and validate it.

        Steps bring the rollouts that they consumed from. Every column keeps its digest.

        Args:
            path: The new lake; a name that ends in `.tar.zst` is written as that one file.
            where: One boolean SQL expression; a rollout or step with a row of it is taken whole.
            run: The run; all runs if omitted.
            attempt: Follow this attempt instead of the newest lineage.
            rollouts: Rollouts and their steps.
            steps: (rollout_id, step_id) pairs; excludes `rollouts`.
            redaction: Stricter rules by text field: `truncate:N` to fewer, `hash` or `drop`.

        Returns:
            What the validation of the new lake found.

        Raises:
            QueryError: The selection is wrong or selects nothing.
            CaptureError: A rule of `redaction` keeps more than the one in force.
            DatasetError: A capture set is incomplete or damaged, or the new lake is there already.
        """
        from trajreplay.query import Selection, validate
        from trajreplay.query.exporting import selected_entries
        from trajreplay.schema.bundles.archive import written_to
        from trajreplay.schema.lakefile import create_lake
        from trajreplay.writer.copying import copy_capture

        selection = Selection(
            where=where, run=run, attempt=attempt, rollouts=tuple(rollouts), steps=tuple(steps)
        )
        entries = list(selected_entries(self._catalog, selection))
        with written_to(Path(path), new=True) as target:
            store = create_lake(target)
            for entry in entries:
                copy_capture(self._store, store, entry, redaction)
            return validate(store, deep=True)

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
        self, *, deep: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> ValidationReport:
        """Check every file: format, integrity, safety, completeness, closure, redaction.

        Nothing is recomputed, and the lake is listed anew.

        Args:
            deep: Also decode the lists of numbers, and make the digest of each anew: whether the
                program that captured sealed what it wrote. And check of each cohort what no
                healthy training records: shifted columns, doubled ranks and the like.
            progress: Called with the captures done and all of them.

        Returns:
            The findings; `report.ok` is false where a replay would refuse something.
        """
        from trajreplay.query import validate

        report = validate(self._store, deep=deep, progress=progress)
        for one in self._refused:
            report.add("error", "import", one.path, one.problem)
        if deep and report.ok:  # the columns of what is broken are no evidence
            from trajreplay.query import Catalog
            from trajreplay.stages.deep import contract_findings

            for place, found in contract_findings(Catalog.open(self._store)):
                where = f" {found.sample_id}" if found.sample_id is not None else ""
                where += f" token {found.token}" if found.token is not None else ""
                report.add(found.severity, found.check, None, f"{place}{where}: {found.message}")
        return report

    def replay(
        self,
        where: str | None = None,
        *,
        run: str | None = None,
        attempt: int | None = None,
        rollouts: Sequence[int] = (),
        steps: Sequence[tuple[int, int]] = (),
        ranks: Sequence[int] = (),
        samples: Sequence[str] = (),
        groups: Sequence[str] = (),
        batches: Sequence[str] = (),
        stages: Sequence[str] = (),
        closure: Literal["group", "cohort"] = "group",
        allow_partial: bool = False,
        require_stages: bool = False,
        reward: RewardFunction | str | None = None,
        memory_bytes: int = 2 << 30,
        progress: Callable[[int, int], None] | None = None,
    ) -> Report:
        """Recompute the stages of the selected cohorts and name the first divergence.

        Args:
            where: One boolean SQL expression over the rows of `rollouts` and of `steps`.
            run: The run; all runs if omitted.
            attempt: Follow this attempt instead of the newest lineage.
            rollouts: Rollouts and their steps.
            steps: (rollout_id, step_id) pairs; excludes `rollouts`.
            ranks: Ranks that captured the samples.
            samples: Sample ids.
            groups: Group ids.
            batches: Micro-batch ids; needs `steps`.
            stages: Stages to recompute; all that are declared if empty.
            closure: Expand what is selected to whole groups, or to the whole cohort.
            allow_partial: Replay incomplete capture sets as far as they go; never a pass.
            require_stages: Make every stage that was not compared unverified.
            reward: Recompute raw rewards with this function of one sample, or with that of this
                name: `module:function`, or an entry point of the group `trajreplay.rewards`.
            memory_bytes: What samples in memory may take.
            progress: Called with the capture sets done and all of them.

        Returns:
            The report; `report.verdict`, `report.first_divergent_stage`, `report.to_json()`.

        Raises:
            QueryError: The selection is wrong or selects nothing.
            StageError: There is no reward function of that name.
            DatasetError: The lake cannot be listed.
        """
        from trajreplay.query import Selection
        from trajreplay.stages import Report, replay
        from trajreplay.stages.plugins import as_reward

        refused = {one.path: one.problem for one in self._refused}
        if refused and not self._catalog.keys:
            return Report([], refused)
        selection = Selection(
            where=where,
            run=run,
            attempt=attempt,
            rollouts=tuple(rollouts),
            steps=tuple(steps),
            ranks=tuple(ranks),
            samples=tuple(samples),
            groups=tuple(groups),
            batches=tuple(batches),
            stages=tuple(stages),
            closure=closure,
            allow_partial=allow_partial,
        )
        report = replay(
            self._catalog,
            selection,
            require_stages=require_stages,
            reward=as_reward(reward),
            memory_bytes=memory_bytes,
            progress=progress,
        )
        report.refused = refused
        return report

    def explain(
        self,
        where: str | None = None,
        *,
        run: str | None = None,
        attempt: int | None = None,
        rollouts: Sequence[int] = (),
        steps: Sequence[tuple[int, int]] = (),
        ranks: Sequence[int] = (),
        samples: Sequence[str] = (),
        groups: Sequence[str] = (),
        batches: Sequence[str] = (),
        stages: Sequence[str] = (),
        closure: Literal["group", "cohort"] = "group",
        allow_partial: bool = False,
        require_stages: bool = False,
        reward: RewardFunction | str | None = None,
        memory_bytes: int = 2 << 30,
        progress: Callable[[int, int], None] | None = None,
    ) -> Explained:
        """Replay the selected cohorts, and search the known mistake behind each divergence.

        Takes what `replay` takes. Each stage that diverged on its own is recomputed, over its
        whole cohort, under every fault of the catalogue, and under pairs of them where none
        reproduces what was recorded.

        Returns:
            The replay's report and the explanations; `.explanations[0].text`, `.to_json()`.

        Raises:
            QueryError: The selection is wrong or selects nothing.
            StageError: A reward function, or a fault of an installed package, cannot be loaded.
            DatasetError: The lake cannot be listed.
        """
        from trajreplay.query import Selection
        from trajreplay.stages.explain import explain
        from trajreplay.stages.plugins import as_reward

        selection = Selection(
            where=where,
            run=run,
            attempt=attempt,
            rollouts=tuple(rollouts),
            steps=tuple(steps),
            ranks=tuple(ranks),
            samples=tuple(samples),
            groups=tuple(groups),
            batches=tuple(batches),
            stages=tuple(stages),
            closure=closure,
            allow_partial=allow_partial,
        )
        return explain(
            self._catalog,
            selection,
            require_stages=require_stages,
            reward=as_reward(reward),
            memory_bytes=memory_bytes,
            progress=progress,
        )

    def what_if(
        self,
        changes: Mapping[str, Any],
        where: str | None = None,
        *,
        run: str | None = None,
        attempt: int | None = None,
        rollouts: Sequence[int] = (),
        steps: Sequence[tuple[int, int]] = (),
        ranks: Sequence[int] = (),
        samples: Sequence[str] = (),
        groups: Sequence[str] = (),
        batches: Sequence[str] = (),
        stages: Sequence[str] = (),
        memory_bytes: int = 2 << 30,
        progress: Callable[[int, int], None] | None = None,
    ) -> WhatIf:
        """Recompute cohorts under other settings than those in force, and say what changes.

        Each selected cohort is taken whole. Its stages are recomputed twice, each from what the
        stages before give, of a step also from what the rollouts give that it consumed from.

        Args:
            changes: The settings that are others, by `section.field`.
            where: One boolean SQL expression over the rows of `rollouts` and of `steps`.
            run: The run; all runs if omitted.
            attempt: Follow this attempt instead of the newest lineage.
            rollouts: Rollouts and their steps.
            steps: (rollout_id, step_id) pairs; excludes `rollouts`.
            ranks: Ranks that captured the samples.
            samples: Sample ids.
            groups: Group ids.
            batches: Micro-batch ids; needs `steps`.
            stages: Stages to report; all that are declared if empty.
            memory_bytes: What the samples of one cohort may take in memory.
            progress: Called with the cohorts done and all of them.

        Returns:
            By cohort, stage and field: how many values change, and the largest change.

        Raises:
            QueryError: Nothing is changed, or the selection is wrong or selects nothing.
            SchemaError: There is no such setting, or a value is of another kind.
            DatasetError: The lake cannot be listed.
        """
        from trajreplay.query import Selection
        from trajreplay.stages import what_if

        selection = Selection(
            where=where,
            run=run,
            attempt=attempt,
            rollouts=tuple(rollouts),
            steps=tuple(steps),
            ranks=tuple(ranks),
            samples=tuple(samples),
            groups=tuple(groups),
            batches=tuple(batches),
            stages=tuple(stages),
        )
        return what_if(
            self._catalog, selection, changes, memory_bytes=memory_bytes, progress=progress
        )

    def diff(
        self,
        left: str | None = None,
        right: str | None = None,
        *,
        attempts: tuple[int | None, int | None] = (None, None),
        other: Lake | None = None,
        atol: float = 0.0,
        rtol: float = 0.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> DiffReport:
        """Hold two runs, attempts or lakes against each other, sample by sample.

        Args:
            left: A run of this lake; may be left out where it has only one.
            right: The run to hold against it; the same one if omitted.
            attempts: The attempt of each that is followed, instead of the newest.
            other: The lake of `right`, where it is another.
            atol: |a - b| <= atol + rtol |b| counts as equal; equal bits are asked for by default.
            rtol: See `atol`.
            progress: Called with the cohorts done and all of them.

        Returns:
            The report; `report.first`, `report.fields`, `report.settings`, `report.arrow()`.

        Raises:
            QueryError: There is no such run or attempt, or nothing in common.
            DatasetError: A file is not what its entry says.
        """
        from trajreplay.query.differences import diff, side_of

        one = side_of(self._catalog, left, attempts[0])
        if right is None and other is None:
            right = one.run_id
        two = side_of((other or self)._catalog, right, attempts[1])
        return diff(one, two, atol=atol, rtol=rtol, progress=progress)

    def gate(
        self,
        policy: Policy | str | os.PathLike[str],
        run: str | None = None,
        attempts: Sequence[int] = (0,),
        *,
        command_exit: int | None = None,
        command_signal: int | None = None,
    ) -> GateVerdict:
        """Hold the attempts of a run that are named, and nothing else, against a policy.

        Args:
            policy: A policy, a TOML file of one, or the name of a preset: router-replay,
                replay-clean or mismatch-baseline.
            run: The run; may be left out where the lake has only one.
            attempts: One attempt, or a chain in its order; the last is judged.
            command_exit: Exit code of the command that ran the last attempt, where it is known.
            command_signal: The signal that killed it.

        Returns:
            The verdict: `verdict.verdict`, `verdict.certifies`, `verdict.checks`. What was not
            recorded fails its check; it is no error.

        Raises:
            QueryError: The policy is malformed, or no run or attempt is named.
        """
        from trajreplay.stages.gate import Policy, gate, load_gate_policy

        held = policy if isinstance(policy, Policy) else load_gate_policy(policy)
        return gate(
            self._catalog,
            held,
            self._catalog.only_run() if run is None else run,
            attempts,
            command_exit=command_exit,
            command_signal=command_signal,
        )

    def watch(
        self,
        run: str | None = None,
        *,
        attempt: int | None = None,
        seen: Iterable[Cohort] = (),
    ) -> Watch:
        """Follow a lake that is being written: every cohort is replayed once, when it is whole.

        Args:
            run: Only this run; it need not have begun.
            attempt: Only the lineage of this attempt.
            seen: Cohorts that were reported before, and are not again.

        Returns:
            `watch.poll()` gives the reports of cohorts that are new; `watch.done(report)` notes
            that one was handed on.
        """
        from trajreplay.stages.watch import Watch

        return Watch(self._store, run, attempt, set(seen))

    def mismatch(
        self,
        where: str | None = None,
        *,
        runs: Sequence[str] = (),
        attempt: int | None = None,
        rollouts: Sequence[int] = (),
        steps: Sequence[tuple[int, int]] = (),
        ranks: Sequence[int] = (),
        samples: Sequence[str] = (),
        groups: Sequence[str] = (),
        batches: Sequence[str] = (),
        allow_partial: bool = False,
        by: Sequence[str] = (),
        pair: str = "old_log_probs:rollout_log_probs",
        level: Literal["step", "rollout"] | None = None,
        thresholds: Sequence[float] = (0.5, 1.0),
        cap: float = 2.0,
        any_version: bool = False,
        memory_bytes: int = 2 << 30,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> MismatchReport:
        """Measure how far the trainer's log-probs are from the sampler's, run beside run.

        Args:
            where: One boolean SQL expression over the rows of `rollouts` and of `steps`.
            runs: The runs; the others are compared with the first. All of the lake if empty.
            attempt: Follow this attempt instead of the newest lineage.
            rollouts: Rollouts and their steps.
            steps: (rollout_id, step_id) pairs; excludes `rollouts`.
            ranks: Ranks that captured the samples.
            samples: Sample ids.
            groups: Group ids.
            batches: Micro-batch ids; needs `steps`.
            allow_partial: Read incomplete capture sets as far as they go.
            by: What the tokens of a run are grouped by: rollout, step, rank, weight_version,
                position or length, the last two in powers of two from 256 on.
            pair: The columns compared, `TRAINER:SAMPLER`.
            level: Whether steps, as consumed, or rollouts are read; by default steps, where they
                or their rollouts hold the pair.
            thresholds: Absolute differences beyond which tokens are counted, in nats.
            cap: Where importance ratios are truncated.
            any_version: Count tokens, too, that are known to be sampled by other weights than
                those that recomputed them.
            memory_bytes: What DuckDB may take before it spills.
            threads: Threads of DuckDB; no result depends on it.
            progress: Called with the capture sets read and all of them.

        Returns:
            `report.table`, one row a run and group; `report.comparison`; `report.findings`.

        Raises:
            QueryError: The selection is wrong, or holds no pair.
            DatasetError: One column is a copy of the other, or a file is not what its entry says.
        """
        from trajreplay.query import Selection, mismatch

        selection = Selection(
            where=where,
            attempt=attempt,
            rollouts=tuple(rollouts),
            steps=tuple(steps),
            ranks=tuple(ranks),
            samples=tuple(samples),
            groups=tuple(groups),
            batches=tuple(batches),
            allow_partial=allow_partial,
        )
        return mismatch(
            self._catalog,
            selection,
            runs=runs,
            by=by,
            pair=pair,
            level=level,
            thresholds=thresholds,
            cap=cap,
            any_version=any_version,
            memory_bytes=memory_bytes,
            threads=threads,
            progress=progress,
        )
