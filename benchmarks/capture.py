"""What capture costs a training thread: the hand-off, a call while it is off, a saturated writer.

python -m benchmarks.capture [--rounds N]
"""

import argparse
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trajreplay import RecomputeConfig, SampleRecord, capture
from trajreplay.capture import Recorder, Switches

SAMPLES, TOKENS = 32, 2048
COLUMNS = ("old_log_probs", "log_probs", "ref_log_probs", "entropy", "kl", "advantages")
CLONES_KEPT = 4
EMPTY = "an empty function"
LOSS = "recorder.record_policy_loss"
OFF_CALLS = 20_000
REPEATS = 20
REACH_MS, REACH_NS, REACH_SHARE = 0.5, 100.0, 0.03
STEP_S, STEPS, PAIRS = 0.1, 20, 3


def main() -> None:
    """Measure, print one line each."""
    options = argparse.ArgumentParser(prog="benchmarks.capture", description=__doc__)
    options.add_argument("--rounds", type=int, default=100, help="hand-offs (default 100)")
    rounds = options.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="trajreplay-bench-") as scratch:
        records, tensors = batch()
        lists = {name: [*one] for name, one in tensors.items()}
        lines = [
            *hand_off(Path(scratch) / "padded", rounds, "padded", records, tensors),
            *hand_off(Path(scratch) / "lists", rounds, "lists", records, lists),
            *in_a_loop(Path(scratch), records, tensors),
            *on_a_device(Path(scratch) / "device", records, tensors),
            *switched_off(),
        ]
    print("\n".join(lines))


