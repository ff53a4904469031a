"""A program of its own that writes captures: to be killed, or 64 at once. It loads no torch."""

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count

import numpy as np

from trajreplay import Lake, RecomputeConfig, SampleRecord

TOKENS = 4096
SAMPLES = 8


def capture(lake: Lake, *, step_id: int, rank: int, ranks: int) -> None:
    """Commit a capture whose content depends on nothing but its key."""
    rng = np.random.default_rng([step_id, rank])
    length = TOKENS // SAMPLES
    records = [
        SampleRecord(
            f"s-{rank}-{i}",
            length,
            length + 1,
            np.ones(length, np.uint8),
            group_index=i,
            reward=0.5,
        )
        for i in range(SAMPLES)
    ]
    with lake.capture(
        run_id="r",
        rollout_id=step_id // 4,
        step_id=step_id,
        rank=rank,
        expected_ranks=range(ranks),
        settings=RecomputeConfig(),
        stages=["loss.policy"],
    ) as one:
        one.samples(records)
        for name in ("log_probs", "old_log_probs", "advantages"):
            one.tensor(name, rng.normal(size=TOKENS).astype(np.float32))
        one.expected("loss.policy", loss=float(rng.normal()))


def fork(work: Callable[[], None]) -> int:
    """Run something in a process of its own and return its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def warm_up() -> None:
    """Load everything once, before any writer is forked."""
    with tempfile.TemporaryDirectory() as folder:
        capture(Lake.create(folder), step_id=0, rank=0, ranks=1)


def say(what: object) -> None:
    """Answer the test that started this program."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def kill(path: str) -> None:
    """At each line of stdin, start a writer that goes on from that step, and kill it soon.

    Every other writer is given time for two captures first, however slow the machine is.
    """
    clock = random.Random(7)
    for number, line in enumerate(sys.stdin):
        told, tell = os.pipe()

        def write(first: int = int(line), tell: int = tell) -> None:
            lake = Lake.open(path)
            for step_id in count(first):
                capture(lake, step_id=step_id, rank=0, ranks=1)
                os.write(tell, b".")

        child = fork(write)
        os.close(tell)  # so that a writer that fails ends the wait below
        if number % 2:
            os.read(told, 1)
            os.read(told, 1)
        time.sleep(clock.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(told)
        say("killed" if os.WIFSIGNALED(status) else "failed")


def many(path: str, ranks: int, steps: int) -> None:
    """Start one writer per rank, let all go at once, and say how many failed."""
    ready, go = os.pipe()

    def write(rank: int) -> None:
        os.close(go)
        os.read(ready, 1)  # returns when the last writing end is closed
        lake = Lake.open(path)
        for step_id in range(steps):
            capture(lake, step_id=step_id, rank=rank, ranks=ranks)

    children = [fork(lambda rank=rank: write(rank)) for rank in range(ranks)]  # type: ignore[misc]
    os.close(go)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    say(sum(status != 0 for status in statuses))


if __name__ == "__main__":
    warm_up()
    if sys.argv[1] == "kill":
        kill(sys.argv[2])
    elif sys.argv[1] == "many":
        many(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        say(sorted({"torch", "duckdb", "polars"} & set(sys.modules)))
