import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import references
from tests.helpers.packed import float32s
from trajreplay.schema import StageError
from trajreplay.stages.kernels import ppo_clip, ppo_clip_error

EPS = st.sampled_from([(0.2, None), (0.2, 0.28), (0.0, 0.0), (0.5, 1.5), (1.0, 3.0)])
LOG_PROBS = float32s(-30.0, 0.0) | float32s(-1.0, -0.5)
ADVANTAGES = st.sampled_from([0.0, -0.0, 1.0, -1.0]) | float32s(-5.0, 5.0) | float32s(-1e-37, 1e-37)


def on_a_bound(old: float, bound: float, steps: int, advantage: float) -> tuple[float, ...]:
    """A token whose ratio is as near a bound as float32 log-probs allow, some steps away."""
    log_prob = np.float32(old + math.log(bound))
    for _ in range(abs(steps)):
        log_prob = np.nextafter(log_prob, np.float32(math.copysign(math.inf, steps)))
    return float(log_prob), old, advantage


NEAR = st.builds(
    on_a_bound,
    float32s(-3.0, 0.0),
    st.sampled_from([0.8, 1.2, 1.28, 0.5, 2.5]),
    st.integers(-3, 3),
    ADVANTAGES,
)
TOKENS = st.lists(st.tuples(LOG_PROBS, LOG_PROBS, ADVANTAGES) | NEAR, max_size=40)


