"""The last rollouts and steps, held in memory until something asks for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from trajreplay.capture.writing.handoff import Handoff

_GONE = "it was no longer held when a step that consumed from it was captured"
_TWICE = "it was recorded twice, and neither block has all of its samples; record it in one"
_NOTED = 8  # rollouts that are noted as gone, for each that may be held


class Ring:
    """Captures that nobody asked for yet, the newest ones, bounded in number and bytes.

    A step's rollouts leave with it: when the oldest step goes, so do rollouts that only it, or no
    step that is held, consumed from. What is new enough and does not fit leaves a note in its
    place, without its data, that says so.

    Args:
        steps: Steps that are held.
        rollouts: Rollouts that are held while no step that is held consumed from them.
        limit_bytes: Most that all of it takes.
    """

    def __init__(self, steps: int, rollouts: int, limit_bytes: int) -> None:
        self._steps_kept, self._rollouts_kept = steps, rollouts
        self._limit_bytes = limit_bytes
        self._steps: list[Handoff] = []
        self._rollouts: list[Handoff] = []
        self._gone: list[Handoff] = []  # rollouts, without their data
        self._lock = threading.Lock()

    def add(self, handoff: Handoff) -> list[tuple[Handoff, str]]:
        """Hold a capture, and let go of the oldest where there is no room.

        Returns:
            Captures that are only noted now, though they are new enough, and why.
        """
        with self._lock:
            if handoff.identity["step_id"] is not None:
                self._steps.append(handoff)
                lost = []
            else:
                lost = self._add_rollout(handoff)
            while len(self._steps) > self._steps_kept:
                self._steps.pop(0).release()
            while len(waiting := self._waiting()) > self._rollouts_kept:
                self._let_go(waiting[0], _GONE)
            return lost + self._fit()

    def take(self, rollouts: Iterable[int]) -> list[Handoff]:
        """Rollouts that a captured step consumed from, in order; one that is gone says why."""
        with self._lock:
            found = []
            for one in rollouts:
                found += self._pop(self._gone, {one}) + self._pop(self._rollouts, {one})
            return found

    def take_all(self) -> list[Handoff]:
        """Everything, rollouts before steps, those that are gone too; the ring is empty then."""
        with self._lock:
            consumed = {source for one in self._steps for source in one.sources}
            found = [*self._pop(self._gone, consumed), *self._rollouts, *self._steps]
            self._rollouts, self._steps = [], []
            return found

    def clear(self) -> int:
        """Let go of everything; returns how many captures that was."""
        found = self.take_all()
        for one in found:
            one.release()
        return len(found)

    def _add_rollout(self, handoff: Handoff) -> list[tuple[Handoff, str]]:
        """Hold a rollout; of two with data, nobody knows which is the whole one."""
        before = [one for one in self._rollouts if _number(one) == _number(handoff) and one.pending]
        self._rollouts.append(handoff)
        if not before or not handoff.pending:
            return []
        for one in before:
            self._rollouts.remove(one)
            one.release()
        self._rollouts[-1] = handoff.given_up(_TWICE)
        return [(handoff, _TWICE)]

    def _fit(self) -> list[tuple[Handoff, str]]:
        lost = []
        while (held := self._held_bytes()) > self._limit_bytes:
            one = self._least_wanted()
            reason = f"ring full: {held} bytes are held, expected {self._limit_bytes} at most"
            lost.append((one, reason))
            if one.identity["step_id"] is None:
                self._let_go(one, reason)
            else:
                self._steps[self._steps.index(one)] = one.given_up(reason)
        return lost

    def _least_wanted(self) -> Handoff:
        """What only steps that are noted consumed from; else the oldest step, else rollout."""
        useful = {source for one in self._steps if one.pending for source in one.sources}
        used = {source for one in self._steps for source in one.sources}
        rollouts = [one for one in self._rollouts if one.pending]
        spent = [one for one in rollouts if _number(one) in used - useful]
        return [*spent, *(one for one in self._steps if one.pending), *rollouts][0]

    def _held_bytes(self) -> int:
        return sum(one.held_bytes for one in (*self._rollouts, *self._steps))

    def _waiting(self) -> list[Handoff]:
        """Rollouts that no step that is held consumed from, oldest first."""
        consumed = {source for one in self._steps for source in one.sources}
        return [one for one in self._rollouts if _number(one) not in consumed]

    def _let_go(self, rollout: Handoff, reason: str) -> None:
        self._rollouts.remove(rollout)
        self._gone.append(rollout.given_up(reason))
        del self._gone[: -_NOTED * self._rollouts_kept]

    @staticmethod
    def _pop(held: list[Handoff], rollouts: set[int]) -> list[Handoff]:
        found = [one for one in held if _number(one) in rollouts]
        held[:] = [one for one in held if _number(one) not in rollouts]
        return found


def _number(handoff: Handoff) -> int:
    rollout_id: int = handoff.identity["rollout_id"]
    return rollout_id
