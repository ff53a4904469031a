"""What a lake says of a training: replays, explanations, other settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from trajreplay.lake.opened import Opened

if TYPE_CHECKING:
    from trajreplay.query.selecting.conditions import SampleNames, Selecting
    from trajreplay.stages import Report, RewardFunction, WhatIf
    from trajreplay.stages.explain import Explained


class Judged(Opened):
    """A lake that is held against its arithmetic.

    Each report names the files that were refused, and its verdict counts them.
    """

    @property
    def _is_refused(self) -> bool:
        """Whether there is nothing but files that were refused: no selection is then wrong."""
        return bool(self._refused) and not self._catalog.keys

    def replay(
        self,
        where: str | None = None,
        *,
        require_stages: bool = False,
        reward: RewardFunction | str | None = None,
        atol: float | None = None,
        rtol: float | None = None,
        exact: bool = False,
        memory_bytes: int = 2 << 30,
        progress: Callable[[int, int], None] | None = None,
        **selecting: Unpack[Selecting],
    ) -> Report:
        """Recompute the stages of the selected cohorts and name the first divergence.

        Args:
            where: One boolean SQL expression over the rows of `rollouts` and of `steps`.
            require_stages: Make every stage that was not compared unverified.
            reward: Recompute raw rewards with this function of one sample, or with that of this
                name: `module:function`, or an entry point of the group `trajreplay.rewards`.
            atol: |recorded - recomputed| <= atol + rtol |recomputed| passes, in the place of the
                policy's. What only a tolerance looser than the policy's accepts is precision.
            rtol: See `atol`.
            exact: Make everything precision that has not, bit for bit, what float32 arithmetic
                gives: token by token, rounded to the recorded dtype, and summed in order.
            memory_bytes: What samples in memory may take.
            progress: Called with the capture sets done and all of them.
            selecting: As of `trajreplay.query.Selection`: `run`, `attempt`, `rollouts`,
                `steps`, `ranks`, `samples`, `groups`, `batches`, `stages`, `closure` (`group` if
                omitted), and `allow_partial`, which is never a pass.

        Returns:
            The report; `report.verdict`, `report.first_divergent_stage`, `report.to_json()`.

        Raises:
            QueryError: The selection is wrong or selects nothing, or a tolerance is negative or not
                finite.
            StageError: There is no reward function of that name.
            DatasetError: The lake cannot be listed.
        """
        from trajreplay.query import Selection
        from trajreplay.schema.policy import Comparison
        from trajreplay.stages import Report, replay
        from trajreplay.stages.plugins import as_reward

        if self._is_refused:
            return Report([], self._refused)
        selection = Selection.of(where, {"closure": "group", **selecting})
        asked = Comparison(atol, rtol, exact)
        report = replay(
            self._catalog,
            selection,
            require_stages=require_stages,
            reward=as_reward(reward),
            comparison=None if asked == Comparison() else asked,
            memory_bytes=memory_bytes,
            progress=progress,
        )
        report.refused = self._refused
        return report

    def explain(
        self,
        where: str | None = None,
        *,
        require_stages: bool = False,
        reward: RewardFunction | str | None = None,
        memory_bytes: int = 2 << 30,
        progress: Callable[[int, int], None] | None = None,
        **selecting: Unpack[Selecting],
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
        from trajreplay.stages import Report
        from trajreplay.stages.explain import Explained, explain
        from trajreplay.stages.plugins import as_reward

        if self._is_refused:
            return Explained(Report([], self._refused))
        selection = Selection.of(where, {"closure": "group", **selecting})
        found = explain(
            self._catalog,
            selection,
            require_stages=require_stages,
            reward=as_reward(reward),
            memory_bytes=memory_bytes,
            progress=progress,
        )
        found.report.refused = self._refused
        return found

    def what_if(
        self,
        changes: Mapping[str, Any],
        where: str | None = None,
        *,
        run: str | None = None,
        stages: Sequence[str] = (),
        memory_bytes: int = 2 << 30,
        progress: Callable[[int, int], None] | None = None,
        **selecting: Unpack[SampleNames],
    ) -> WhatIf:
        """Recompute cohorts under other settings than those in force, and say what changes.

        Each selected cohort is taken whole. Its stages are recomputed twice, each from what the
        stages before give, of a step also from what the rollouts give that it consumed from.

        Args:
            changes: The settings that are others, by `section.field`.
            where: One boolean SQL expression over the rows of `rollouts` and of `steps`.
            run: The run; all runs if omitted.
            stages: Stages to report; all that are declared if empty.
            memory_bytes: What the samples of one cohort may take in memory.
            progress: Called with the cohorts done and all of them.
            selecting: As of `trajreplay.query.Selection`: `attempt`, `rollouts`, `steps`,
                `ranks`, `samples`, `groups`, `batches`.

        Returns:
            By cohort, stage and field: how many values change, and the largest change.

        Raises:
            QueryError: Nothing is changed, or the selection is wrong or selects nothing.
            SchemaError: There is no such setting, or a value is of another kind.
            DatasetError: The lake cannot be listed.
        """
        from trajreplay.query import Selection
        from trajreplay.stages import WhatIf, what_if

        if self._is_refused:
            return WhatIf(dict(changes), [], refused=self._refused)
        selection = Selection.of(where, selecting, run=run, stages=stages)
        found = what_if(
            self._catalog, selection, changes, memory_bytes=memory_bytes, progress=progress
        )
        found.refused = self._refused
        return found
