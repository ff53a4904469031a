"""Captures with expert choices as tests make them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.helpers.captures import record, sample
from trajreplay import Lake
from trajreplay.schema.entry import Entry

EXPERTS = 64


def healthy(
    lengths: Sequence[int], layers: int = 3, top_k: int = 4, seed: int = 0
) -> list[np.ndarray[Any, Any]]:
    """Routes as a router makes them: distinct experts for every token and layer."""
    random = np.random.default_rng(seed)
    return [
        random.random((length, layers, EXPERTS)).argsort(-1)[:, :, :top_k].astype(np.int8)
        for length in lengths
    ]


def record_routes(
    lake: Lake,
    routes: Mapping[str, Any],
    total: Sequence[int],
    *,
    response: Sequence[int] | None = None,
    stages: Sequence[str] = ("sample",),
    common: Mapping[str, Any] | None = None,
    **options: Any,
) -> Entry:
    """One capture of samples of so many tokens with their routes."""
    response = response or [max(one - 1, 0) for one in total]
    samples = [
        sample(index, mine, total_length=whole)
        for index, (whole, mine) in enumerate(zip(total, response, strict=True))
    ]

    def use(capture: Any) -> None:
        capture.samples(samples)
        for name, values in routes.items():
            capture.routes(name, values, **(common or {"num_experts": EXPERTS}))

    return record(lake, use, stages=list(stages), **options)


@st.composite
def any_routes(draw: st.DrawFn) -> tuple[list[int], list[np.ndarray[Any, Any] | None]]:
    """Tokens of samples, and any integers as routes of some of them, of one dtype and shape."""
    dtype = draw(st.sampled_from(["int8", "int16", "int32", "int64", "uint8"]))
    layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    low, high = (
        (0, 255) if dtype == "uint8" else (-128, 127) if dtype == "int8" else (-(2**15), 2**15 - 1)
    )
    total = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    routes: list[np.ndarray[Any, Any] | None] = []
    for length in total:
        if not draw(st.integers(0, 4)):
            routes.append(None)
            continue
        tokens = max(length - draw(st.integers(0, 1)), 0)
        count = tokens * layers * top_k
        values = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
        routes.append(np.array(values, dtype).reshape(tokens, layers, top_k))
    return total, routes