def tensors(tokens: list[tuple[float, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    columns = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def in_float32(
    tokens: tuple[Tensor, Tensor, Tensor], eps: float, eps_high: float, *, narrow_eps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """ppo_kl, loss and clipped, as trainers in float32 write them; eps rounded first or not."""
    log_probs, old, advantages = (one.float() for one in tokens)
    ppo_kl = old - log_probs
    ratio = torch.exp(-ppo_kl)
    low, high = 1.0 - eps, 1.0 + eps_high
    if narrow_eps:
        low = float(np.float32(1.0) - np.float32(eps))
        high = float(np.float32(1.0) + np.float32(eps_high))
    surrogate = -ratio * advantages
    bounded = -ratio.clamp(low, high) * advantages
    loss = torch.maximum(surrogate, bounded)
    return ppo_kl.double(), loss.double(), bounded > surrogate


@given(TOKENS, EPS)
def test_equals_a_loop_over_tokens(
    tokens: list[tuple[float, ...]], eps: tuple[float, float | None]
) -> None:
    columns = tensors(tokens)
    result = ppo_clip(*columns, eps_clip=eps[0], eps_clip_high=eps[1])
    expected = references.ppo_clip(
        *(column.tolist() for column in columns), eps_clip=eps[0], eps_clip_high=eps[1]
    )
    assert result.log_ratio.tolist() == expected.log_ratio
    assert result.ppo_kl.tolist() == [-one for one in expected.log_ratio]
    assert result.ratio.tolist() == pytest.approx(expected.ratio, rel=1e-14)
    assert result.pg_loss.tolist() == pytest.approx(expected.pg_loss, rel=1e-14)
    assert result.clipped.tolist() == expected.clipped


@pytest.mark.parametrize("narrow_eps", [False, True])
@given(tokens=TOKENS, eps=EPS)
def test_float32_trainers_lie_within_the_bound(
    narrow_eps: bool, tokens: list[tuple[float, ...]], eps: tuple[float, float | None]
) -> None:
    columns = tensors(tokens)
    low, high = eps
    exact = ppo_clip(*columns, eps_clip=low, eps_clip_high=high)
    bound = ppo_clip_error(*columns, eps_clip=low, eps_clip_high=high)
    wide = low if high is None else high
    ppo_kl, loss, clipped = in_float32(columns, low, wide, narrow_eps=narrow_eps)
    assert ((ppo_kl - exact.ppo_kl).abs() <= bound.ppo_kl).all()
    assert ((loss - exact.pg_loss).abs() <= bound.pg_loss).all()
    assert (bound.undecided | (clipped == exact.clipped.bool())).all()


@given(st.lists(st.tuples(float32s(-3, 0), float32s(-3, 0), float32s(-2, 2)), max_size=20))
def test_the_bound_of_ordinary_tokens_is_small(tokens: list[tuple[float, ...]]) -> None:
    columns = tensors(tokens)
    exact, bound = ppo_clip(*columns), ppo_clip_error(*columns)
    assert (bound.pg_loss <= 2e-6 * exact.pg_loss.abs() + 1e-37).all()
    assert (bound.ppo_kl <= 1e-7 * exact.ppo_kl.abs()).all()


def test_golden_tokens() -> None:
    """G09."""
    log_probs = torch.tensor([-0.9, -1.5, -0.3, -2.2, -0.7, -1.0])
    old_log_probs = torch.tensor([-1.2, -1.0, -0.4, -2.0, -2.2, -1.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 0.5])
    result = ppo_clip(log_probs, old_log_probs, advantages, eps_clip_high=0.28)
    ratio = [1.34985888, 0.606530666, 1.10517097, 0.818730712, 4.48168898, 1.0]
    loss = [-1.27999997, -0.606530666, 1.10517097, 0.818730712, 4.48168898, -0.5]
    assert result.ratio.tolist() == pytest.approx(ratio, rel=2e-7)
    assert result.pg_loss.tolist() == pytest.approx(loss, rel=2e-7)
    assert result.pg_loss.mean().item() == pytest.approx(0.669843376, rel=2e-7)
    assert result.clipped.mean().item() == pytest.approx(1 / 6)


def test_clipping_is_counted_where_the_loss_strictly_changes() -> None:
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 1.5, 1.0], [1.0, -1.0, 1.0, -1.0, 0.0, 1.0]
    log_probs = torch.tensor(ratios, dtype=torch.float64).log()
    result = ppo_clip(
        log_probs, torch.zeros_like(log_probs), torch.tensor(advantages).double(), eps_clip=0.25
    )
    assert result.clipped.tolist() == [1, 0, 0, 1, 0, 0]
    assert result.pg_loss.tolist() == pytest.approx([-1.25, 1.5, -0.5, 0.75, 0.0, -1.0])


def test_a_token_exactly_on_the_bound_of_its_sign_is_undecided() -> None:
    old_log_probs = torch.zeros(4)
    log_probs = torch.tensor([1.25, 1.25, 0.75, 0.75]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    bound = ppo_clip_error(log_probs, old_log_probs, advantages, eps_clip=0.25)
    assert bound.undecided.tolist() == [True, False, False, True]
    still = ppo_clip_error(old_log_probs, old_log_probs, advantages, eps_clip=0.0)
    assert still.undecided.all()


def test_an_advantage_of_0_is_decided_and_exact() -> None:
    bound = ppo_clip_error(torch.tensor([0.2]).log(), torch.zeros(1), torch.zeros(1))
    assert bound.undecided.tolist() == [False]
    assert bound.pg_loss.tolist() == [0.0]


def test_a_token_far_beyond_its_bound_errs_by_the_bound_only() -> None:
    bound = ppo_clip_error(torch.tensor([0.0]), torch.tensor([-80.0]), torch.tensor([1.0]))
    assert bound.pg_loss.item() < 4e-7


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_an_undefined_input_has_no_bound_and_is_decided(column: int, bad: float) -> None:
    columns = torch.full((3, 2), -1.0)
    columns[column, 0] = bad
    bound = ppo_clip_error(*columns)
    assert bound.undecided.tolist() == [False, False]
    assert bound.ppo_kl.isnan().tolist() == [column < 2, False]
    assert bound.ppo_kl[1] == 0.0
    if column == 2:
        assert bound.pg_loss.isnan().tolist() == [True, False]


@pytest.mark.parametrize("column", [0, 1, 2])
def test_nan_gives_a_nan_loss_that_is_not_clipped(column: int) -> None:
    columns = torch.full((3, 2), -1.0)
    columns[column, 0] = math.nan
    result = ppo_clip(*columns)
    assert result.pg_loss.isnan().tolist() == [True, False]
    assert result.clipped.tolist() == [0.0, 0.0]
    assert ppo_clip_error(*columns).pg_loss.isnan().tolist() == [True, False]


def test_an_overflow_of_float32_alone_is_outside_the_bound() -> None:
    columns = torch.tensor([0.0]), torch.tensor([-100.0]), torch.tensor([-1.0])
    exact = ppo_clip(*(column.double() for column in columns)).pg_loss
    narrow = ppo_clip(*columns).pg_loss
    assert exact.isfinite().all()
    assert narrow.isinf().all()
    assert not ((narrow - exact).abs() <= ppo_clip_error(*columns).pg_loss).any()


def test_inputs_are_not_changed() -> None:
    columns = torch.tensor([[-1.0], [-2.0], [1.0]])
    ppo_clip(*columns)
    ppo_clip_error(*columns)
    assert columns.tolist() == [[-1.0], [-2.0], [1.0]]


def test_inputs_of_different_length_are_refused() -> None:
    with pytest.raises(StageError, match="ppo_clip: advantages has 2 along N, expected 1"):
        ppo_clip(torch.ones(1), torch.ones(1), torch.ones(2))
