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

from tests.helpers.cohorts import ALL_COLUMNS, Expected, Shares, rank_sums
from tests.helpers.scenes import WAY, drawn, halves, verdicts, write_whole
from tests.helpers.trainer import STYLES, Sample, Trainer
from trajreplay import Lake
from trajreplay.schema.settings import with_changes
from trajreplay.stages.explain import Explained

PLAIN = replace(WAY, std=False)  # so that rewards keep their size
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = {"float32": torch.float32, **NARROW}
SIZES = (1.0, 30.0, 3000.0)  # of rewards: the larger, the more a sum of both signs cancels
WITHIN = "within the bound of their rounding: "
ALONE = "dtype and reduction order explain it alone"
ORDER_OF = {"torch": "as torch takes them", "loop": "first to last", "reversed": "last to first"}
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
    folder: Path,
    samples: list[Sample] | Shares,
    expected: Mapping[int, list[Expected]] | None = None,
) -> Explained:
    lake = Lake.create(folder / "lake")
    shares = halves(samples) if isinstance(samples, list) else samples
    scalars = rank_sums(Trainer(PLAIN), shares) if expected is None else expected
    write_whole(lake, shares, PLAIN, settings=PLAIN.full, expected=scalars)
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
        assert WITHIN in one.text
        assert one.evaluated, one.text
        assert one.tried == one.cohorts
        best = one.evaluated[0]
        assert (best.same == best.values) == one.text.endswith(ALONE), one.text
        (wide,) = [each for each in one.evaluated if each.arithmetic == "float64"]
        # What is nearest to a value is no further from another of its dtype than twice as far.
        assert wide.max_error <= 2 * one.max_error
        result = next(each for each in found.report.cohorts[0].stages if each.stage == one.stage)
        assert one.max_error == result.max_abs_error


@pytest.mark.parametrize("style", sorted(ORDER_OF))
def test_the_order_of_sums_that_gives_the_recorded_bits_is_named(
    tmp_path: Path, style: str
) -> None:
    """Advantages of both signs add up to nothing but the rounding of their sum."""
    stages = set()
    for seed in range(4):
        found = _cancelling(tmp_path / str(seed), seed, style)
        assert not found.explanations
        stages |= {one.stage for one in found.rounded}
        for one in found.rounded:
            if one.stage == "loss.policy":
                gives = {each.arithmetic for each in one.evaluated if each.same == each.values}
                assert f"float32 with sums {ORDER_OF[style]}" in gives, one.text
                assert "float64" not in gives
                assert one.text.endswith(ALONE)
    assert "loss.policy" in stages


def _cancelling(folder: Path, seed: int, style: str) -> Explained:
    samples = _samples(seed, 3000.0, "torch", torch.float32)
    for one in samples:
        one.columns["log_probs"] = one.columns["old_log_probs"].clone()
    return _explained(folder, {0: samples}, rank_sums(Trainer(PLAIN, style), {0: samples}))


def test_where_no_order_gives_the_bits_none_is_said_to(tmp_path: Path) -> None:
    """Sums in pairs, as numpy takes them, are none of the orders that are tried."""
    told = []
    for seed in range(4):
        found = _cancelling(tmp_path / str(seed), seed, "numpy")
        told += [one for one in found.rounded if one.stage == "loss.policy"]
    unexplained = [one for one in told if one.evaluated[0].same < one.evaluated[0].values]
    assert unexplained, [one.text for one in told]
    for one in unexplained:
        best = one.evaluated[0]
        assert f"none of {best.arithmetic}; " in one.text
        assert f"{best.same} of {best.values} values bit for bit" in one.text
        assert best.max_error > 0


