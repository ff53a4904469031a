"""Runs of a lake held against each other, and train against rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Unpack

from trajreplay.lake.opened import Opened

if TYPE_CHECKING:
    from trajreplay.query import MismatchReport
    from trajreplay.query.differences import DiffReport
    from trajreplay.query.experts import AgreementReport
    from trajreplay.query.selecting.conditions import PairedSamples


class Compared(Opened):
    """A lake whose runs are compared."""

    def diff(
        self,
        left: str | None = None,
        right: str | None = None,
        *,
        attempts: tuple[int | None, int | None] = (None, None),
        other: Opened | None = None,
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
            CaptureError: Files that this lake was made for were refused.
        """
        from trajreplay.query.differences import diff, side_of

        one = side_of(self._whole_catalog, left, attempts[0])
        if right is None and other is None:
            right = one.run_id
        two = side_of((other or self)._whole_catalog, right, attempts[1])
        return diff(one, two, atol=atol, rtol=rtol, progress=progress)

    def mismatch(
        self,
        where: str | None = None,
        *,
        by: Sequence[str] = (),
        level: Literal["step", "rollout"] | None = None,
        thresholds: Sequence[float] = (0.5, 1.0),
        cap: float = 2.0,
        **asked: Unpack[PairedSamples],
    ) -> MismatchReport:
        """Measure how far the trainer's log-probs are from the sampler's, run beside run.

        Args:
            where: One boolean SQL expression over the rows of `rollouts` and of `steps`.
            by: What the tokens of a run are grouped by: rollout, step, rank, weight_version,
                position or length, the last two in powers of two from 256 on.
            level: Whether steps, as consumed, or rollouts are read; by default steps, where they
                or their rollouts hold the pair.
            thresholds: Absolute differences beyond which tokens are counted, in nats.
            cap: Where importance ratios are truncated.
            asked: `runs`, the others compared with the first, all of the lake if empty; `pair`,
                `TRAINER:SAMPLER`, by default old_log_probs:rollout_log_probs; `any_version` to
                count tokens of other weights, too; `memory_bytes` and `threads` of DuckDB;
                `progress`, called with the capture sets read and all of them. And as of
                `trajreplay.query.Selection`: `attempt`, `rollouts`, `steps`, `ranks`, `samples`,
                `groups`, `batches`, `allow_partial`.

        Returns:
            `report.table`, one row a run and group; `report.comparison`; `report.findings`.

        Raises:
            QueryError: The selection is wrong, or holds no pair.
            DatasetError: One column is a copy of the other, or a file is not what its entry says.
            CaptureError: Files that this lake was made for were refused.
        """
        from trajreplay.query import Selection, mismatch
        from trajreplay.query.selecting.conditions import parted

        selecting, paired = parted(asked)
        return mismatch(
            self._whole_catalog,
            Selection.of(where, selecting),
            by=by,
            level=level,
            thresholds=thresholds,
            cap=cap,
            **paired,
        )

    def route_agreement(
        self, where: str | None = None, *, threshold: float = 0.5, **asked: Unpack[PairedSamples]
    ) -> AgreementReport:
        """Hold the experts that the sampler chose against the trainer's, layer by layer.

        Args:
            where: One boolean SQL expression over the rows of `rollouts` and of `steps`.
            threshold: Absolute difference beyond which tokens are counted, in nats.
            asked: As of `mismatch`; with the pair of log-probs go the choices of the same forward
                pass: `rollout_experts`, `old_experts`, `experts`.

        Returns:
            `report.table`, one row a layer of a run, and one over all layers; `report.findings`.

        Raises:
            QueryError: The selection is wrong, or holds nothing to compare.
            DatasetError: One column is a copy of the other, or a file is not what its entry says.
            CaptureError: Files that this lake was made for were refused.
        """
        from trajreplay.query import Selection
        from trajreplay.query.experts import route_agreement
        from trajreplay.query.selecting.conditions import parted

        selecting, paired = parted(asked)
        selection = Selection.of(where, selecting)
        return route_agreement(self._whole_catalog, selection, threshold=threshold, **paired)
