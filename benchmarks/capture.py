"""What capture costs a training thread: the hand-off, a call while it is off, a saturated writer.

python -m benchmarks.capture [--rounds N]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trajreplay import RecomputeConfig, SampleRecord, capture
from trajreplay.capture import Recorder, Switches

SAMPLES, TOKENS = 32, 2048
COLUMNS = ("old_log_probs", "log_probs", "ref_log_probs", "entropy", "kl", "advantages")
OFF_CALLS = 200_000
REACH_MS, REACH_NS = 0.5, 100.0


def main() -> None:
    """Measure, print one line each."""
    options = argparse.ArgumentParser(prog="benchmarks.capture", description=__doc__)
    options.add_argument("--rounds", type=int, default=100, help="hand-offs (default 100)")
    rounds = options.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="trajreplay-bench-") as scratch:
        lines = [*hand_off(Path(scratch), rounds), *switched_off()]
    print("\n".join(lines))


def batch() -> tuple[list[SampleRecord], dict[str, Tensor]]:
    """A micro-batch as a trainer holds it, padded."""
    mask = torch.ones(TOKENS, dtype=torch.uint8)
    records = [
        SampleRecord(f"s-{row}", TOKENS, TOKENS + 64, mask, group_index=row // 8)
        for row in range(SAMPLES)
    ]
    return records, {name: torch.randn(SAMPLES, TOKENS) for name in COLUMNS}


def hand_off(scratch: Path, rounds: int) -> list[str]:
    """Time of the training thread for a step of one micro-batch, and of bare clones beside it."""
    switches = Switches(lake=str(scratch / "lake"), run_id="bench", queue_bytes=1 << 30)
    recorder = capture.enable(switches, settings=RecomputeConfig(), step_stages=["sample"])
    records, tensors = batch()
    working = torch.randn(1 << 20)

    def step(number: int) -> None:
        with recorder.step(number, 0):
            recorder.record_policy_loss(0, records, scalars={"loss": 0.0}, **tensors)  # type: ignore[arg-type]

    ours, clones = [], []
    for number in range(rounds + 10):
        working.mul_(1.0001)  # other work in between, so that caches are not warm
        ours.append(thread_ms(lambda number=number: step(number)))  # type: ignore[misc]
        working.mul_(1.0001)
        clones.append(thread_ms(lambda: [one.clone() for one in tensors.values()]))
        recorder.flush()
    started = time.perf_counter()
    for number in range(rounds + 10, 2 * rounds + 10):
        step(number)
    recorder.flush()
    rate = rounds / (time.perf_counter() - started)
    recorder.close()
    mine, bare = statistics.median(ours[10:]), statistics.median(clones[10:])
    return [
        f"hand-off of {SAMPLES} x {TOKENS} x {len(COLUMNS)}: {mine:.3f} ms; reach < {REACH_MS} ms: "
        + met(mine < REACH_MS),
        f"a bare clone of the same beside it: {bare:.3f} ms, ratio {mine / bare:.2f}",
        f"share of a step at 10 captures/s: {mine / 100:.2%}; reach < 3%: {met(mine < 3.0)}",
        f"a saturated writer: {rate:.0f} captures/s, {rate * SAMPLES * TOKENS / 1e6:.1f} M tokens",
    ]


def switched_off() -> list[str]:
    """Time of a call and of the branch, where nothing is captured."""
    recorder, (records, tensors) = Recorder(), batch()
    advantages = tensors["advantages"]

    def calls() -> None:
        for _ in range(OFF_CALLS):
            recorder.record_policy_loss(0, records, advantages=advantages)

    def branches() -> None:
        for _ in range(OFF_CALLS):
            if recorder.enabled:
                recorder.record_policy_loss(0, records, advantages=advantages)

    def nothing() -> None:
        for _ in range(OFF_CALLS):
            pass

    bare = best(nothing)
    call, branch = (1e6 * (best(one) - bare) / OFF_CALLS for one in (calls, branches))
    return [
        f"switched off, a call: {call:.0f} ns; reach < {REACH_NS:.0f} ns: {met(call < REACH_NS)}",
        f"switched off, `if recorder.enabled`: {branch:.0f} ns; reach < {REACH_NS:.0f} ns: "
        + met(branch < REACH_NS),
    ]


def thread_ms(work: Callable[[], object]) -> float:
    """Processor time of this thread alone, in milliseconds: the writer's is not the training's."""
    started = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - started)


def best(work: Callable[[], object], times: int = 5) -> float:
    """The least of some times."""
    return min(thread_ms(work) for _ in range(times))


def met(holds: bool) -> str:
    """Say whether a bound is kept."""
    return "yes" if holds else "no"


if __name__ == "__main__":
    main()
