"""The losses of a step, recorded in each of the ways that a capture can state."""

from __future__ import annotations

from tests.helpers.cohorts import Expected, Shares, rank_sums, terms
from tests.helpers.trainer import METRICS, Sample, Trainer


def _batch_size(shares: Shares) -> int:
    return sum(map(len, shares.values()))


def _means(trainer: Trainer, shares: Shares) -> dict[int, list[Expected]]:
    return {
        rank: [Expected(terms(trainer, own, 1 / len(own)), {"scope": "rank", "reduction": "mean"})]
        for rank, own in shares.items()
        if own
    }


def _of_batch(trainer: Trainer, shares: Shares) -> dict[int, list[Expected]]:
    """A share of the mean over the batch, times the data-parallel size."""
    size, ranks = _batch_size(shares), len(shares)
    meaning = {"scope": "rank", "reduction": "mean", "denominator": size, "scale": float(ranks)}
    return {
        rank: [Expected(terms(trainer, own, ranks / size), meaning)] for rank, own in shares.items()
    }


def _by_micro_batch(trainer: Trainer, shares: Shares) -> dict[int, list[Expected]]:
    found: dict[int, list[Expected]] = {}
    for rank, own in shares.items():
        by_name: dict[str, list[Sample]] = {}
        for one in own:
            by_name.setdefault(str(one.micro_batch_id), []).append(one)
        found[rank] = [
            Expected(
                terms(trainer, part, 0.25),
                {
                    "scope": "micro_batch",
                    "reduction": "sum",
                    "scale": 0.25,
                    "micro_batch_id": name,
                },
            )
            for name, part in by_name.items()
        ]
    return found


def _by_sample(trainer: Trainer, shares: Shares) -> dict[int, list[Expected]]:
    return _each(trainer, shares, "mean")


def _numerators(trainer: Trainer, shares: Shares) -> dict[int, list[Expected]]:
    return _each(trainer, shares, "sum")


def _each(trainer: Trainer, shares: Shares, reduction: str) -> dict[int, list[Expected]]:
    """A value for each sample: the mean over its tokens, or their sum."""
    found: dict[int, list[Expected]] = {}
    for rank, own in shares.items():
        each = [trainer.sample_loss(one, summed=reduction == "sum") for one in own]
        names = [name for name in METRICS if each and name in each[0]]
        if names:
            values = {name: [float(one[name]) for one in each] for name in names}
            found[rank] = [Expected(values, {"scope": "sample", "reduction": reduction})]
    return found


def _over_all(trainer: Trainer, shares: Shares) -> dict[int, list[Expected]]:
    own = [one for share in shares.values() for one in share]
    meaning = {"scope": "global", "reduction": "mean", "scale": 0.5}
    return {0: [Expected(terms(trainer, own, 0.5 / max(len(own), 1)), meaning)]}


def _weighted(trainer: Trainer, shares: Shares) -> dict[int, list[Expected]]:
    found = {}
    for rank, own in shares.items():
        sums, size = terms(trainer, own), float(_batch_size(shares))
        values = {name: value / size for name, value in sums.items()}
        meaning = {
            "scope": "rank",
            "reduction": "weighted-mean",
            "numerator": sums,
            "denominator": size,
        }
        found[rank] = [Expected(values, meaning)]
    return found


RECORDINGS = {
    "sum": rank_sums,
    "mean": _means,
    "batch": _of_batch,
    "micro": _by_micro_batch,
    "sample": _by_sample,
    "numerator": _numerators,
    "global": _over_all,
    "weighted": _weighted,
}
