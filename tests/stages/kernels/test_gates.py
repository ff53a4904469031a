import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import reference_losses
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels import segment_sum
from trajreplay.stages.kernels.dppo import MEASURES, RULES, dppo_loss
from trajreplay.stages.kernels.gates import kl_cov_loss, kl_cov_undecided, sapo_loss
from trajreplay.stages.losses.ties import Ties

ADVANTAGES = st.sampled_from([0.0, 1.0, -1.0]) | float32s(-5.0, 5.0)
RATIOS = st.lists(st.tuples(float32s(-30.0, 30.0) | float32s(-1.0, 1.0), ADVANTAGES), max_size=15)
PAIRS = st.lists(st.tuples(float32s(-9.0, 0.0), float32s(-9.0, 0.0), ADVANTAGES), max_size=15)


@given(RATIOS, st.sampled_from([(1.0, 1.05), (0.5, 2.0)]))
def test_sapo_equals_a_loop(tokens: list[tuple[float, float]], tau: tuple[float, float]) -> None:
    log_ratio, advantages = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 2).T
    found = sapo_loss(log_ratio, advantages, tau_pos=tau[0], tau_neg=tau[1])
    expected = [
        reference_losses.sapo_loss(*token, tau_pos=tau[0], tau_neg=tau[1]) for token in tokens
    ]
    assert found.pg_loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("rule", RULES)
@given(tokens=PAIRS)
def test_dppo_equals_a_loop(
    rule: str, measure: str, tokens: list[tuple[float, float, float]]
) -> None:
    columns = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 3).T
    options: dict[str, Any] = {"low": 0.13, "high": 0.21, "rule": rule, "measure": measure}
    found = dppo_loss(*columns, **options, adv_tau=0.7, kl_tau=0.01)
    expected = [
        reference_losses.dppo_loss(*token, **options, adv_tau=0.7, kl_tau=0.01) for token in tokens
    ]
    assert found.pg_loss.tolist() == pytest.approx([one[0] for one in expected], rel=1e-9)
    assert found.gated.tolist() == [one[1] for one in expected]


@given(
    packed(max_samples=4, max_tokens=9),
    pools(float32s(-9.0, 0.0), size=15),
    pools(float32s(-30.0, 30.0), size=15),
    pools(float32s(-2.0, 2.0), size=15),
    st.sampled_from([0.0002, 0.13, 1.0]),
)
def test_kl_cov_equals_a_loop_over_micro_batches(
    rows: Packed, new: list[float], ratios: list[float], gains: list[float], fraction: float
) -> None:
    # Small irregular steps: no two covariances are equal by chance of the drawn pools.
    step = torch.arange(rows.tokens, dtype=torch.float64).sin() * 1e-3
    log_probs, log_ratio, advantages = rows.tensor(new) + step, rows.tensor(ratios), step.cos()
    advantages = rows.tensor(gains) + advantages * step
    index = torch.arange(len(rows.lengths)) % 3
    found = kl_cov_loss(
        log_probs,
        log_ratio,
        advantages,
        rows.mask,
        rows.offsets,
        fraction=fraction,
        kl_coef=0.3,
        index=index,
        size=3,
    )
    gates: set[int] = set()
    for number in range(3):
        tokens = [
            t
            for sample, row in enumerate(reference_losses.rows(rows.lengths))
            for t in row
            if sample % 3 == number and rows.loss_mask[t]
        ]
        gates |= reference_losses.kl_cov_gates(
            log_probs.tolist(), advantages.tolist(), tokens, fraction=fraction
        )
    assert {t for t, flag in enumerate(found.gated.tolist()) if flag} == gates
    expected = [
        -advantage * math.exp(ratio) + (0.3 * abs(ratio) if t in gates else 0.0)
        for t, (ratio, advantage) in enumerate(
            zip(log_ratio.tolist(), advantages.tolist(), strict=True)
        )
    ]
    assert found.pg_loss.tolist() == pytest.approx(expected, rel=1e-12)


@given(
    packed(max_samples=4, max_tokens=9),
    pools(float32s(-9.0, 0.0), size=15),
    st.sampled_from([0.0, 0.7, -1.3]),
    st.sampled_from([0.0002, 0.13, 0.5]),
    st.integers(0, 2**32),
)
def test_whoever_is_gated_among_equal_advantages_lies_within_the_bound(
    rows: Packed, new: list[float], advantage: float, fraction: float, seed: int
) -> None:
    """A trainer's search in float32 may find any of the tokens of a micro-batch."""
    log_probs, numbers = rows.tensor(new).double(), torch.Generator().manual_seed(seed)
    log_ratio = torch.rand(rows.tokens, generator=numbers).double() - 0.5
    advantages = torch.full((rows.tokens,), advantage).double()
    index = torch.arange(len(rows.lengths)) % 2
    given_to = (log_probs, log_ratio, advantages, rows.mask, rows.offsets)
    options: dict[str, Any] = {"fraction": fraction, "kl_coef": 0.3, "index": index, "size": 2}
    ours, bound = kl_cov_loss(*given_to, **options), kl_cov_undecided(*given_to, **options)
    theirs = -advantages * log_ratio.exp()
    for number in range(2):
        mine = (index == number).repeat_interleave(rows.offsets.diff()) & rows.mask.bool()
        places = mine.nonzero().squeeze(1)
        chosen = places[torch.randperm(len(places), generator=numbers)]
        chosen = chosen[: int(ours.gated[mine].sum())]
        theirs[chosen] += 0.3 * log_ratio[chosen].abs()
    lengths = rows.offsets.diff().double().clamp(min=1.0)
    ties = Ties.of(bound, rows.offsets, lengths, index)
    off = segment_sum(theirs - ours.pg_loss, rows.offsets) / lengths
    assert bool((off.abs() <= ties.alone + 1e-9).all())
    factors = 3.0 * lengths - 1.0
    for number in range(2):
        samples = (index == number).nonzero().squeeze(1)
        together = float(ties.together(samples, factors[samples]).sum())
        assert float((off * factors)[samples].sum().abs()) <= together + 1e-9
        # However many samples a micro-batch has, no more than k of its tokens pay.
        most = [
            float(bound.allowed[one] * p * factors[one] / lengths[one])
            for one in samples.tolist()
            for p in bound.penalty[rows.offsets[one] : rows.offsets[one + 1]].tolist()
        ]
        assert together <= max(most, default=0.0) + 1e-9


