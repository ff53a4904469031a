"""Captures that hold a pair of log-probs, and the statistics of a pair as plain loops."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.captures import record, sample
from tests.helpers.queried import catalog_of
from trajreplay import Lake
from trajreplay.query.mismatch import MismatchReport, mismatch

# Two sequences of the trainer and of the sampler, and their masks: KERNELS, G19 and G20.
OLD = [[-1.0, -0.5, -2.0], [-0.2, -3.0, 0.0]]
ROLLOUT = [[-1.1, -0.45, -2.3], [-0.25, -2.6, 0.0]]
MASK = [[1, 1, 1], [1, 1, 0]]


def write_pair(
    lake: Lake,
    old: Sequence[Any],
    rollout: Sequence[Any],
    masks: Sequence[Any] | None = None,
    *,
    column: str = "old_log_probs",
    source: str | None = "trainer",
    sampled: str | None = "sampler",
    fields: Sequence[dict[str, Any]] | None = None,
    version: int | None = None,
    sampled_version: int | None = None,
    temperatures: tuple[float | None, float | None] = (None, None),
    first: int = 0,
    **options: Any,
) -> None:
    """One capture of a step, or with `step_id=None` of a rollout, that holds a pair."""
    masks = masks or [[1] * len(row) for row in old]
    samples = [
        sample(
            first + index,
            len(row),
            loss_mask=masks[index],
            **{"micro_batch_id": "mb-0000", **(fields[index] if fields else {})},
        )
        for index, row in enumerate(old)
    ]

    def tensors(capture: Any) -> None:
        capture.samples(samples)
        told: dict[str, Any] = {"source": source, "weight_version": version}
        if source is None:
            told = {}
        capture.tensor(column, as_rows(old), **told, temperature=temperatures[0])
        if rollout is not None:
            capture.tensor(
                "rollout_log_probs",
                as_rows(rollout),
                source=sampled,
                weight_version=sampled_version,
                temperature=temperatures[1],
            )

    usual: dict[str, Any] = {"rollout_id": 0, "step_id": 0, "stages": []}
    record(lake, tensors, **usual | options)


def holding(samples: Sequence[Any], **tensors: Sequence[Any]) -> list[Callable[[Any], object]]:
    """What makes a capture of samples with these columns."""

    def of(name: str, values: Sequence[Any]) -> Callable[[Any], object]:
        return lambda capture: capture.tensor(name, values)

    return [
        lambda capture: capture.samples(samples),
        *(of(name, values) for name, values in tensors.items()),
    ]


def as_rows(values: Sequence[Any]) -> list[Any]:
    """Each sample's values as float32."""
    return [np.asarray(row, np.float32) for row in values]


def measured(lake: Lake, **options: Any) -> MismatchReport:
    """The statistics of a lake as it is now."""
    return mismatch(catalog_of(lake), **options)


def only_row(lake: Lake, **options: Any) -> dict[str, Any]:
    """The statistics of a lake of one run, which is one group."""
    rows: list[dict[str, Any]] = measured(lake, **options).table.to_pylist()
    (row,) = rows
    return row


def differences(
    old: Sequence[Any], rollout: Sequence[Any], masks: Sequence[Any]
) -> list[list[float]]:
    """The d of the valid tokens of each sample, from values as float32 holds them."""
    return [
        [
            float(np.float32(x)) - float(np.float32(r))
            for x, r, m in zip(first, second, mask, strict=True)
            if m
        ]
        for first, second, mask in zip(old, rollout, masks, strict=True)
    ]


def k3(d: float) -> float:
    """exp(d) - 1 - d without cancellation."""
    if abs(d) > 0.1:
        return math.expm1(d) - d
    term, total, k = d * d / 2, 0.0, 2
    while term and abs(term) > 1e-30 * abs(total):
        total += term
        k += 1
        term *= d / k
    return total


