"""What dtype and reduction order may explain alone is said as that, and nothing else is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cohorts import Expected, rank_sums
from tests.helpers.scenes import WAY, drawn, halves, verdicts, write_whole
from tests.helpers.trainer import STYLES, Sample, Trainer
from trajreplay import Lake
from trajreplay.stages.explain import Explained

PLAIN = replace(WAY, std=False)  # so that rewards keep their size
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = {"float32": torch.float32, **NARROW}
SIZES = (1.0, 30.0, 3000.0)  # of rewards: the larger, the more a sum of both signs cancels
ALONE = "within the bound of their rounding: dtype or reduction order may explain it alone"
_SEEDS = st.integers(0, 2**16)


def _samples(seed: int, size: float, style: str, dtype: torch.dtype) -> list[Sample]:
    numbers = np.random.default_rng(seed)
    samples = drawn(PLAIN, seed=seed)
    for one in samples:
        one.raw_reward = float(np.float32(size * numbers.random()))
    trainer = Trainer(PLAIN, style, dtype)
    trainer.score(samples)
    trainer.estimate(samples)
    return samples


def _explained(
    folder: Path, samples: list[Sample], expected: Mapping[int, list[Expected]] | None = None
) -> Explained:
    lake = Lake.create(folder / "lake")
    scalars = rank_sums(Trainer(PLAIN), halves(samples)) if expected is None else expected
    write_whole(lake, samples, PLAIN, settings=PLAIN.full, expected=scalars)
    return lake.explain()


def _precise(found: Explained) -> set[str]:
    """The stages that a replay calls precision."""
    return {stage for stage, one in verdicts(found.report).items() if one == "precision"}


@settings(max_examples=15)
@given(
    seed=_SEEDS,
    size=st.sampled_from(SIZES),
    style=st.sampled_from(STYLES),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_what_rounding_explains_is_said_of_every_stage_that_it_is_of(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: float, style: str, dtype: str
) -> None:
    samples = _samples(seed, size, style, DTYPES[dtype])
    expected = rank_sums(Trainer(PLAIN, style), halves(samples))
    found = _explained(tmp_path_factory.mktemp("rounded"), samples, expected)
    assert found.report.verdict in ("pass", "precision")
    assert not [one.text for one in found.explanations if not one.warns]
    assert {one.stage for one in found.rounded} == _precise(found)
    for one in found.rounded:
        assert one.text.endswith(ALONE)
        result = next(each for each in found.report.cohorts[0].stages if each.stage == one.stage)
        assert one.max_error == result.max_abs_error


def test_sums_in_another_order_are_said_to_be_that(tmp_path: Path) -> None:
    """Advantages of both signs add up to nothing but the rounding of their sum."""
    stages = set()
    for seed in range(4):
        samples = _samples(seed, 3000.0, "torch", torch.float32)
        for one in samples:
            one.columns["log_probs"] = one.columns["old_log_probs"].clone()
        shares = {0: samples}
        lake = Lake.create(tmp_path / str(seed))
        expected = rank_sums(Trainer(PLAIN, "reversed"), shares)
        write_whole(lake, shares, PLAIN, settings=PLAIN.full, expected=expected)
        found = lake.explain()
        assert not found.explanations
        stages |= {one.stage for one in found.rounded}
    assert "loss.policy" in stages


@settings(max_examples=8)
@given(seed=_SEEDS, dtype=st.sampled_from(sorted(NARROW)))
def test_a_dtype_that_nobody_states_is_a_fault_and_no_rounding(
    tmp_path_factory: pytest.TempPathFactory, seed: int, dtype: str
) -> None:
    samples = _samples(seed, 1.0, "torch", NARROW[dtype])
    for one in samples:
        for name in ("kl", "advantages", "returns"):
            one.columns[name] = one.columns[name].float()
    found = _explained(tmp_path_factory.mktemp("unstated"), samples)
    judged = verdicts(found.report)
    assert (judged["advantage.kl"], judged["advantage.estimate"]) == ("diverged", "diverged")
    assert not {"advantage.kl", "advantage.estimate"} & {one.stage for one in found.rounded}
    named = {one.stage: one for one in found.explanations if one.first and not one.told}
    for stage, fault in (("advantage.kl", "kl"), ("advantage.estimate", "advantage")):
        first = named[stage].first
        assert first is not None
        assert first.faults == (f"{fault}.precision",), named[stage].text
        assert dtype in named[stage].text


@settings(max_examples=10)
@given(
    seed=_SEEDS,
    size=st.sampled_from(SIZES),
    style=st.sampled_from(STYLES),
    error=st.sampled_from([-0.1, -1e-3, 1e-3, 0.1]),
)
def test_an_error_beyond_every_rounding_is_none(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: float, style: str, error: float
) -> None:
    """A thousandth of what a sum adds up is more than any order of it takes."""
    samples = _samples(seed, size, style, torch.float32)
    expected = rank_sums(Trainer(PLAIN, style), halves(samples))
    (one, *_) = expected[0]
    terms = sum(float(one.columns["advantages"].abs().mean()) for one in samples)
    wrong = {**one.values, "pg_loss": one.values["pg_loss"] + error * terms}
    expected[0][0] = replace(one, values=wrong)
    found = _explained(tmp_path_factory.mktemp("beyond"), samples, expected)
    assert verdicts(found.report)["loss.policy"] == "diverged"
    assert "loss.policy" not in {one.stage for one in found.rounded}
    assert any(one.stage == "loss.policy" for one in found.explanations)