def batch() -> tuple[list[SampleRecord], dict[str, Tensor]]:
    """A micro-batch as a trainer holds it, padded."""
    records = [
        SampleRecord(f"s-{row}", TOKENS, TOKENS + 64, (), group_index=row // 8)
        for row in range(SAMPLES)
    ]
    mask = torch.ones(SAMPLES, TOKENS, dtype=torch.uint8)
    return records, {"loss_mask": mask, **{name: torch.randn(SAMPLES, TOKENS) for name in COLUMNS}}


def hand_off(
    scratch: Path, rounds: int, form: str, records: list[SampleRecord], columns: dict[str, Any]
) -> list[str]:
    """Time of the training thread for a step of one micro-batch, and of bare clones beside it.

    Args:
        scratch: A folder.
        rounds: How often.
        form: What the columns are, in a word.
        records: The samples.
        columns: Their columns, a tensor each or a list of them.
    """
    switches = Switches(lake=str(scratch / "lake"), run_id="bench", queue_bytes=1 << 30)
    recorder = capture.enable(switches, settings=RecomputeConfig(), step_stages=["sample"])
    tensors = [one for some in columns.values() for one in ([some] if form == "padded" else some)]
    working = torch.randn(1 << 20)

    def step(number: int) -> None:
        with recorder.step(number, 0):
            recorder.record_policy_loss(0, records, scalars={"loss": 0.0}, columns=columns)

    ours, clones, kept = [], [], []
    for number in range(rounds + 10):
        working.mul_(1.0001)  # other work in between, so that caches are not warm
        ours.append(thread_ms(lambda number=number: step(number)))  # type: ignore[misc]
        recorder.flush()
        working.mul_(1.0001)
        # What is kept for later needs other memory than what was cloned before it.
        clones.append(thread_ms(lambda: kept.append([one.clone() for one in tensors])))
        del kept[:-CLONES_KEPT]
    busy, waited = [], []
    started = time.perf_counter()
    for number in range(rounds + 10, 2 * rounds + 10):
        begun = time.perf_counter()
        busy.append(thread_ms(lambda number=number: step(number)))  # type: ignore[misc]
        waited.append(1e3 * (time.perf_counter() - begun))
    recorder.flush()
    rate = rounds / (time.perf_counter() - started)
    recorder.close()
    mid = statistics.median
    mine, bare = mid(ours[10:]), mid(clones[10:])
    size = f"{SAMPLES} x {TOKENS} x {len(COLUMNS)}"
    return [
        f"hand-off of {size}, {form}: {mine:.3f} ms; reach < {REACH_MS} ms: {met(mine < REACH_MS)}",
        f"a bare clone of the same that is kept, beside it: {bare:.3f} ms, ratio {mine / bare:.2f}",
        f"a hand-off while the writer works: {mid(busy):.3f} ms, ratio {mid(busy) / bare:.2f}",
        f"the same by the clock, with all waits: {mid(waited):.3f} ms, {mid(waited) / bare:.2f}",
        f"a saturated writer: {rate:.0f} captures/s, {rate * SAMPLES * TOKENS / 1e6:.1f} M tokens",
        f"a capture takes as long as {1e3 / rate / bare:.0f} bare clones",
    ]


def in_a_loop(scratch: Path, records: list[SampleRecord], columns: dict[str, Any]) -> list[str]:
    """What ten captures a second take of a loop that works all the time, its writer beside it."""
    work = torch.randn(256, 256)
    per_step = max(1, round(STEP_S / measured_s(lambda: train(work, 20)) * 20))
    wall, busy = [], []
    for pair in range(PAIRS):
        took = {}
        for captured in (False, True):
            recorder = Recorder()
            if captured:
                lake = str(scratch / f"loop-{pair}")
                switches = Switches(lake=lake, run_id="bench", queue_bytes=1 << 30)
                recorder = capture.enable(
                    switches, settings=RecomputeConfig(), step_stages=["sample"], shared=False
                )
            begun, spent = time.perf_counter(), time.process_time()
            for number in range(STEPS):
                train(work, per_step)
                with recorder.step(number, 0):
                    recorder.record_policy_loss(0, records, scalars={"loss": 0.0}, columns=columns)
            took[captured] = time.perf_counter() - begun, time.process_time() - spent
            recorder.close()
        (plain_s, plain_cpu), (with_s, with_cpu) = took[False], took[True]
        wall.append(with_s / plain_s - 1.0)
        busy.append(with_cpu / plain_cpu - 1.0)
    share, spent = statistics.median(wall), statistics.median(busy)
    title = f"a loop of {STEPS} steps of {STEP_S} s, each captured, medians of {PAIRS} pairs"
    return [
        f"{title}, by the clock: {share:+.2%}; reach < {REACH_SHARE:.0%}: "
        + met(share < REACH_SHARE),
        f"{title}, processor time with that of its writer: {spent:+.2%}",
    ]


def train(work: Tensor, times: int) -> None:
    """Work as a training does, in native code."""
    for _ in range(times):
        torch.mm(work, work)


def on_a_device(scratch: Path, records: list[SampleRecord], columns: dict[str, Any]) -> list[str]:
    """A whole step on a CUDA device: torch raises where anything of it waits for the device."""
    if not torch.cuda.is_available():
        return ["a step on a CUDA device: skipped, there is none"]
    switches = Switches(lake=str(scratch), run_id="bench", queue_bytes=1 << 30)
    recorder = capture.enable(switches, settings=RecomputeConfig(), step_stages=["sample"])
    there = {name: one.cuda() for name, one in columns.items()}
    loss, ours, clones = torch.zeros((), device="cuda"), [], []
    for number in range(REPEATS):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours.append(thread_ms(lambda: device_step(recorder, number, records, loss, there)))  # noqa: B023
        finally:
            torch.cuda.set_sync_debug_mode("default")
        recorder.flush()
        clones.append(thread_ms(lambda: [one.clone() for one in there.values()]))
    recorder.close()
    mine, bare = statistics.median(ours[2:]), statistics.median(clones[2:])
    return [f"a step on a CUDA device, no wait: {mine:.3f} ms, ratio to a clone {mine / bare:.2f}"]


def device_step(
    recorder: Recorder,
    number: int,
    records: list[SampleRecord],
    loss: Tensor,
    columns: dict[str, Any],
) -> None:
    """Record a step whose values are on a device."""
    with recorder.step(number, 0):
        recorder.record_policy_loss(0, records, scalars={"loss": loss}, columns=columns)


def measured_s(work: Callable[[], object]) -> float:
    """The least of a few times by the clock, in seconds."""
    return min(timeit.repeat(work, number=1, repeat=REPEATS))


def switched_off() -> list[str]:
    """Time of a call and of the branch, where nothing is captured, and of an empty function.

    Beside each call that of an empty method which has no parameter but the ones that are given:
    what it costs to hand them over at all.
    """
    recorder, (records, tensors) = Recorder(), batch()
    value = tensors["advantages"]

    def loop(body: str) -> float:
        """Nanoseconds of one turn, without those of a turn that does nothing."""
        names = {"recorder": recorder, "bare": Bare(), "records": records, "value": value}
        timer = timeit.Timer(body, setup="def empty(): pass", timer=time.thread_time, globals=names)
        return 1e9 * min(timer.repeat(REPEATS, OFF_CALLS)) / OFF_CALLS

    named = "scalars=value, log_probs=value, old_log_probs=value, advantages=value"
    bodies = {
        EMPTY: ("empty()", ""),
        "`if recorder.enabled`": ("if recorder.enabled: pass", ""),
        "a call with one tensor": (f"{LOSS}(0, records, advantages=value)", "one"),
        "a call with four by name": (f"{LOSS}(0, records, {named})", "four"),
        "a call with four by position": (f"{LOSS}(0, records, value, value, value, value)", "four"),
    }
    nothing = loop("pass")
    clone_ns = 1e6 * statistics.median(
        thread_ms(lambda: [one.clone() for one in tensors.values()]) for _ in range(REPEATS)
    )
    lines = []
    for name, (body, method) in bodies.items():
        ns = loop(body) - nothing
        handed = loop(body.replace(LOSS, f"bare.{method}")) - nothing if method else 0.0
        over = f", {ns - handed:.0f} more than to hand them over" if method else ""
        met_ns = met(ns < REACH_NS)
        lines.append(
            f"switched off, {name}: {ns:.0f} ns{over}, {ns / clone_ns:.5f} of a clone; "
            f"reach < {REACH_NS:.0f} ns: {met_ns}"
        )
    return lines


class Bare:
    """Methods that take just what they are given, and do nothing."""

    def one(self, micro_batch: Any, samples: Any, advantages: Any) -> None:
        """With one tensor."""

    def four(
        self,
        micro_batch: Any,
        samples: Any,
        scalars: Any,
        log_probs: Any,
        old_log_probs: Any,
        advantages: Any,
    ) -> None:
        """With four."""


def thread_ms(work: Callable[[], object]) -> float:
    """Processor time of this thread alone, in milliseconds: the writer's is not the training's."""
    started = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - started)


def met(holds: bool) -> str:
    """Say whether a bound is kept."""
    return "yes" if holds else "no"


if __name__ == "__main__":
    main()