def token_reference(rows: Sequence[Sequence[float]], cap: float = 2.0) -> dict[str, float]:
    """Token statistics of differences, one token after another."""
    flat = [d for row in rows for d in row]
    n = len(flat)
    w = [math.exp(d) for d in flat]
    v = [math.exp(min(max(d, -20.0), 20.0)) for d in flat]
    box = [min(max(one, 1 / cap), cap) for one in w]
    return {
        "valid_tokens": n,
        "generation_kl_token_mean": math.fsum(map(k3, flat)) / n,
        "policy_kl_token_mean": math.fsum(k3(-d) for d in flat) / n,
        "generation_kl_k1_token_mean": -math.fsum(flat) / n,
        "generation_kl_k2_token_mean": math.fsum(d * d for d in flat) / n / 2,
        "js_divergence_token_mean": math.fsum(_log_cosh(d / 2) for d in flat) / n,
        "abs_delta_token_mean": math.fsum(map(abs, flat)) / n,
        "abs_delta_max": max(map(abs, flat)),
        "token_mult_prob_error_token_mean": math.fsum(math.exp(abs(d)) for d in flat) / n,
        "importance_ratio_token_mean": math.fsum(w) / n,
        "importance_ratio_min": min(w),
        "importance_ratio_max": max(w),
        "importance_ratio_truncated": math.fsum(min(one, cap) for one in w) / n,
        "truncated_share": sum(one > cap for one in w) / n,
        "ess": math.fsum(box) ** 2 / (n * math.fsum(one * one for one in box)),
        "ess_raw": math.fsum(v) ** 2 / (n * math.fsum(one * one for one in v)),
        "chi2_token": math.fsum(math.expm1(2 * min(max(d, -20.0), 20.0)) for d in flat) / n,
        "over_0_5": sum(abs(d) > 0.5 for d in flat),
        "over_1_0": sum(abs(d) > 1.0 for d in flat),
        "equal_tokens": sum(d == 0 for d in flat),
        "abs_delta_p50": float(np.quantile(np.abs(flat), 0.5)),
        "abs_delta_p99": float(np.quantile(np.abs(flat), 0.99)),
        "abs_delta_p999": float(np.quantile(np.abs(flat), 0.999)),
    }


def _log_cosh(x: float) -> float:
    if abs(x) < 1e-2:
        return x * x / 2 - x**4 / 12 + x**6 / 45
    return abs(x) + math.log1p(math.exp(-2 * abs(x))) - math.log(2)


def replayed_routing(name: str) -> list[dict[str, Any]]:
    """What the steps of a run with replayed routing recorded, or of the run without."""
    path = Path(__file__).parents[1] / "cases" / "gate_cases.json"
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    (found,) = (case["steps"] for case in cases if case["name"] == name)
    steps: list[dict[str, Any]] = found
    return steps


def write_with_figures(lake: Lake, run_id: str, steps: Sequence[dict[str, Any]]) -> None:
    """One capture a step whose tokens have these counts, this largest difference and this KL.

    All tokens that are not beyond a threshold differ by one amount, which gives the KL.
    """
    for number, step in enumerate(steps):
        tokens, tail, far = step["valid_tokens"], step["over_0_5"], step["over_1_0"]
        rollout = np.full(tokens, -1.0, np.float32)
        delta = np.zeros(tokens)
        delta[:tail] = 0.5078125
        delta[:far] = 1.015625
        top = step["abs_delta_max"]
        delta[:1] = -top if top > 30 else top  # with the other sign one token would be all of it
        fixed = max(tail, 1)
        missing = step["generation_kl"] * tokens - math.fsum(map(k3, delta[:fixed].tolist()))
        delta[fixed:] = _with_k3(missing / (tokens - fixed))
        old = (rollout.astype(np.float64) + delta).astype(np.float32)
        lengths = [tokens // 16] * 15 + [tokens - tokens // 16 * 15]
        ends = np.cumsum(lengths)[:-1]
        write_pair(
            lake,
            np.split(old, ends),
            np.split(rollout, ends),
            [np.ones(length, np.uint8) for length in lengths],
            run_id=run_id,
            rollout_id=number,
        )


def _with_k3(value: float) -> float:
    """The positive difference whose k3 is this."""
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if k3(middle) < value else (low, middle)
    return low
