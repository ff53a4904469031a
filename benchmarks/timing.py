"""Paired measurements: two ways to do one piece of work, in turn, and the ratios of each pair."""

import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

UNITS = {"s": 1.0, "ms": 1e3}
Compare = Callable[[Callable[[], object], Callable[[], object]], tuple[list[float], list[float]]]
HEADER = ("work", "trajreplay", "baseline", "field", "ratio (min-max)", "reach", "reached")


@dataclass(frozen=True)
class Reach:
    """What a row is to reach: a ratio over the baseline, or a bound on our own value, or both."""

    ratio: float = 0.0
    bound: float = float("inf")

    def met_by(self, row: "Paired") -> bool:
        """Say whether the medians of a row are where they should be."""
        return median(row.ratios) >= self.ratio and median(row.ours) < self.bound

    def show(self, unit: str) -> str:
        """Write it as a cell of the table."""
        if self.ratio:
            return f"{self.ratio:g}x"
        return f"< {self.bound * UNITS.get(unit, 1.0):g} {unit}"


@dataclass(frozen=True)
class Paired:
    """One row of the table: the values of both sides, pair by pair, in seconds or bytes.

    Attributes:
        work: What was done.
        ours: What trajreplay needed.
        baseline: What the baseline needed.
        unit: How values are shown: s, ms or B.
        reach: What is asked of it.
        field: What the field's own tool needs on a machine of this kind, where that is known.
    """

    work: str
    ours: list[float]
    baseline: list[float]
    unit: str
    reach: Reach
    field: float | None = None

    @property
    def ratios(self) -> list[float]:
        """How many times as much the baseline needs, of each pair."""
        return [theirs / ours for ours, theirs in zip(self.ours, self.baseline, strict=True)]

    def cells(self) -> list[str]:
        """Write the row: medians of both sides, then the median and the range of the ratios."""
        ratios = self.ratios
        return [
            self.work,
            self._show(median(self.ours)),
            self._show(median(self.baseline)),
            "" if self.field is None else self._show(self.field),
            f"{median(ratios):.1f}x ({min(ratios):.1f}-{max(ratios):.1f})",
            self.reach.show(self.unit),
            "yes" if self.reach.met_by(self) else "no",
        ]

    def _show(self, value: float) -> str:
        digits = 2 if self.unit == "s" else 1
        return f"{value * UNITS.get(self.unit, 1.0):.{digits}f} {self.unit}"


def cpu_seconds() -> float:
    """Processor time of this process and of the commands that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": cpu_seconds}


def take_turns(
    ours: Callable[[], object],
    baseline: Callable[[], object],
    *,
    rounds: int,
    clock: Callable[[], float],
) -> tuple[list[float], list[float]]:
    """Run both in turn, after one run of each that warms the caches and is not counted."""
    sides = (ours, baseline)
    for work in sides:
        work()
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for work, seconds in zip(sides, taken, strict=True):
            start = clock()
            work()
            seconds.append(clock() - start)
    return taken


def render(rows: Iterable[Paired]) -> str:
    """Write the table: the first column to the left, numbers to the right."""
    lines = [list(HEADER), *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"{first:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        for first, *rest in lines
    )
