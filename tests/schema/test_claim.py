"""Claims under every order of the system calls of several writers."""

import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.schema import claim
from trajreplay.schema.publish import write_synced

NAMES = ("open", "close", "stat", "utime", "rename", "unlink")


class Turns:
    """Lets one thread at a time make one system call, in the order of a schedule, then by turns."""

    def __init__(self, schedule: Sequence[int], threads: int) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[int, bool] = {}
        self._alive = threads
        self._schedule = list(schedule)
        self._calls = 0

    def enter(self) -> None:
        """Wait for the turn of this thread."""
        mine = threading.get_ident()
        with self._changed:
            self._waiting[mine] = False
            self._choose()
            assert self._changed.wait_for(lambda: self._waiting[mine], 30)
            del self._waiting[mine]

    def leave(self) -> None:
        """Make no more calls in this thread."""
        with self._changed:
            self._alive -= 1
            self._choose()

    def _choose(self) -> None:
        if not self._waiting or len(self._waiting) < self._alive or any(self._waiting.values()):
            return
        self._calls += 1
        assert self._calls < 5_000, "the writers wait for each other"
        place = self._schedule.pop(0) if self._schedule else self._calls
        threads = sorted(self._waiting)
        self._waiting[threads[place % len(threads)]] = True
        self._changed.notify_all()


def scheduled(turns: Turns) -> Any:
    """`os` with every call of a claim made in turn."""

    def in_turn(call: Any) -> Any:
        def made(*args: Any) -> Any:
            turns.enter()
            return call(*args)

        return made

    return SimpleNamespace(
        **{name: in_turn(getattr(os, name)) for name in NAMES},
        **{name: getattr(os, name) for name in dir(os) if name.startswith("O_")},
        path=SimpleNamespace(lexists=in_turn(os.path.lexists)),
    )


def raced(folder: str, schedule: Sequence[int], writers: int, dead: int) -> list[bool]:
    """Writers of one name, beside claims that dead writers left, one taken over from another."""
    target = f"{folder}/a"
    left = target + claim.CLAIM_SUFFIX
    for _ in range(dead):
        Path(left).touch()
        os.utime(left, (0, 0))
        left = str(claim._named(target, left))
    turns = Turns(schedule, writers)
    won = [False] * writers

    def write(number: int) -> None:
        try:
            temporary = f"{folder}/tmp-{number}"
            write_synced(temporary, b"%d" % number)
            won[number] = claim.place_under_claim(temporary, target)
        finally:
            turns.leave()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(claim, "os", scheduled(turns))
        patched.setattr(claim, "time", SimpleNamespace(sleep=lambda _: None))
        threads = [threading.Thread(target=write, args=(one,)) for one in range(writers)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    return won


@given(
    schedule=st.lists(st.integers(0, 5), max_size=80),
    writers=st.integers(1, 3),
    dead=st.integers(0, 2),
)
def test_one_writer_wins_whatever_the_order(schedule: list[int], writers: int, dead: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        won = raced(folder, schedule, writers, dead)
        assert sum(won) == 1
        assert Path(folder, "a").read_bytes() == b"%d" % won.index(True)
        assert not list(Path(folder).glob(f"*{claim.CLAIM_SUFFIX}"))
