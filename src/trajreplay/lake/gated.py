"""A lake held against a policy, at once or as it is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from trajreplay.lake.opened import Opened

if TYPE_CHECKING:
    from trajreplay.query.manifest.catalog import Cohort
    from trajreplay.stages.gate import GateVerdict, Policy
    from trajreplay.stages.watch import Watch


class Gated(Opened):
    """A lake that is held against policies."""

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
            QueryError: The policy is malformed, or no run or attempt is named, or one that the lake
                has no record of.
            CaptureError: Files that this lake was made for were refused.
        """
        from trajreplay.stages.gate import Policy, gate, load_gate_policy

        held = policy if isinstance(policy, Policy) else load_gate_policy(policy)
        catalog = self._whole_catalog
        run = catalog.only_run() if run is None else run
        catalog.check_attempts(run, attempts)
        return gate(
            catalog,
            held,
            run,
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
        policy: Policy | str | os.PathLike[str] | None = None,
        wait: int | None = None,
    ) -> Watch:
        """Follow a lake that is being written: every cohort is replayed once, when it is whole.

        Args:
            run: Only this run; it need not have begun.
            attempt: Only the lineage of this attempt.
            seen: Cohorts that were reported before, and are not again.
            policy: What every cohort is held against as it completes: a policy, a TOML file of one,
                or the name of a preset.
            wait: Looks for which a step waits for a rollout that it consumed and of which
                nothing is there; 3 if None.

        Returns:
            `watch.poll()` gives the reports of cohorts that are new, `watch.gate(report)` what the
            policy's checks say of one; `watch.done(report)` notes that it was handed on.

        Raises:
            QueryError: The policy is malformed, or demands nothing of a single cohort.
            CaptureError: Files that this lake was made for were refused.
        """
        from trajreplay.stages.gate import Policy, load_gate_policy
        from trajreplay.stages.watch import WAIT, Watch

        self._refuse_refused()
        held = None
        if policy is not None:
            held = policy if isinstance(policy, Policy) else load_gate_policy(policy)
        looks = WAIT if wait is None else wait
        return Watch(self._store, run, attempt, set(seen), policy=held, wait=looks)