@given(st.integers(0, 2**32), st.integers(3, 200))
def test_covariances_that_lie_apart_leave_nothing_undecided(seed: int, count: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    advantages = torch.arange(count).double() + 1.0  # each covariance is larger than the last
    log_probs = advantages / count
    ratios = torch.rand(count, generator=numbers).double()
    offsets = torch.tensor([0, count])
    given_to = (log_probs, ratios, advantages.clamp(min=count / 2.0), torch.ones(count), offsets)
    assert float(kl_cov_undecided(*given_to, fraction=0.1).penalty.abs().max()) == 0.0


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@given(tokens=st.lists(st.tuples(float32s(-1.0, 1.0), float32s(-2.0, 2.0)), max_size=9))
def test_narrow_inputs_give_narrow_results_near_the_exact(
    dtype: torch.dtype, near: float, tokens: list[tuple[float, float]]
) -> None:
    log_ratio, advantages = torch.tensor(tokens).reshape(-1, 2).to(dtype).T
    found = sapo_loss(log_ratio, advantages)
    exact = sapo_loss(log_ratio.double(), advantages.double()).pg_loss
    assert {found.pg_loss.dtype, found.gated.dtype} == {dtype}
    assert ((found.pg_loss.double() - exact).abs() <= near * exact.abs().clamp(min=0.1)).all()
    assert dppo_loss(log_ratio, log_ratio, advantages).pg_loss.dtype == dtype


def test_golden_sapo() -> None:
    """G11."""
    log_probs = torch.tensor([-0.9, -1.5, -0.3, -2.2, -0.7, -1.0])
    old_log_probs = torch.tensor([-1.2, -1.0, -0.4, -2.0, -2.2, -1.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 0.5])
    expected = [-2.3463335, -1.61152959, 2.00982618, 1.724038, 3.7135601, -1.0]
    found = sapo_loss(log_probs - old_log_probs, advantages)
    assert found.pg_loss.tolist() == pytest.approx(expected, rel=3e-7)


def test_golden_dppo() -> None:
    """G24."""
    log_probs = torch.tensor([-0.2, -1.0, -0.1, -2.0])
    rollout_log_probs = torch.tensor([-0.6, -0.4, -0.5, -2.1])
    found = dppo_loss(log_probs, rollout_log_probs, torch.tensor([1.0, -1.0, -1.0, 1.0]))
    assert found.gated.tolist() == [1, 1, 0, 0]
    expected = [0.00016, 0.00036, 1.49198472, -1.10516083]
    assert found.pg_loss.tolist() == pytest.approx(expected, rel=5e-7)
    assert found.pg_loss.sum().item() == pytest.approx(0.387343884, rel=5e-7)


def test_an_advantage_of_0_has_the_bound_of_negative_ones() -> None:
    down, up = torch.tensor([-2.0]), torch.tensor([-0.2])
    zero = torch.zeros(1)
    assert dppo_loss(down, up, zero).gated.tolist() == [1.0]
    assert dppo_loss(up, down, zero).gated.tolist() == [0.0]
    assert sapo_loss(zero, zero).pg_loss.tolist() == [0.0]


def test_a_gated_token_keeps_its_penalty_though_its_gain_overflows() -> None:
    found = dppo_loss(torch.tensor([0.0]), torch.tensor([-200.0]), torch.ones(1), kl_tau=0.5)
    assert found.pg_loss.tolist() == [20000.0]


def test_bad_arguments_are_refused() -> None:
    one, offsets = torch.ones(1), torch.tensor([0, 1])
    with pytest.raises(StageError, match="no rule 'ipo', expected one of by-sign, absolute"):
        dppo_loss(one, one, one, rule="ipo")
    with pytest.raises(StageError, match="sapo_loss: advantages has 2 along N, expected 1"):
        sapo_loss(one, torch.ones(2))
    with pytest.raises(StageError, match="index runs from 1 to 1, expected 0 to 0"):
        kl_cov_loss(one, one, one, one, offsets, index=torch.tensor([1]))
    with pytest.raises(StageError, match="index has 2 along S, expected 1"):
        kl_cov_loss(one, one, one, one, offsets, index=torch.tensor([0, 0]))
