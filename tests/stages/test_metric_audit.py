"""The metric audit: what a training logs beside its loss is what its definition gives, or named."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cohorts import STEP_COLUMNS, Expected, rank_sums
from tests.helpers.scenes import WAY, drawn, write_step, write_whole
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake, with_changes
from trajreplay.stages.contract_checks.definitions import INSPECTED, METRICS

DUAL, BOUNDS = 1.3, (0.8, 1.1)
SETTINGS = {
    "loss.dual_clip": DUAL,
    "loss.correction": "tis",
    "loss.correction_bounds": BOUNDS,
}
_TOTALS = {"ratio_max": max, "ratio_min": min, "sampler_ratio_max": max, "sampler_ratio_min": min}


def _token(
    name: str, now: float, then: float, sampler: float, advantage: float, entropy: float
) -> float:
    """One token's value of a metric, by its definition in plain floats."""
    if name == "entropy_loss":
        return entropy
    if name == "ppo_kl":
        return then - now
    if name == "pg_clipfrac":
        high = 1.0 + (WAY.eps_clip if WAY.eps_clip_high is None else WAY.eps_clip_high)
        ratio = math.exp(now - then)
        bound = ratio > high if advantage > 0 else ratio < 1.0 - WAY.eps_clip
        return 1.0 if advantage and bound else 0.0
    if name in ("ratio_mean", "ratio_max", "ratio_min"):
        return math.exp(now - then)
    if name == "approx_kl":
        return math.exp(then - now) - 1.0 - (then - now)
    if name == "pg_clipfrac_lower":
        return 1.0 if advantage < 0.0 and math.exp(now - then) > DUAL else 0.0
    weight = math.exp(then - sampler)
    if name == "sampler_ratio_bounded":
        return min(max(weight, BOUNDS[0]), BOUNDS[1])
    if name == "sampler_ratio_truncated":
        return 0.0 if BOUNDS[0] <= weight <= BOUNDS[1] else 1.0
    if name == "sampler_kl":
        return weight - 1.0 - math.log(weight)
    return weight


def _values(name: str, one: Sample, old: str = "old_log_probs") -> list[float]:
    """A metric at the trained tokens of a sample."""
    columns = {key: values.double().tolist() for key, values in one.columns.items()}
    then = columns["old_log_probs" if name.startswith("sampler") else old]
    places = zip(
        columns["log_probs"],
        then,
        columns["rollout_log_probs"],
        columns["advantages"],
        columns["entropy"],
        one.mask,
        strict=True,
    )
    return [_token(name, *place) for *place, trained in places if trained]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _logged(
    name: str, samples: Sequence[Sample], *, old: str = "old_log_probs", by: str = "token"
) -> float:
    """A metric over the trained tokens of samples: a mean of tokens, or of the means of samples."""
    per_sample = [found for one in samples if (found := _values(name, one, old))]
    if name in _TOTALS:
        return _TOTALS[name](value for values in per_sample for value in values)
    if by == "sample":
        return _mean([_mean(values) for values in per_sample])
    return _mean([value for values in per_sample for value in values])


def _in_parts(
    name: str, samples: Sequence[Sample], parts: Sequence[str], *, by: str = "token"
) -> float:
    """The same as a mean over the parts of a first kind, of means over those of a second, ..."""
    if not parts or name in _TOTALS:
        return _logged(name, samples, by=by)
    found: dict[object, list[Sample]] = {}
    for one in samples:
        found.setdefault(_PARTS[parts[0]](one), []).append(one)
    kept = [own for own in found.values() if any(any(one.mask) for one in own)]
    return _mean([_in_parts(name, own, parts[1:], by=by) for own in kept])


def _rank(one: Sample) -> int:
    return int(int(one.sample_id.removeprefix("s-")) >= 4)


_PARTS: dict[str, Callable[[Sample], object]] = {
    "rank": _rank,
    "micro-batch": lambda one: (_rank(one), one.micro_batch_id),
}
WAYS: dict[str, list[tuple[str, ...]]] = {
    "micro_batch": [()],
    "rank": [(), ("micro-batch",)],
    "global": [(), ("rank",), ("micro-batch",), ("rank", "micro-batch")],
}


def _samples(seed: int) -> list[Sample]:
    """Samples of which some tokens lie beyond every bound."""
    samples = drawn(seed=seed)
    numbers = np.random.default_rng(seed)
    for one in samples:
        for name, spread in (("old_log_probs", 0.3), ("log_probs", 0.6)):
            moved = one.columns["rollout_log_probs"].numpy() + numbers.normal(0, spread, one.length)
            one.columns[name] = torch.tensor(np.minimum(moved, -1e-3), dtype=torch.float32)
    return samples


def _covered(samples: list[Sample], scope: str) -> tuple[dict[int, list[Sample]], dict[str, Any]]:
    """The shares of two ranks, and what a scalar of rank 0 says that it covers."""
    shares = {0: samples[:4], 1: samples[4:]}
    meaning: dict[str, Any] = {"scope": scope, "reduction": "mean"}
    if scope == "micro_batch":
        meaning["micro_batch_id"] = samples[0].micro_batch_id
    return shares, meaning


def _of_scope(samples: list[Sample], scope: str) -> list[Sample]:
    if scope == "global":
        return samples
    first = samples[:4]
    if scope == "rank":
        return first
    return [one for one in first if one.micro_batch_id == first[0].micro_batch_id]


