"""The recorder of a training that is captured."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trajreplay.capture.guarded import Level, guarded
from trajreplay.capture.opened import Opened, Stages
from trajreplay.capture.reasons import reason_of
from trajreplay.capture.taking.heartbeat import Heartbeats, problem_of_end
from trajreplay.capture.writing.outlet import Outlet
from trajreplay.schema.errors import bare, is_name, named

if TYPE_CHECKING:
    from trajreplay.capture.switching.ranks import Place
    from trajreplay.capture.switching.switches import Switches
    from trajreplay.schema import RecomputeConfig, Settings


class LiveRecorder(Opened):
    """Records; see `Recorder`.

    Args:
        switches: What is captured.
        place: What the ranks agreed on.
        settings: The arithmetic in force, unless a rollout or step says otherwise.
        rollout_stages, step_stages: Stages that can be recomputed.
        identity: Further arguments of `Lake.capture` that all captures share.
    """

    def __init__(
        self,
        switches: Switches,
        place: Place,
        *,
        settings: Settings | RecomputeConfig | None,
        rollout_stages: Stages,
        step_stages: Stages,
        identity: Mapping[str, Any],
    ) -> None:
        self.attempt = place.attempt
        outlet = Outlet(
            switches,
            {
                **identity,
                "run_id": switches.run_id,
                "attempt": place.attempt,
                "rank": place.rank,
                "expected_ranks": place.expected_ranks,
                "resumed_from": place.resumed_from,
                "redaction": switches.redaction,
            },
        )
        stages: Mapping[Level, Stages] = {"rollout": rollout_stages, "step": step_stages}
        heartbeats = Heartbeats(outlet.take_events, counts=place.resumed_from is None)
        super().__init__(switches, outlet, heartbeats, settings, stages)
        outlet.watch(heartbeats.flush)
        self._closed = False
        self._handled = sys.exc_info()[1]  # a training that is tried again begins in a handler
        atexit.register(self._at_exit)  # after that of the outlet, so that it is called before

    @guarded
    def drop(self, reason: str) -> None:
        """As of `Recorder`."""
        self._drop(self._word("drop", reason))

    def _drop(self, reason: str) -> None:
        opened = dict(self._open)
        self._given_up |= opened.keys()
        self._open.clear()
        for pending in opened.values():
            if pending is not None:
                with self.guard("drop"):
                    try:
                        pending.fail(reason)
                    finally:
                        self._outlet.take(pending)

    @guarded
    def promote(self, reason: str) -> None:
        """As of `Recorder`."""
        self._outlet.promote(self._word("promote", reason))

    def _word(self, call: str, reason: str) -> str:
        """A reason that a trainer gives; no text is kept, and what is given up still is."""
        if is_name(reason):
            return reason
        told = f"{call} was called with {named(reason)}"
        self._outlet.background.warn(
            call, f"{told} for a reason, which is not kept; give a word, such as loss-spike"
        )
        return told

    @guarded
    def interrupted(self, level: Level, error: BaseException) -> None:
        """As of `Guarded`."""
        if level == "step":
            self._beat = None  # it was not taken, or nobody knows whether it was
        reason = f"the {level} ended with {reason_of(error)}"
        self._drop(reason)
        self._given_up.discard(level)
        self._outlet.crashed(reason)

    def failed(self, where: str, error: Exception) -> None:
        """Give up what was being recorded, and warn once; raise where that is asked for."""
        reason = reason_of(error)
        for pending in self._open.values():
            if pending is not None:
                pending.fail(f"{bare(where)}: {reason}")
        self._tell(where, error)

    def flush(self, timeout_s: float | None = None) -> bool:
        """As of `Recorder`."""
        with self.guard("flush"):
            return self._outlet.background.flush(timeout_s)
        return False

    def close(self, timeout_s: float | None = None) -> bool:
        """As of `Recorder`."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._at_exit)
            problem = problem_of_end(self._handled, list(self._open))
            self._drop("recording was closed before it ended")
            with self.guard("close"):
                if problem:
                    self._outlet.crashed(problem)
                self._heartbeats.end(problem)
        return self._close(timeout_s)

    def _close(self, timeout_s: float | None) -> bool:
        with self.guard("close"):
            return self._outlet.close(timeout_s)
        return False

    def retire(self) -> None:
        """As of `Recorder`."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._at_exit)
            self._give_up("another recorder took its place before it ended")
            self._close(None)

    def _at_exit(self) -> None:
        """The program ends, and nobody said how the training did."""
        self._give_up("the program ended before it did")
        with self.guard("end"):
            self._outlet.crashed("the program ended before recording was closed")

    def _give_up(self, reason: str) -> None:
        """Drop what is open, and write the heartbeats; no clean end is noted."""
        self._drop(reason)
        with self.guard("end"):
            self._heartbeats.flush()
