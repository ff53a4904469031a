"""Measures trajreplay against the plain baseline, in paired runs on one core, and prints ratios.

python -m benchmarks.run [--rounds N] [--clock wall|cpu] [--data DIRECTORY]
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch.utils.dlpack import from_dlpack

from benchmarks import baseline
from benchmarks.lakes import CAPTURES, STEPS, Twins, found_step, size_of, write_twins
from benchmarks.timing import CLOCKS, Compare, Paired, Reach, render, take_turns
from benchmarks.workload import small_step
from trajreplay import Lake
from trajreplay.query import Catalog, Selection, read_columns, select
from trajreplay.schema import TABLES
from trajreplay.schema.lakefile import open_lake

# Relax's own replay tool, a directory of .pt files a step, on a machine of this kind.
FIELD_REPLAY_S = 4.3
FIELD_VALIDATE_S = 1.4
FIELD_BYTES_PER_TOKEN = 36.0

TOKENS = STEPS * 64 * 512
WANTED = 7_345  # the first of those looked for
COLUMNS = ["old_log_probs", "log_probs", "ref_log_probs", "entropy", "kl", "advantages"]


def main() -> None:
    """Write the data, measure, print one table."""
    options = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__)
    options.add_argument("--rounds", type=int, default=5, help="pairs a row (default 5)")
    options.add_argument(
        "--clock", choices=sorted(CLOCKS), default="wall", help="cpu where others use the machine"
    )
    options.add_argument("--data", type=Path, help="where the data is kept between runs")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="trajreplay-bench-") as scratch:
        root = chosen.data or Path(scratch)
        note(f"writing {STEPS:,} steps, twice")
        steps = write_twins(root / "steps", small_step, STEPS)
        note(f"writing {CAPTURES:,} captures, twice")
        many = write_twins(root / "many", found_step, CAPTURES)
        bind_to_one_core()
        compare = partial(take_turns, rounds=chosen.rounds, clock=CLOCKS[chosen.clock])
        rows = [*measure_steps(steps, compare), *measure_finding(many, compare)]
    print(render(rows))


def measure_steps(twins: Twins, compare: Compare) -> Iterator[Paired]:
    """Replay and validate all 200 steps, in process and from the command line.

    The lake is opened anew each time, as the baseline lists its directory each time.
    """

    def replay() -> None:
        report = Lake.open(twins.lake).replay()
        require(report.verdict == "pass", f"the replay's verdict is {report.verdict}")

    def replay_baseline() -> None:
        require(not baseline.replay(twins.tree), "the baseline found differences")

    def validate() -> None:
        require(Lake.open(twins.lake).validate().ok, "the lake is not valid")

    note("replay")
    times = compare(replay, replay_baseline)
    yield Paired("replay 200 steps, digests verified", *times, "s", Reach(10), FIELD_REPLAY_S)

    note("validate")
    times = compare(validate, lambda: baseline.validate(twins.tree))
    yield Paired("validate 200 steps", *times, "s", Reach(5), FIELD_VALIDATE_S)

    note("one command")
    ours = [sys.executable, "-m", "trajreplay", "--lake", str(twins.lake), "replay"]
    theirs = [sys.executable, "-m", "benchmarks.baseline", "replay", str(twins.tree)]
    times = compare(lambda: run(ours), lambda: run(theirs))
    yield Paired("one command for all 200, with imports", *times, "s", Reach(bound=5.0))

    ours_bytes, baseline_bytes = size_of(twins.lake) / TOKENS, size_of(twins.tree) / TOKENS
    yield Paired(
        "bytes a token, six tensors",
        [ours_bytes],
        [baseline_bytes],
        "B",
        Reach(bound=24.0),
        FIELD_BYTES_PER_TOKEN,
    )


def measure_finding(twins: Twins, compare: Compare) -> Iterator[Paired]:
    """Find one rollout of 10,000 captures, as tensors and in SQL; the baseline scans for both.

    The lake is open, and every round asks for another rollout.
    """
    lake = Lake.open(twins.lake)
    catalog = Catalog.open(open_lake(twins.lake))
    wanted = iter(range(WANTED, CAPTURES))

    def scan() -> None:
        (bundle,) = baseline.find(twins.tree, next(wanted))
        require(len(bundle["tensors"]) == len(COLUMNS), "the baseline found other tensors")

    def select_tensors() -> None:
        (found,) = select(catalog, Selection(rollouts=(next(wanted),)))
        tensors = [
            from_dlpack(column.combine_chunks().flatten())
            for entry in found.captures.owners
            for column in read_columns(catalog.store, entry, TABLES["steps"], COLUMNS).columns
        ]
        require([len(one) for one in tensors] == [8 * 64] * len(COLUMNS), "other tensors came")

    def sql() -> None:
        query = f"SELECT avg(len(log_probs)) AS length FROM steps WHERE rollout_id = {next(wanted)}"
        found = lake.sql(query, threads=1).arrow()
        require(found.to_pylist() == [{"length": 64.0}], "the query found other rows")

    note("select")
    times = compare(select_tensors, scan)
    yield Paired("select 1 of 10,000 captures to torch", *times, "ms", Reach(bound=0.015))

    note("sql")
    times = compare(sql, scan)
    yield Paired("sql on 1 of 10,000 captures", *times, "ms", Reach(bound=0.030))


def bind_to_one_core() -> None:
    """Leave one core to this process, its commands, and every thread that a library starts."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def run(command: list[str]) -> None:
    """Run a command on the core that this process is bound to."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def require(holds: bool, otherwise: str) -> None:
    """Stop where a side did not do its work: its time would mean nothing."""
    if not holds:
        sys.exit(f"benchmarks: {otherwise}")


def note(what: str) -> None:
    """Say on stderr what is going on."""
    print(f"benchmarks: {what}", file=sys.stderr)


if __name__ == "__main__":
    main()
