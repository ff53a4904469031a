"""The last rollouts and steps, held in memory until something asks for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from trajreplay.capture.background import Handoff


class Ring:
    """Captures that nobody asked for yet, the newest ones, bounded in number and bytes.

    A step's rollouts leave with it: when the oldest step goes, so do rollouts that only it, or no
    step that is held, consumed from.

    Args:
        steps: Steps that are held.
        rollouts: Rollouts that are held while no step that is held consumed from them.
        limit_bytes: Most that all of it takes.
    """

    def __init__(self, steps: int, rollouts: int, limit_bytes: int) -> None:
        self._steps_kept, self._rollouts_kept = steps, rollouts
        self._limit_bytes = limit_bytes
        self._steps: list[Handoff] = []
        self._rollouts: dict[int, Handoff] = {}
        self._evicted: dict[int, Handoff] = {}  # without their data
        self._lock = threading.Lock()

    def add(self, handoff: Handoff) -> None:
        """Hold a capture, and let go of the oldest where there is no room."""
        with self._lock:
            if handoff.identity["step_id"] is None:
                self._rollouts[handoff.identity["rollout_id"]] = handoff
            else:
                self._steps.append(handoff)
            while len(self._steps) > self._steps_kept:
                self._steps.pop(0).given_up("")
            while len(waiting := self._waiting()) > self._rollouts_kept:
                self._evict(waiting[0])
            while self._held_bytes() > self._limit_bytes and (self._steps or self._rollouts):
                if self._steps:
                    self._steps.pop(0).given_up("")
                else:
                    self._evict(next(iter(self._rollouts)))

    def take(self, rollouts: Iterable[int]) -> list[Handoff]:
        """Rollouts that a captured step consumed from, in order; one that is gone says why."""
        with self._lock:
            found = []
            for one in rollouts:
                if one in self._rollouts:
                    found.append(self._rollouts.pop(one))
                elif one in self._evicted:
                    found.append(self._evicted.pop(one))
            return found

    def take_all(self) -> list[Handoff]:
        """Everything, rollouts before steps, those that are gone too; the ring is empty then."""
        with self._lock:
            consumed = {source for one in self._steps for source in one.sources}
            gone = [self._evicted.pop(one) for one in sorted(consumed & self._evicted.keys())]
            found = [*gone, *self._rollouts.values(), *self._steps]
            self._rollouts, self._steps = {}, []
            return found

    def clear(self) -> None:
        """Let go of everything."""
        for one in self.take_all():
            one.given_up("")

    def _held_bytes(self) -> int:
        return sum(one.held_bytes for one in (*self._rollouts.values(), *self._steps))

    def _waiting(self) -> list[int]:
        """Rollouts that no step that is held consumed from, oldest first."""
        consumed = {source for one in self._steps for source in one.sources}
        return [one for one in self._rollouts if one not in consumed]

    def _evict(self, rollout_id: int) -> None:
        reason = "it was no longer held when a step that consumed from it was captured"
        self._evicted[rollout_id] = self._rollouts.pop(rollout_id).given_up(reason)
        for old in list(self._evicted)[: -8 * self._rollouts_kept]:
            del self._evicted[old]
