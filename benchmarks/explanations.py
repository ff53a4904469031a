"""Measures how long `trajreplay explain` takes, for a cohort and for a run that diverges.

python -m benchmarks.explanations [--steps N]

A step is 64 samples of 512 tokens. Recorded scalars are those of one mistake, or of none that is
known: then every fault is tried, and pairs of them, until enough cohorts had no explanation.
Processor time of the command, with its imports; `nothing` is the same run without a divergence.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.lakes import capture_step
from benchmarks.run import bind_to_one_core, note
from benchmarks.timing import cpu_seconds
from benchmarks.workload import ENTROPY_COEF, small_step
from trajreplay import Lake

STEPS = 200
ONE_BOUND_S, RUN_BOUND_S = 3.0, 60.0
Scalars = Mapping[str, float]


def _right(given: Scalars) -> Scalars:
    return given


def _opposite_entropy(given: Scalars) -> Scalars:
    return {**given, "loss": given["pg_loss"] + ENTROPY_COEF * given["entropy_loss"]}


def _unknown(given: Scalars) -> Scalars:
    return {
        name: value * (0.6 + 0.137 * number) + 0.0731 * number
        for number, (name, value) in enumerate(given.items())
    }


MADE: dict[str, Callable[[Scalars], Scalars]] = {
    "nothing": _right,
    "one fault": _opposite_entropy,
    "no known fault": _unknown,
}


def seconds_of(folder: Path, steps: int, made: Callable[[Scalars], Scalars]) -> tuple[float, str]:
    """Processor time of `trajreplay explain` on a new lake, and what it named.

    Args:
        folder: Where the lake is written.
        steps: How many.
        made: What the recorded scalars are, from the right ones.
    """
    lake = Lake.create(folder)
    for number in range(steps):
        step = small_step(number)
        capture_step(lake, number, step, made(step.scalars))
    command = [sys.executable, "-m", "trajreplay", "explain", "--lake", str(folder)]
    start = cpu_seconds()
    done = subprocess.run([*command, "-q", "--format", "json"], capture_output=True, check=False)
    spent = cpu_seconds() - start
    found = json.loads(done.stdout)["explanations"]
    named = {
        ", ".join(one["hypotheses"][0]["faults"]) if one["hypotheses"] else "" for one in found
    }
    return spent, f"{len(found)} explanations: {'; '.join(sorted(named)) or 'none named'}"


def main() -> int:
    """Measure, and print the table; 1 if one takes longer than is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run (default 200)")
    asked = parser.parse_args()
    bind_to_one_core()
    late = False
    print("| steps | what was made | seconds | asked |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for steps, bound in ((1, ONE_BOUND_S), (asked.steps, RUN_BOUND_S)):
            for name, made in MADE.items():
                spent, said = seconds_of(Path(folder) / f"{steps}-{name}", steps, made)
                note(f"{steps} steps, {name}: {said}")
                late |= spent > bound
                print(f"| {steps} | {name} | {spent:.1f} | < {bound:g} |", flush=True)
    return int(late)


if __name__ == "__main__":
    raise SystemExit(main())
