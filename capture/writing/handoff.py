"""A capture on its way from the training to the lake, with its data or only as a note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trajreplay.capture.taking.heartbeat import Noted
    from trajreplay.capture.taking.pending import Pending

Account = Literal["queue", "ring"]


@dataclass(slots=True, eq=False)
class Handoff:
    """A capture on its way to the lake.

    Args:
        identity: Arguments of `Lake.capture`.
        pending: What was recorded; None once it is given up.
        reason: Why it is given up.
        sources: Rollouts that its samples come from, where it is a step and they may be held.
        events: Instead of a capture of samples, events; identity then has arguments of
            `commit_events`.
    """

    identity: Mapping[str, Any]
    pending: Pending | None
    reason: str = ""
    sources: Sequence[int] = ()
    events: Sequence[Noted] = ()

    def __str__(self) -> str:
        if self.events:
            return f"{len(self.events)} events"
        rollout_id, step_id = self.identity["rollout_id"], self.identity["step_id"]
        return f"rollout {rollout_id}" + ("" if step_id is None else f" step {step_id}")

    @property
    def held_bytes(self) -> int:
        """Memory that waits to be written."""
        return 0 if self.pending is None else self.pending.held_bytes

    def given_up(self, reason: str) -> Handoff:
        """The same capture without its data, to be noted in the lake."""
        if self.pending is None:  # given up before, for a reason of its own, or events
            return self
        self.release()
        samples = self.pending.samples
        lost = f"; of it {samples} samples are lost" if samples else ""
        return replace(self, pending=None, reason=f"{reason}{lost}")

    def release(self) -> None:
        """Let go of its memory; nothing of it is written any more."""
        if self.pending is not None:
            self.pending.copier.release()
