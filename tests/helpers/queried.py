"""Small lakes to query: rollouts and steps of two ranks, whose values tell where they are from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.helpers.captures import record, sample
from trajreplay import Lake
from trajreplay.query import Catalog, Cohort
from trajreplay.schema import Entry
from trajreplay.schema.localstore import LocalStore

RANKS = (0, 1)


def catalog_of(lake: Lake) -> Catalog:
    """The lake as it is now."""
    return Catalog.open(LocalStore(lake.path))


def write_rollout(
    lake: Lake, rollout_id: int, *, ranks: Sequence[int] = RANKS, size: int = 2, **options: Any
) -> list[Entry]:
    """A rollout of `size` samples a rank; sample ids count on over the ranks."""
    return [
        write_capture(lake, rank, rollout_id=rollout_id, size=size, **options) for rank in ranks
    ]


def write_step(
    lake: Lake,
    rollout_id: int,
    step_id: int,
    *,
    ranks: Sequence[int] = RANKS,
    size: int = 2,
    **options: Any,
) -> list[Entry]:
    """A step that consumed the same samples as `write_rollout` makes."""
    return [
        write_capture(lake, rank, rollout_id=rollout_id, step_id=step_id, size=size, **options)
        for rank in ranks
    ]


def write_capture(
    lake: Lake,
    rank: int,
    *,
    rollout_id: int,
    size: int = 2,
    fields: dict[str, Any] | None = None,
    expected_ranks: Sequence[int] = RANKS,
    **options: Any,
) -> Entry:
    """One rank's capture: reward 100 * rollout + sample, log-probs minus that over 8."""
    numbers = [rank * size + index for index in range(size)]
    samples = [
        sample(
            number,
            length=2 + number,
            **{
                "group_index": number // 2,
                "micro_batch_id": f"mb-{number % 2:04d}",
                "reward": 100.0 * rollout_id + number,
                **(fields or {}),
            },
        )
        for number in numbers
    ]
    values = [[-(100.0 * rollout_id + number) / 8] * (2 + number) for number in numbers]
    return record(
        lake,
        lambda capture: capture.samples(samples),
        lambda capture: capture.tensor("log_probs", values),
        rank=rank,
        rollout_id=rollout_id,
        expected_ranks=expected_ranks,
        **options,
    )


def cohort(rollout_id: int, step_id: int | None = None, attempt: int = 0, run: str = "r") -> Cohort:
    """Coordinates of a capture set."""
    return Cohort(run, attempt, rollout_id, step_id)


@contextmanager
def opened_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The data files that are opened inside the block."""
    opened: list[str] = []
    plain = LocalStore.open

    def counted(store: LocalStore, path: str) -> int:
        if path.endswith(".parquet"):
            opened.append(path)
        return plain(store, path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "open", counted)
        yield opened
