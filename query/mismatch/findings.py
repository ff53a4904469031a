"""What is to be said of a measured pair of one run: equal columns, tokens that do not count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trajreplay.query.mismatch.captured import Reading
from trajreplay.query.mismatch.keys import Step
from trajreplay.query.mismatch.report import MismatchFinding
from trajreplay.query.mismatch.summary import Summary
from trajreplay.query.mismatch.sums import TokenSums

_SHOWN_STEPS = 3


def counts_by_step(reading: Reading, counts: Mapping[int, int]) -> Counter[Step]:
    """Counts by key as counts by step."""
    found: Counter[Step] = Counter()
    for key, count in counts.items():
        found[reading.keys[key].step] += count
    return found


def unversioned(reading: Reading, sums: TokenSums) -> Iterator[str]:
    """Of which tokens the weights are stated on the trainer's side alone."""
    counts = counts_by_step(reading, sums.of_unknown_version)
    if counts:
        yield (
            f"which weights recomputed {reading.pair.trainer} is stated and which sampled "
            f"{counts.total()} of the valid tokens is not, of {_shown(counts)}: whether they are "
            "the same is not known"
        )


def findings(
    run_id: str, reading: Reading, sums: TokenSums, summary: Summary, left_out: Sequence[str]
) -> Iterator[MismatchFinding]:
    """All findings of a run.

    Args:
        run_id: The run.
        reading: What its captures said.
        sums: What was summed up.
        summary: The statistics.
        left_out: Why capture sets were not read, one text each.
    """
    trainer, sampler = reading.pair.columns
    for severity, text in reading.origins.remarks():
        yield MismatchFinding(severity, run_id, text)
    equal = summary.equal_steps
    if len(equal) == len(summary.steps):
        yield MismatchFinding(
            "error",
            run_id,
            f"{trainer} and {sampler} are equal in every token of every step: one is a copy of "
            "the other, and every divergence is 0 by construction",
        )
    elif equal:
        yield MismatchFinding(
            "warning",
            run_id,
            f"{trainer} and {sampler} are equal in every token of {len(equal)} of "
            f"{len(summary.steps)} steps: {_shown(equal)}",
        )
    odd = sum(int(part["odd"]) for parts in sums.parts.values() for part in parts)
    if odd:
        yield MismatchFinding(
            "error", run_id, f"the difference of {odd} valid tokens is not finite"
        )
    yield from (MismatchFinding("warning", run_id, one) for one in unversioned(reading, sums))
    if others := counts_by_step(reading, sums.of_other_version):
        yield MismatchFinding(
            "info",
            run_id,
            f"{others.total()} valid tokens are left out, of {_shown(others)}: other weights "
            "sampled them than recomputed them",
        )
    if reading.without.total():
        yield MismatchFinding(
            "warning",
            run_id,
            f"{reading.without.total()} samples lack one of the columns, of "
            f"{_shown(reading.without)}",
        )
    if left_out:
        yield MismatchFinding(
            "warning",
            run_id,
            f"{len(left_out)} left out as incomplete, the first: {left_out[0]}",
        )


def _shown(steps: Iterable[Step]) -> str:
    """The first of some steps, as the command line takes them, or at rollout level rollouts."""
    named = [
        f"rollout {rollout}" if number is None else f"{rollout}:{number}"
        for _, _, rollout, number in steps
    ]
    more = f" and {len(named) - _SHOWN_STEPS} more" if len(named) > _SHOWN_STEPS else ""
    return ", ".join(named[:_SHOWN_STEPS]) + more
