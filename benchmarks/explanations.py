"""Measures how long an explanation takes, of a cohort and of a run that diverges.

python -m benchmarks.explanations [--steps N]

A step is 64 samples of 512 tokens. Recorded scalars are those of one mistake, or of none that is
known, or nothing that a step recorded is what its settings give: then every fault is tried, and
pairs of them, until enough cohorts had no explanation. Processor time of `Lake.explain` less that
of `Lake.replay` on the same lake, in this process and after one of each; imports are no part of it.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.lakes import capture_step
from benchmarks.run import bind_to_one_core, note
from benchmarks.timing import cpu_seconds
from benchmarks.workload import ENTROPY_COEF, Floats, Step, small_step
from trajreplay import Lake

STEPS = 200
ONE_BOUND_S, RUN_BOUND_S = 3.0, 60.0
NOISE = 0.5
Scalars = Mapping[str, float]


class _Noisy(Step):
    """A step that recorded none of its values as its settings give them."""

    @cached_property
    def reward(self) -> Floats:
        return self._with_noise(super().reward)

    @cached_property
    def kl(self) -> Floats:
        return self._with_noise(super().kl)

    @cached_property
    def advantages(self) -> Floats:
        return self._with_noise(super().advantages)

    @cached_property
    def scalars(self) -> dict[str, float]:
        return dict(_unknown(super().scalars))

    @staticmethod
    def _with_noise(values: Floats) -> Floats:
        numbers = np.random.default_rng(values.size)
        noisy: Floats = (values + numbers.normal(0, NOISE, values.shape)).astype(np.float32)
        return noisy


def _opposite_entropy(given: Scalars) -> Scalars:
    return {**given, "loss": given["pg_loss"] + ENTROPY_COEF * given["entropy_loss"]}


def _unknown(given: Scalars) -> Scalars:
    return {
        name: value * (0.6 + 0.137 * number) + 0.0731 * number
        for number, (name, value) in enumerate(given.items())
    }


def _noisy(step: Step) -> tuple[Step, Scalars]:
    noisy = _Noisy(**{one.name: getattr(step, one.name) for one in fields(Step)})
    return noisy, noisy.scalars


MADE: dict[str, Callable[[Step], tuple[Step, Scalars]]] = {
    "nothing": lambda step: (step, step.scalars),
    "one fault": lambda step: (step, _opposite_entropy(step.scalars)),
    "no known fault": lambda step: (step, _unknown(step.scalars)),
    "no known fault in any stage": _noisy,
}


def seconds_of(
    folder: Path, steps: int, made: Callable[[Step], tuple[Step, Scalars]]
) -> tuple[float, str]:
    """Processor time of an explanation of a new lake beyond that of its replay, and what it named.

    Args:
        folder: Where the lake is written.
        steps: How many.
        made: What is recorded of a step.
    """
    lake = Lake.create(folder)
    for number in range(steps):
        capture_step(lake, number, *made(small_step(number)))
    if steps == 1:
        lake.explain()  # the first in a process costs what all others are spared
    replayed = _spent(lake.replay)
    start = cpu_seconds()
    found = lake.explain().explanations
    spent = cpu_seconds() - start
    named = {", ".join(one.first.faults) if one.first else "" for one in found if not one.warns}
    text = "; ".join(sorted(named)) or "none named"
    return spent - replayed, f"{len(found)} explanations: {text}"


def _spent(work: Callable[[], object]) -> float:
    start = cpu_seconds()
    work()
    return cpu_seconds() - start


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
                print(f"| {steps} | {name} | {spent:.2f} | < {bound:g} |", flush=True)
    return int(late)


if __name__ == "__main__":
    raise SystemExit(main())