def _found(
    samples: list[Sample],
    scope: str,
    values: Mapping[str, float],
    changes: Mapping[str, Any] = SETTINGS,
    columns: Sequence[str] = STEP_COLUMNS,
) -> dict[str, str]:
    """What a replay says is wrong, by metric."""
    shares, meaning = _covered(samples, scope)
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(f"{folder}/lake")
        write_step(
            lake,
            shares,
            stages=["sample"],
            settings=with_changes(WAY.full, dict(changes)),
            columns=columns,
            expected={0: [Expected(values, meaning)]},
        )
        (cohort,) = lake.replay().cohorts
        return {
            one.message.partition(" ")[0]: one.message
            for one in cohort.findings
            if one.check == "metric.disagrees"
        }


_SEEDS = st.integers(0, 2**20)
_SCOPES = st.sampled_from(["micro_batch", "rank", "global"])


@given(seed=_SEEDS, scope=_SCOPES, by=st.sampled_from(["token", "sample"]), data=st.data())
def test_a_metric_by_its_definition_is_no_finding(
    seed: int, scope: str, by: str, data: st.DataObject
) -> None:
    """Over all that it covers at once, or over micro-batches and ranks in turn."""
    samples = _samples(seed)
    parts = data.draw(st.sampled_from(WAYS[scope]))
    values = {name: _in_parts(name, _of_scope(samples, scope), parts, by=by) for name in METRICS}
    assert _found(samples, scope, values) == {}
    plain = {name: _in_parts(name, _of_scope(samples, scope), parts, by=by) for name in INSPECTED}
    assert _found(samples, scope, plain, {}) == {}


@given(seed=_SEEDS, scope=_SCOPES, off=st.sampled_from([0.97, 1.05, 2.0, math.nan, math.inf]))
def test_every_metric_that_is_another_number_is_named(seed: int, scope: str, off: float) -> None:
    samples = _samples(seed)
    covered = _of_scope(samples, scope)
    for names, changes in ((METRICS, SETTINGS), (INSPECTED, {})):
        values = {}
        for name in names:
            means = [
                _in_parts(name, covered, parts, by=by)
                for by in ("token", "sample")
                for parts in WAYS[scope]
            ]
            # Beyond all means, and beyond what is near 0; a NaN stays one.
            below = off < 1
            values[name] = min(*means, 0.0) - 0.05 / off if below else (max(means) + 0.05) * off
        found = _found(samples, scope, values, changes)
        assert {*found} == {*names}
        place = f" of rank 0{' micro-batch ' if scope == 'micro_batch' else ' is '}"
        assert all(place in message for message in found.values())


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("pg_clipfrac", {"loss.surrogate": "odd"}),
        ("pg_clipfrac", {"loss.dual_clip": DUAL}),
        ("ppo_kl", {"loss.ratio": "sequence-mean"}),
    ],
)
def test_a_loss_that_is_only_inspected_is_audited_where_its_definition_is_plain(
    field: str, changes: dict[str, Any]
) -> None:
    samples = _samples(5)
    wrong = {"entropy_loss": 7.0, field: 7.0}
    assert {*_found(samples, "rank", wrong, changes)} == {"entropy_loss"}
    assert {*_found(samples, "rank", wrong, {})} == {"entropy_loss", field}


@pytest.mark.parametrize("name", ["ratio_mean", "ratio_max", "ratio_min", "approx_kl"])
def test_the_ratio_is_against_what_the_loss_has_it_against(name: str) -> None:
    samples = _samples(3)
    covered = _of_scope(samples, "rank")
    changes = {**SETTINGS, "loss.old_source": "rollout"}
    right = _logged(name, covered, old="rollout_log_probs")
    assert _found(samples, "rank", {name: right}, changes) == {}
    wrong = _logged(name, covered)
    assert {*_found(samples, "rank", {name: wrong}, changes)} == {name}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pg_clipfrac_lower", {}),
        ("pg_clipfrac_lower", {"loss.dual_clip": DUAL, "loss.dual_side": "both"}),
        ("sampler_ratio_bounded", {}),
        ("sampler_ratio_truncated", {"loss.correction": "tis"}),
        (
            "sampler_ratio_truncated",
            {"loss.correction": "sequence-tis", "loss.correction_bounds": BOUNDS},
        ),
        ("sampler_ratio_bounded", {**SETTINGS, "loss.correction_criterion": "max-ratio"}),
        ("ratio_mean", {"loss.ratio": "sequence-mean"}),
    ],
)
def test_no_bound_is_guessed_and_what_is_not_audited_is_said(
    name: str, changes: dict[str, Any]
) -> None:
    assert _found(_samples(1), "rank", {name: 0.0}, changes) == {}


def test_a_nan_is_what_tokens_that_are_nan_give() -> None:
    samples = _samples(2)
    samples[0].columns["log_probs"][0] = torch.nan
    shown = {"ratio_mean": math.nan, "ratio_max": math.nan, "approx_kl": 0.25}
    assert {*_found(samples, "rank", shown)} == {"approx_kl"}


def test_only_what_is_audited_counts_as_compared(lake: Lake) -> None:
    samples = _samples(4)
    shares = {0: samples}
    scalars = rank_sums(Trainer(WAY), shares)
    right = {"ratio_mean": _logged("ratio_mean", samples)}
    left = {"pg_clipfrac_lower": 0.5, "gradient_norm": 3.0}
    meaning = {"scope": "rank", "reduction": "mean"}
    logged = [Expected({**right, **left}, meaning), Expected({"ratio_max": 9.0}, {"scope": "rank"})]
    write_whole(lake, shares, expected={0: [*scalars[0], *logged]})
    (cohort,) = lake.replay().cohorts
    said = [one.message for one in cohort.findings if one.check == "outputs.not-compared"]
    assert [one.removeprefix("recorded and compared with nothing: ") for one in said] == [
        "gradient_norm; under the settings there is no such term",
        "pg_clipfrac_lower, ratio_max; scope, reduction or settings leave open what it is",
    ]
    assert "metric.disagrees" not in {one.check for one in cohort.findings}
