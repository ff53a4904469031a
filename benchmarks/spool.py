"""What a capture asks of the lake's file system, with and without a spool, per rank and step.

python -m benchmarks.spool [--ranks N] [--steps N]
"""

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from trajreplay import Lake, RecomputeConfig, SampleRecord, capture
from trajreplay.capture import Recorder, Switches

SAMPLES, TOKENS = 8, 128
# Functions of `os` that a file system answers by its metadata, by what they are counted as.
CALLS = {
    "open": "open",
    "mkdir": "mkdir",
    "rename": "rename",
    "link": "link",
    "unlink": "unlink",
    "fsync": "fsync",
    "stat": "look-up",
    "lstat": "look-up",
    "scandir": "list",
}


def main() -> None:
    """Measure both, print a line for each kind of call."""
    options = argparse.ArgumentParser(prog="benchmarks.spool", description=__doc__)
    options.add_argument("--ranks", type=int, default=8, help="of this machine (default 8)")
    options.add_argument("--steps", type=int, default=16, help="optimizer steps (default 16)")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="trajreplay-bench-") as scratch:
        direct, direct_s = train(Path(scratch) / "direct", chosen.ranks, chosen.steps, spool=False)
        packed, packed_s = train(Path(scratch) / "packed", chosen.ranks, chosen.steps, spool=True)
    captures = chosen.ranks * chosen.steps
    direct["all"], packed["all"] = direct.total(), packed.total()
    lines = [
        f"{name:8} per rank and step: {direct[name] / captures:6.2f} direct, "
        f"{packed[name] / captures:6.2f} from a spool"
        for name in (*dict.fromkeys(CALLS.values()), "all")
    ]
    lines.append(f"all is in the lake after {direct_s:.1f} s direct, {packed_s:.1f} s from a spool")
    print("\n".join(lines))


def train(folder: Path, ranks: int, steps: int, *, spool: bool) -> tuple[Counter[str], float]:
    """Calls that the lake saw of a training that was captured, and how long it took."""
    lake = folder / "lake"
    Lake.create(lake)
    started = time.perf_counter()
    with counted(f"{lake.resolve()}") as found:
        recorders = [started_rank(folder, rank, ranks, spool=spool) for rank in range(ranks)]
        for step in range(steps):
            for rank, recorder in enumerate(recorders):
                record(recorder, step, rank)
        for recorder in recorders:
            assert recorder.close()
    took = time.perf_counter() - started
    report = Lake.open(lake).validate()
    assert report.ok, report.findings
    return found, took


def started_rank(folder: Path, rank: int, ranks: int, *, spool: bool) -> Recorder:
    """The recorder of one rank, as if each were a process."""
    switches = Switches(
        lake=str(folder / "lake"),
        run_id="bench",
        queue_bytes=1 << 30,
        close_s=600.0,
        spool=str(folder / "spool") if spool else "",
    )
    return capture.enable(
        switches,
        settings=RecomputeConfig(),
        step_stages=["sample"],
        rank=rank,
        expected_ranks=range(ranks),
        attempt=0,
        alone=True,
        shared=False,
    )


def record(recorder: Recorder, step: int, rank: int) -> None:
    """One step of one micro-batch."""
    records = [
        SampleRecord(f"s-{rank}-{row}", TOKENS, TOKENS, (1,) * TOKENS, group_index=rank)
        for row in range(SAMPLES)
    ]
    with recorder.step(step, 0):
        recorder.record_policy_loss(
            0, records, {"loss": 0.0}, torch.randn(SAMPLES, TOKENS), torch.randn(SAMPLES, TOKENS)
        )


@contextmanager
def counted(below: str) -> Iterator[Counter[str]]:
    """Count the calls whose file is below a folder."""
    found: Counter[str] = Counter()

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if path_of(args[1] if name in ("rename", "link") else args[0]).startswith(below):
                found[CALLS[name]] += 1
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(os, name, counting(name, getattr(os, name))))
        yield found


def path_of(file: int | str | os.PathLike[str]) -> str:
    """The path that a call names, by its name or a descriptor."""
    if isinstance(file, int):
        return str(Path(f"/proc/self/fd/{file}").readlink())
    return os.fspath(file)


if __name__ == "__main__":
    main()
