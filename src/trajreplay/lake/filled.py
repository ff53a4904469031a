"""What goes into a lake and comes out of one: captures, what a spool holds, exports."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from trajreplay.lake.opened import Opened

if TYPE_CHECKING:
    from trajreplay.query import ValidationReport
    from trajreplay.query.selecting.conditions import CohortNames
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
    from trajreplay.writer import CaptureBuilder, Promoted


class Filled(Opened):
    """A lake that captures go into and come out of."""

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

    def promote(self, spool: str | os.PathLike[str], *, wait_s: float = 10.0) -> Promoted:
        """Bring what a training left in its spool into this lake.

        Args:
            spool: The folder that `TRAJREPLAY_CAPTURE_SPOOL` was set to.
            wait_s: How long to wait for a training that is doing so.

        Returns:
            What was done, and what stays in the spool, and why.

        Raises:
            CaptureError: It is no spool, or another process is at it for all that time.
        """
        from trajreplay.capture.writing.spool import promoted

        return promoted(os.fspath(spool), self.path, wait_s=wait_s)

    def export_bundles(
        self,
        folder: str | os.PathLike[str],
        where: str | None = None,
        **selecting: Unpack[CohortNames],
    ) -> list[Written]:
        """Write selected rollouts and steps as Relax replay bundles of format 1.0.0.

        Args:
            folder: Where each bundle gets a folder; made where it is missing. A name that ends in
                `.tar.zst` is written as that one file.
            where: One boolean SQL expression; a rollout or step with a row of it is taken whole.
            selecting: As of `trajreplay.query.Selection`: `run`, `attempt`, `rollouts`, `steps`.

        Returns:
            The bundles, with what they cannot hold.

        Raises:
            QueryError: The selection is wrong or selects nothing.
            CaptureError: A bundle cannot hold it, the folder is there already, or files that this
                lake was made for were refused.
            DatasetError: A capture set is incomplete or damaged, or nothing can be written.
        """
        from trajreplay.query import Selection
        from trajreplay.query.files.records import read_record
        from trajreplay.query.selecting.exporting import selected_sets
        from trajreplay.schema.bundles.archive import written_to
        from trajreplay.schema.bundles.relax import write_bundle

        selection = Selection.of(where, selecting)
        sets = selected_sets(self._whole_catalog, selection)
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
        redaction: Mapping[str, str] | None = None,
        **selecting: Unpack[CohortNames],
    ) -> ValidationReport:
        """Copy selected rollouts and steps into a new lake, and validate it.

        Steps bring the rollouts that they consumed from. Every column keeps its digest.

        Args:
            path: The new lake; a name that ends in `.tar.zst` is written as that one file.
            where: One boolean SQL expression; a rollout or step with a row of it is taken whole.
            redaction: Stricter rules by text field: `truncate:N` to fewer, `hash` or `drop`.
            selecting: As of `trajreplay.query.Selection`: `run`, `attempt`, `rollouts`, `steps`.

        Returns:
            What the validation of the new lake found.

        Raises:
            QueryError: The selection is wrong or selects nothing.
            CaptureError: A rule of `redaction` keeps more than the one in force, or files that this
                lake was made for were refused.
            DatasetError: A capture set is incomplete or damaged, or the new lake is there already.
        """
        from trajreplay.query import Selection, validate
        from trajreplay.query.selecting.exporting import selected_entries
        from trajreplay.schema.bundles.archive import written_to
        from trajreplay.schema.lakefile import create_lake
        from trajreplay.writer.copying import copy_capture

        selection = Selection.of(where, selecting)
        entries = list(selected_entries(self._whole_catalog, selection))
        with written_to(Path(path), new=True) as target:
            store = create_lake(target)
            for entry in entries:
                copy_capture(self._store, store, entry, redaction)
            return validate(store, deep=True)
