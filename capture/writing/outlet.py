"""Where a capture goes once it is ended: to the lake, or into the ring until something asks."""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from trajreplay.capture.reasons import reason_of
from trajreplay.capture.switching.switches import PREFIX, Switches
from trajreplay.capture.switching.triggers import TOLD_WITHIN, Watch
from trajreplay.capture.taking.heartbeat import Noted
from trajreplay.capture.taking.pending import Pending
from trajreplay.capture.taking.slots import Slots
from trajreplay.capture.writing.background import Background
from trajreplay.capture.writing.handoff import Account, Handoff
from trajreplay.capture.writing.promoter import Promoter
from trajreplay.capture.writing.ring import Ring
from trajreplay.schema.errors import listed
from trajreplay.schema.identity import ProducerInfo, make_key

Fate = Literal["written", "held", "none"]
_ROLLOUTS_HELD = 8  # whose consumer is not known yet


class Outlet:
    """Decides what is recorded at all, and hands over, holds and promotes.

    Args:
        switches: What is captured.
        identity: Arguments of `Lake.capture` that all captures share.

    Attributes:
        background: The thread that writes.
        slots: Memory for copies, which that thread makes ready.
    """

    def __init__(self, switches: Switches, identity: Mapping[str, Any]) -> None:
        self._switches, self._identity = switches, identity
        keep = switches.keep_last
        self._ring = Ring(keep, max(keep, _ROLLOUTS_HELD), switches.ring_bytes)
        # A flight recorder writes nothing of its own accord.
        chosen = switches.selection
        self._by_number = not keep or not chosen.is_everything
        self._all_written = not keep and chosen.is_everything  # nothing is held, nor looked for
        self._takes_steps = (identity["producer"] or ProducerInfo()).role == "train"
        self._saw_step = False
        self._watch = Watch(switches.triggers)
        self._resting: dict[str, int] = {}  # steps until each trigger may fire again
        self._promoter: Promoter | None = None
        atexit.register(self._close_promoter, switches.close_s)  # after that of the background
        self.slots = Slots(switches.queue_bytes, switches.device_bytes)
        self.background = Background(
            switches.spool or switches.lake,
            queue_bytes=switches.queue_bytes,
            wait_s=switches.wait_s,
            close_s=switches.close_s,
            ring_bytes=switches.ring_bytes,
            strict=switches.strict,
            make_ready=self.slots.make_ready,
            written=lambda: self._promoter.written() if self._promoter else None,
        )
        if switches.spool:
            mine = switches.run_id, identity["attempt"], identity["rank"]
            self._promoter = Promoter(switches.spool, switches.lake, mine, self._unpromoted)
        self._unwatch: Callable[[], None] = lambda: None

    def watch(self, hand_over: Callable[[], None]) -> None:
        """Promote on a signal or an exception that ends the program, where steps are held.

        Args:
            hand_over: Hands over what waits elsewhere, before a signal ends the program.
        """

        def flush() -> None:
            hand_over()
            self.background.flush(self._switches.close_s)

        if self.holds_steps:
            told = functools.partial(self.background.warn, "triggers")
            self._unwatch = self._switches.triggers.install(self.promote, flush, told)

    def fate(self, rollout_id: int, step_id: int | None) -> Fate:
        """What becomes of a capture: it is written, held, or not recorded at all."""
        if self._all_written:
            return "written"
        chosen = self._switches.selection
        if step_id is None:
            wanted, held = chosen.wants_rollout(rollout_id), chosen.by_consumer
            if held and not self._takes_steps:  # no consumer will ever be known here
                wanted, held = chosen.wants_step_of(rollout_id), False
        else:
            self._saw_step = True
            wanted, held = chosen.wants_step(rollout_id, step_id), False
        if wanted and self._by_number:
            return "written"
        return "held" if held or self._switches.keep_last else "none"

    def limit_bytes(self, fate: Fate) -> int:
        """Most that the copies of one capture may take while it is recorded."""
        return self._switches.ring_bytes if fate == "held" else self._switches.queue_bytes

    def take(self, pending: Pending) -> None:
        """Take over a capture that is ended; one whose sources cannot be told is noted."""
        place = {"rollout_id": pending.rollout_id, "step_id": pending.step_id}
        consumes = pending.step_id is not None and not self._all_written
        sources: tuple[int, ...] = ()
        try:
            sources = tuple(sorted(pending.sources)) if consumes else ()
        except Exception as error:
            pending.fail(f"source_rollout_id: {reason_of(error)}")
            self._hand_over(pending, place, ())
            if self._switches.strict:
                raise
            self.background.warn("sources", f"{pending} was dropped: source_rollout_id: {error}")
            return
        self._hand_over(pending, place, sources)

    def _hand_over(
        self, pending: Pending, place: Mapping[str, Any], sources: tuple[int, ...]
    ) -> None:
        handoff = Handoff({**self._identity, **pending.options, **place}, pending, sources=sources)
        if pending.problems:
            handoff = handoff.given_up(listed(pending.problems, 5))
        if pending.held:  # though it be given up: nobody asked for it, nor for its rollouts
            for one, reason in self._ring.add(handoff):
                self.background.warn("ring", f"{one} is only noted: {reason}")
            return
        self._put([handoff])
        if sources:
            self._put(self._ring.take(sources), "ring")

    @property
    def holds_steps(self) -> bool:
        """Whether the last steps are held, and their scalars looked at."""
        return bool(self._switches.keep_last)

    def check(self, step: str, scalars: Mapping[str, Sequence[Any]]) -> None:
        """Promote what is held if the scalars of a step are out of bounds, once they are there."""
        self._watch.add(step, scalars)
        self.look()
        if untold := self._watch.untold():
            names = listed(untold)
            self.background.warn(
                "untold",
                f"a trigger looks at {names}, and the first {TOLD_WITHIN} steps told no such "
                f"number, so that it never fires; tell it: end_step({untold[0]}=...), or with the "
                "scalars of a loss",
            )

    def look(self) -> None:
        """Promote what is held if scalars that are there by now are out of bounds."""
        for step, fired in self._watch.look():
            self._resting = {one: left - 1 for one, left in self._resting.items() if left}
            awake = [one for one in fired if one not in self._resting]
            if awake:
                self._resting |= dict.fromkeys(awake, self._switches.keep_last)
                self.promote(f"{step}: {'; '.join(fired[one] for one in awake)}")

    def promote(self, reason: str) -> None:
        """Write all that is held, each with the reason as its producer's `trigger`."""
        told = []
        for one in self._ring.take_all():
            producer = one.identity["producer"] or ProducerInfo()
            producer = replace(producer, extra={**producer.extra, "trigger": reason})
            told.append(replace(one, identity={**one.identity, "producer": producer}))
        self._put(told, "ring")

    def crashed(self, reason: str) -> None:
        """Promote what is held if a training that does not end as it should is a trigger."""
        if self.holds_steps and self._switches.triggers.on_exception:
            self.promote(reason)

    def _put(self, handoffs: Iterable[Handoff], account: Account = "queue") -> None:
        for one in handoffs:
            if reason := self.background.put(one, account):
                self.background.warn("queue", f"{one} was dropped: {reason}")
        # In a test, what goes wrong in the other thread is raised in this one.
        if self._switches.strict and threading.current_thread() is threading.main_thread():
            self.background.flush()
            if self.background.errors:
                raise self.background.errors.pop()

    def take_events(
        self, rollout_id: int | None, step_id: int | None, events: Sequence[Noted]
    ) -> None:
        """Take over events that are named after the first step of theirs."""
        mine = self._identity
        run_id, attempt, rank = (mine[name] for name in ("run_id", "attempt", "rank"))
        key = make_key(run_id, attempt, "events", rollout_id, step_id, rank)
        identity = {
            "key": key,
            "expected_ranks": mine["expected_ranks"],
            "producer": mine["producer"],
        }
        self._put([Handoff(identity, None, events=tuple(events))])

    def close(self, timeout_s: float | None) -> bool:
        """Let go of what is held, and write the rest."""
        self._unwatch()
        left_s = self._switches.close_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + left_s
        self._watch.wait(left_s)
        self.look()
        held = self._ring.clear()
        if held and self._switches.selection.by_consumer and not self._saw_step:
            self.background.warn(
                "unconsumed",
                f"{held} rollouts waited for a step that consumes from them, and no step was "
                f"recorded here; choose them by number: {PREFIX}_ROLLOUTS",
            )
        done = self.background.close(max(0.0, deadline - time.monotonic()))
        if not done:
            lake = self._switches.spool or self._switches.lake
            self.background.warn(
                "left",
                f"{lake} lacks what was captured, and entries that say so: it failed before, or "
                f"was not written in the {left_s:g} s that {PREFIX}_CLOSE_S leaves for it",
            )
        return self._close_promoter(left_s) and done

    def _close_promoter(self, timeout_s: float) -> bool:
        """Promote what is left in the time that the thread that writes left of it."""
        atexit.unregister(self._close_promoter)
        promoter, self._promoter = self._promoter, None
        return promoter is None or promoter.close(max(0.0, timeout_s - self.background.closing_s))

    def _unpromoted(self, error: Exception) -> None:
        self.background.keep(error)
        kind = f"spool {type(error).__name__}"
        self.background.warn(kind, f"a capture stays in the spool: {error}")