@pytest.mark.parametrize("dtype", sorted(NARROW))
@pytest.mark.parametrize("stage", ["advantage.kl", "advantage.estimate", "reward.post_process"])
def test_a_stage_that_was_computed_in_a_narrow_dtype_is_said_to_be(
    tmp_path: Path, dtype: str, stage: str
) -> None:
    samples = _samples(7, 1.0, "torch", torch.float32)
    to = NARROW[dtype]
    raw = torch.tensor([one.raw_reward for one in samples]).to(to)
    for row, one in enumerate(samples):
        if stage == "advantage.kl":
            pair = (one.columns[name].to(to) for name in ("old_log_probs", "ref_log_probs"))
            one.columns["kl"] = next(pair).sub(next(pair)).float()
        elif stage == "advantage.estimate":
            reward = torch.tensor(one.reward).to(to).float()
            one.columns["advantages"] = reward.expand(one.length).clone()
            one.columns["returns"] = one.columns["advantages"].clone()
        else:
            mine = [at for at, other in enumerate(samples) if other.group == one.group]
            exact = raw.double()  # the mean is rounded with the result, as our own kernels do
            one.reward = float((exact[row] - exact[mine].mean()).to(to))
    found = _explained(tmp_path, samples)
    (told,) = [each for each in found.explanations if each.stage == stage and not each.told]
    assert told.first is not None, told.text
    assert told.first.faults[0].endswith(".precision"), told.text
    assert dtype in told.text


@settings(max_examples=10)
@given(seed=_SEEDS, dtype=st.sampled_from(sorted(NARROW)))
def test_token_losses_in_a_narrow_dtype_are_said_to_be(
    tmp_path_factory: pytest.TempPathFactory, seed: int, dtype: str
) -> None:
    class Narrow(Sample):
        def floats(self, name: str) -> torch.Tensor:
            return self.columns[name].to(NARROW[dtype])

    samples = drawn(PLAIN, seed=seed)
    narrow: list[Sample] = [Narrow(**vars(one)) for one in samples]
    expected = rank_sums(Trainer(PLAIN), halves(narrow))
    found = _explained(tmp_path_factory.mktemp("narrow"), samples, expected)
    for told in found.explanations:
        if told.stage == "loss.policy" and not told.told:
            assert ("loss.precision",) in [each.faults for each in told.hypotheses], told.text


def test_an_overflow_of_float32_is_no_other_fault(tmp_path: Path) -> None:
    """exp(-d) of a gap of 100 is infinite in float32 and finite in float64."""
    way = replace(PLAIN, kl="k3")
    samples = drawn(way, seed=2)
    for one in samples:
        one.columns["ref_log_probs"][0] = one.columns["old_log_probs"][0] + 100.0
    trainer = Trainer(way)
    trainer.estimate(samples)
    lake = Lake.create(tmp_path / "lake")
    write_whole(lake, samples, way, settings=way.full)
    (told,) = [each for each in lake.explain().explanations if each.stage == "advantage.kl"]
    assert told.first is not None, told.text
    assert "the KL computed in float32" in told.text


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


def test_a_stage_that_is_added_up_alone_is_given_no_arithmetic_of_another(tmp_path: Path) -> None:
    """Raw rewards are sums of token rewards: their rounding is said, and nothing else is tried."""
    samples = drawn(PLAIN, seed=4)
    numbers = np.random.default_rng(4)
    for one in samples:
        values = numbers.normal(0.0, 3000.0, one.length).astype(np.float32)
        values[-1] = 0.1 - values[:-1].sum()  # so that little but rounding is left of the sum
        one.columns["token_rewards"] = torch.from_numpy(values)
        one.raw_reward = float(np.add.accumulate(values[::-1], dtype=np.float32)[-1])
    trainer = Trainer(PLAIN)
    trainer.score(samples)
    trainer.estimate(samples)
    stated = with_changes(PLAIN.full, {"reward.source": "token"})
    lake = Lake.create(tmp_path / "lake")
    write_whole(lake, samples, PLAIN, settings=stated, columns=(*ALL_COLUMNS, "token_rewards"))
    by_stage = {one.stage: one for one in lake.explain().rounded}
    assert by_stage["reward.raw"].evaluated == ()
    assert by_stage["reward.raw"].text.endswith("may explain it alone")
