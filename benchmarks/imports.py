"""Measures the import of 200 replay bundles beside reading and verifying them the plain way.

python -m benchmarks.imports [--rounds N] [--clock wall|cpu] [--data DIRECTORY]
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks import baseline
from benchmarks.lakes import STEPS, write_twins
from benchmarks.run import bind_to_one_core, note, require
from benchmarks.timing import CLOCKS, Compare, Paired, Reach, render, take_turns
from benchmarks.workload import small_step
from trajreplay import Lake
from trajreplay.capture.importers import import_files, importer_of

KIND = "relax-bundle"
MAX_GROWTH = 1.2  # of the memory for one bundle: what 200 may take


def main() -> None:
    """Write the bundles, measure, print one table."""
    options = argparse.ArgumentParser(prog="benchmarks.imports", description=__doc__)
    options.add_argument("--rounds", type=int, default=5, help="pairs (default 5)")
    options.add_argument(
        "--clock", choices=sorted(CLOCKS), default="wall", help="cpu where others use the machine"
    )
    options.add_argument("--data", type=Path, help="where the data is kept between runs")
    options.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="trajreplay-bench-") as scratch:
        if chosen.memory_of is not None:
            import_into(Path(scratch) / "lake", chosen.memory_of)
            uses = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
            print(max(resource.getrusage(use).ru_maxrss for use in uses))
            return
        bundles, tree = write_bundles(chosen.data or Path(scratch))
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        bind_to_one_core()
        names = (Path(scratch) / f"lake-{number}" for number in count())
        compare = partial(take_turns, rounds=chosen.rounds, clock=CLOCKS[chosen.clock])
        rows = [
            read_row(bundles, tree, compare),
            import_row(bundles, tree, names.__next__, compare, cores),
            memory_row(bundles),
        ]
    print(render(rows))


def write_bundles(root: Path) -> tuple[Path, Path]:
    """Write the steps as bundles and as the baseline has them, unless they are there."""
    twins, bundles = write_twins(root, small_step, STEPS), root / "bundles"
    if not bundles.exists():
        note(f"writing {STEPS} bundles")
        aside = root / "bundles.tmp"
        Lake.open(twins.lake).export_bundles(aside)
        aside.rename(bundles)
    return bundles, twins.tree


def read_row(bundles: Path, tree: Path, compare: Compare) -> Paired:
    """Every bundle read and held against every rule of the format, and nothing written."""

    def ours() -> None:
        report = import_files(None, importer_of(KIND), [bundles])
        require(not report.refused, f"{len(report.refused)} bundles were refused")

    note("read")
    return Paired(f"read {STEPS} bundles", *compare(ours, partial(verify, tree)), "s", Reach(1.0))


def import_row(
    bundles: Path, tree: Path, name: Callable[[], Path], compare: Compare, cores: set[int]
) -> Paired:
    """Every bundle read, verified and committed into a new lake, on all cores."""

    def ours() -> None:
        with on_cores(cores):
            import_into(name(), bundles)

    note("import")
    times = compare(ours, partial(verify, tree))
    return Paired(f"import {STEPS} bundles", *times, "s", Reach(1.0))


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Leave these cores to the process, and then as few as before; none says nothing."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def verify(tree: Path) -> None:
    """Read and verify every step as the baseline does."""
    require(baseline.validate(tree) == STEPS, "the baseline found another number of steps")


def memory_row(bundles: Path) -> Paired:
    """The most memory that a process takes to import all bundles, beside one that imports one."""
    note("memory")
    first = min(bundles.iterdir())
    taken = [memory_of(one) for one in (bundles, first)]
    work = f"memory for {STEPS} bundles, beside one"
    return Paired(work, [taken[0]], [taken[1]], "B", Reach(1 / MAX_GROWTH))


def memory_of(path: Path) -> float:
    """Bytes that one process takes at most, of those that import what is at a path."""
    command = [sys.executable, "-m", "benchmarks.imports", "--memory-of", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout) * 1024


def import_into(lake: Path, path: Path) -> None:
    """Import all bundles at or below a path into a new lake."""
    report = Lake.create(lake).import_files(KIND, path)
    require(not report.refused, f"{len(report.refused)} bundles were refused")


if __name__ == "__main__":
    main()
