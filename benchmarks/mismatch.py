"""Measures the mismatch statistics of two runs beside the bare DuckDB query on the same files.

python -m benchmarks.mismatch [--tokens N] [--rounds N] [--clock wall|cpu] [--data DIRECTORY]
"""

import argparse
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import duckdb
import numpy as np

from benchmarks.lakes import PRODUCER, SETTINGS
from benchmarks.run import bind_to_one_core, note, require
from benchmarks.timing import CLOCKS, Paired, Reach, render, take_turns
from trajreplay import Lake, SampleRecord

RUNS = {"replay-off": 0.07, "replay-on": 0.02}  # the spread of old minus rollout log-probs, in nats
SAMPLES = 128
LENGTH = 2048
TOKENS = 10_000_000
# The bare query: mean and exact p99 of what the two columns differ by, where the mask says so.
BARE = """
SELECT avg(abs(x - r)), quantile_cont(abs(x - r), 0.99) FROM (
  SELECT unnest(old_log_probs)::DOUBLE AS x, unnest(rollout_log_probs)::DOUBLE AS r,
         unnest(loss_mask) AS m FROM read_parquet({files})
) WHERE m <> 0"""


def main() -> None:
    """Write two runs, measure, print one table."""
    options = argparse.ArgumentParser(prog="benchmarks.mismatch", description=__doc__)
    options.add_argument("--tokens", type=int, default=TOKENS, help="of both runs (default 10M)")
    options.add_argument("--rounds", type=int, default=5, help="pairs (default 5)")
    options.add_argument(
        "--clock", choices=sorted(CLOCKS), default="wall", help="cpu where others use the machine"
    )
    options.add_argument("--data", type=Path, help="where the data is kept between runs")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="trajreplay-bench-") as scratch:
        lake = write_runs((chosen.data or Path(scratch)) / "lake", chosen.tokens)
        bind_to_one_core()
        bare = {run: _files(lake, run) for run in RUNS}

        def ours() -> None:
            report = Lake.open(lake).mismatch(runs=list(RUNS), threads=1)
            require(len(report.table) == len(RUNS), "the report lacks a run")

        def theirs() -> None:
            for files in bare.values():
                with duckdb.connect(config={"threads": 1}) as connection:
                    (row,) = connection.execute(BARE.format(files=files)).fetchall()
                    require(row[0] > 0, "the query found nothing")

        note("mismatch")
        times = take_turns(ours, theirs, rounds=chosen.rounds, clock=CLOCKS[chosen.clock])
    work = f"all statistics of two runs, {chosen.tokens:,} tokens"
    print(render([Paired(work, *times, "s", Reach(0.5))]))


def write_runs(root: Path, tokens: int) -> Path:
    """Write the lake, unless an earlier run has left it there."""
    done = root.with_name("done")
    if not done.exists():
        Lake.create(root)
        steps = max(1, tokens // (len(RUNS) * SAMPLES * LENGTH))
        note(f"writing {steps} steps of {SAMPLES} x {LENGTH} tokens, twice")
        work = [(run, step) for run in RUNS for step in range(steps)]
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as workers:
            list(workers.map(partial(_write, root), work))
        done.touch()
    return root


def _write(root: Path, which: tuple[str, int]) -> None:
    run, step = which
    random = np.random.default_rng([list(RUNS).index(run), step])
    shape = (SAMPLES, LENGTH)
    rollout = -random.exponential(0.4, shape).astype(np.float32)
    old = rollout + random.normal(0.0, RUNS[run], shape).astype(np.float32)
    mask = (random.random(shape) < 0.9).astype(np.uint8)
    with Lake.open(root).capture(
        run_id=run,
        rollout_id=step,
        rank=0,
        expected_ranks=[0],
        settings=SETTINGS,
        producer=PRODUCER,
        stages=["sample"],
    ) as capture:
        capture.samples(
            [
                SampleRecord(
                    sample_id=f"s-{row}",
                    response_length=LENGTH,
                    total_length=LENGTH + 100,
                    loss_mask=mask[row].tolist(),
                )
                for row in range(SAMPLES)
            ]
        )
        capture.tensor("old_log_probs", old)
        capture.tensor("rollout_log_probs", rollout)


def _files(root: Path, run: str) -> list[str]:
    found = Lake.open(root).sql(f"SELECT path FROM manifest WHERE run_id = '{run}'")
    return [str(root / row["path"]) for row in found.arrow().to_pylist()]


if __name__ == "__main__":
    main()
