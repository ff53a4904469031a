"""Steps whose responses context-parallel ranks captured in shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.helpers.captures import record, sample
from tests.helpers.mismatches import as_rows
from trajreplay import Lake, Settings
from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import LayoutSettings
from trajreplay.schema.shards import response_spans, row_places

LAYOUTS = ("zigzag", "contiguous", "all-gather")


@st.composite
def cut_steps(draw: st.DrawFn) -> dict[str, Any]:
    """Samples of any length, of which every rank of a group holds what a layout gives it."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sampler = [random.normal(-2, 1, length).astype(np.float32) for length in lengths]
    masks = [random.integers(0, 2, length).tolist() for length in lengths]
    masks[0][0] = 1
    prompts = draw(st.lists(st.integers(1, 9), min_size=len(lengths), max_size=len(lengths)))
    padded = draw(st.booleans())
    most = max(length + prompt for length, prompt in zip(lengths, prompts, strict=True))
    return {
        "layout": LayoutSettings(context=draw(st.sampled_from(LAYOUTS))),
        "padded": [most + draw(st.integers(0, 9)) for _ in lengths] if padded else None,
        "size": draw(st.sampled_from([2, 4])),
        "old": [one + random.normal(0, 0.3, len(one)).astype(np.float32) for one in sampler],
        "rollout": sampler,
        "masks": masks,
        "prompts": prompts,
        "batches": draw(st.lists(st.sampled_from("ab"), min_size=len(lengths), max_size=5)),
        "spans": [[(0, length // 2, 3), (length // 2, length, 4)] for length in lengths],
        "whole_sampler": draw(st.booleans()),
    }


def samples_of(step: dict[str, Any]) -> list[Any]:
    return [
        sample(
            number,
            len(row),
            total_length=step["prompts"][number] + len(row),
            loss_mask=step["masks"][number],
            micro_batch_id=f"mb-{step['batches'][number]}",
            padded_length=None if step["padded"] is None else step["padded"][number],
            weight_versions=step["spans"][number],
        )
        for number, row in enumerate(step["old"])
    ]


def shard_of(step: dict[str, Any], rank: int, rows: list[np.ndarray]) -> list[np.ndarray]:
    """What one rank holds of every row, in the order in which it stores it."""
    response = np.array([len(row) for row in rows])
    total = response + np.array(step["prompts"][: len(rows)])
    place = ParallelCoordinates(context_rank=rank, context_size=step["size"])
    places = row_places(
        step["layout"], place, total, batches=step["batches"][: len(rows)], padded=step["padded"]
    )
    spans = response_spans(step["layout"], total, response, places)
    return [
        np.concatenate([row[low[number] : high[number]] for low, high in spans])
        for number, row in enumerate(rows)
    ]


def write_cut(
    lake: Lake,
    step: dict[str, Any],
    ranks: Any = None,
    more: Callable[[Any, int], object] | None = None,
    **options: Any,
) -> None:
    """A capture a rank; `more` hands over what else there is of one."""
    for rank in range(step["size"]) if ranks is None else ranks:
        sampler = step["rollout"]
        if not step["whole_sampler"]:
            sampler = shard_of(step, rank, sampler)
        old = shard_of(step, rank, step["old"])

        def tensors(capture: Any, old: Any = old, sampler: Any = sampler, rank: int = rank) -> None:
            capture.samples(samples_of(step))
            capture.tensor("old_log_probs", as_rows(old), source="trainer", weight_version=4)
            capture.tensor("rollout_log_probs", as_rows(sampler), source="sampler")
            if more is not None:
                more(capture, rank)

        record(lake, tensors, **{"step_id": 0} | cut_options(step, rank) | options)


def cut_options(step: dict[str, Any], rank: int) -> dict[str, Any]:
    """How the capture of a rank is made."""
    return {
        "rollout_id": 0,
        "stages": [],
        "rank": rank,
        "expected_ranks": list(range(step["size"])),
        "parallel": ParallelCoordinates(context_rank=rank, context_size=step["size"]),
        "settings": replace(Settings(), layout=step["layout"]),
    }


def a_step() -> dict[str, Any]:
    """Two samples of eight tokens on two ranks."""
    rows = [np.linspace(-2, -1, 8, dtype=np.float32)] * 2
    return {
        "layout": LayoutSettings(context="zigzag"),
        "size": 2,
        "old": rows,
        "rollout": [row - np.float32(0.125) for row in rows],
        "masks": [[1] * 8] * 2,
        "prompts": [8, 8],
        "padded": None,
        "batches": "aa",
        "spans": [None, None],
        "whole_sampler": False,
    }
