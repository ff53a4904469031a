"""Measures how often the fault that was made is named: draws of every fault of the catalogue.

python -m benchmarks.faults [--draws N] [--stage STAGE] [--only ID ...] [--seed N]

Each draw is a cohort of other sizes, rewards, lengths, settings and seeds, into which the fault is
put and which is then explained. A draw is identifiable where nothing else was found to give the
same numbers; where something does, the explanation says so, whichever comes first.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.run import bind_to_one_core, note
from benchmarks.timing import cpu_seconds
from tests.helpers.fault_draws import Tally, can_be_put_in, explanation_of
from trajreplay.stages.faults import FAULTS, Fault

DRAWS = 20
AT_LEAST = 0.95
# Cohorts that are drawn for each that a fault can happen to.
PATIENCE = 4


def measured(fault: Fault, draws: int, seed: int, folder: Path) -> Tally:
    """What is said of so many draws of one fault, or of fewer where it happens to few cohorts.

    Args:
        fault: The fault.
        draws: How many are wanted.
        seed: Of the first; the others follow it.
        folder: Where the lakes are written.
    """
    tally = Tally(fault.id)
    for number in range(PATIENCE * draws):
        if tally.draws == draws:
            break
        found = explanation_of(fault, seed + number, folder / f"{fault.id}-{number}")
        if found is not None:
            tally.add(found)
    return tally


def rows(tallies: Sequence[Tally]) -> Iterator[str]:
    """The table in Markdown: what was said of each fault, the stages in order."""
    yield "| fault | draws | identifiable | first of these | first | declared the same | other |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for one in tallies:
        cells = (
            f"`{one.fault}`",
            *(one.draws, one.identifiable, one.alone, one.alone + one.first),
            *(one.same, len(one.lost)),
        )
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    """Measure, and print the table; 1 if a fault is named in fewer draws than is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each fault (default 20)")
    parser.add_argument("--stage", help="faults of one stage alone")
    parser.add_argument("--only", nargs="*", help="faults by id")
    parser.add_argument("--seed", type=int, default=0, help="of the first draw (default 0)")
    asked = parser.parse_args()
    bind_to_one_core()
    chosen = [
        one
        for one in FAULTS
        if (asked.stage in (None, one.stage)) and (not asked.only or one.id in asked.only)
    ]
    tallies = []
    with tempfile.TemporaryDirectory() as folder:
        for one in filter(can_be_put_in, chosen):
            start = cpu_seconds()
            tally = measured(one, asked.draws, asked.seed, Path(folder))
            tallies.append(tally)
            note(f"{one.id}: {tally.draws} draws, {cpu_seconds() - start:.1f} s")
            for text in tally.lost:
                note(f"  {text}")
    print("\n".join(rows(tallies)))
    rest = [one.id for one in chosen if not can_be_put_in(one)]
    print(f"\nFindings of contract checks, or of several cohorts: {', '.join(rest)}")
    failed = [one.fault for one in tallies if one.alone < AT_LEAST * one.identifiable]
    few = [one.fault for one in tallies if not one.draws]
    print(f"Below {AT_LEAST:.0%} of identifiable draws: {', '.join(failed) or 'none'}")
    print(f"Put into no cohort that was drawn: {', '.join(few) or 'none'}")
    return 1 if failed or few else 0


if __name__ == "__main__":
    raise SystemExit(main())
