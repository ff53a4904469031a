import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import reference_losses
from tests.helpers.packed import float32s
from trajreplay.schema import StageError
from trajreplay.stages.kernels.clipping import (
    BOUNDS,
    SIDES,
    cispo_loss,
    clip_loss,
    policy_gradient_loss,
)
from trajreplay.stages.kernels.ratio import sequence_log_ratio

LOG_PROBS = [-0.9, -1.5, -0.3, -2.2, -0.7, -1.0]
OLD = [-1.2, -1.0, -0.4, -2.0, -2.2, -1.0]
ADVANTAGES = [1.0, 1.0, -1.0, -1.0, -1.0, 0.5]

EPS = st.sampled_from([(0.2, 0.28), (0.0, 0.0), (0.5, 1.5), (1.0, 3.0)])
TOKENS = st.lists(
    st.tuples(
        float32s(-30.0, 0.0),
        # An exponential that is 1 but for its last bit is on either side of a bound of 1.
        (float32s(-30.0, 30.0) | float32s(-1.0, 1.0)).filter(lambda x: x == 0 or abs(x) > 1e-9),
        st.sampled_from([0.0, 1.0, -1.0]) | float32s(-5.0, 5.0),
    ),
    max_size=15,
)
Tokens = list[tuple[float, float, float]]


def columns(tokens: Tokens, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return list(torch.tensor(tokens, dtype=torch.float64).reshape(-1, 3).T.to(dtype))


def golden() -> list[torch.Tensor]:
    """The log-probs, log-ratios and advantages of G09."""
    log_probs = torch.tensor(LOG_PROBS)
    return [log_probs, log_probs - torch.tensor(OLD), torch.tensor(ADVANTAGES)]


@pytest.mark.parametrize("dual_side", SIDES)
@given(tokens=TOKENS, eps=EPS, dual_clip=st.sampled_from([None, 1.1, 3.0]))
def test_the_clipped_loss_equals_a_loop(
    dual_side: str, tokens: Tokens, eps: tuple[float, float], dual_clip: float | None
) -> None:
    _, log_ratio, advantages = columns(tokens)
    found = clip_loss(
        log_ratio,
        advantages,
        eps_clip=eps[0],
        eps_clip_high=eps[1],
        dual_clip=dual_clip,
        dual_side=dual_side,
    )
    expected = [
        reference_losses.clip_loss(
            ratio, advantage, low=eps[0], high=eps[1], dual_clip=dual_clip, dual_side=dual_side
        )
        for _, ratio, advantage in tokens
    ]
    assert found.pg_loss.tolist() == pytest.approx([one[0] for one in expected], rel=1e-13)
    assert found.clipped.tolist() == [one[1] for one in expected]
    assert found.dual_clipped.tolist() == [one[2] for one in expected]


@pytest.mark.parametrize("bounds", BOUNDS)
@given(tokens=TOKENS, eps=EPS)
def test_cispo_equals_a_loop(bounds: str, tokens: Tokens, eps: tuple[float, float]) -> None:
    low, high = eps
    found = cispo_loss(*columns(tokens), eps_clip=low, eps_clip_high=high, bounds=bounds)
    weights = [
        reference_losses.cispo_weight(ratio, advantage, low=low, high=high, bounds=bounds)
        for _, ratio, advantage in tokens
    ]
    losses = [-w * token[2] * token[0] for w, token in zip(weights, tokens, strict=True)]
    assert found.weight.tolist() == pytest.approx(weights, rel=1e-13)
    assert found.pg_loss.tolist() == pytest.approx(losses, rel=1e-13)
    for flag, weight, (_, ratio, advantage) in zip(
        found.clipped.tolist(), weights, tokens, strict=True
    ):
        changed = weight != math.exp(ratio)
        assert flag == (changed and (bounds != "upper-absolute" or advantage > 0))


@given(tokens=TOKENS)
def test_the_plain_gradient_equals_a_loop(tokens: Tokens) -> None:
    log_probs, _, advantages = columns(tokens)
    found = policy_gradient_loss(log_probs, advantages)
    assert found.tolist() == [-advantage * log_prob for log_prob, _, advantage in tokens]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@given(tokens=st.lists(st.tuples(float32s(-3, 0), float32s(-1, 1), float32s(-2, 2)), max_size=9))
def test_narrow_inputs_give_narrow_results_near_the_exact(
    dtype: torch.dtype, near: float, tokens: Tokens
) -> None:
    narrow = columns(tokens, dtype)
    wide = [column.double() for column in narrow]
    for found, exact in zip(
        (clip_loss(*narrow[1:]).pg_loss, cispo_loss(*narrow).pg_loss, cispo_loss(*narrow).clipped),
        (clip_loss(*wide[1:]).pg_loss, cispo_loss(*wide).pg_loss, None),
        strict=True,
    ):
        assert found.dtype == dtype
        if exact is not None:
            assert ((found.double() - exact).abs() <= near * exact.abs().clamp(min=0.1)).all()


def test_golden_dual_clip() -> None:
    """G09: without and with c = 3."""
    _, log_ratio, advantages = golden()
    plain = clip_loss(log_ratio, advantages, eps_clip_high=0.28)
    assert plain.pg_loss.mean().item() == pytest.approx(0.669843376, rel=2e-7)
    assert plain.clipped.mean().item() == pytest.approx(1 / 6)
    assert plain.dual_clipped.sum() == 0.0
    for side in SIDES:
        dual = clip_loss(log_ratio, advantages, eps_clip_high=0.28, dual_clip=3.0, dual_side=side)
        assert dual.pg_loss[4] == 3.0
        assert dual.pg_loss.mean().item() == pytest.approx(0.422895193, rel=2e-7)
        assert dual.dual_clipped.tolist() == [0, 0, 0, 0, 1, 0]


def test_golden_cispo() -> None:
    """G10: the three ways to read the same bounds."""
    two_sided = cispo_loss(*golden(), eps_clip_high=0.28)
    expected = [1.152, 1.2, -0.331551313, -1.80120766, -0.896, 0.5]
    assert two_sided.pg_loss.tolist() == pytest.approx(expected, rel=3e-7)
    assert two_sided.clipped.tolist() == [1, 1, 0, 0, 1, 0]
    by_sign = cispo_loss(*golden(), eps_clip_high=0.28, bounds="by-sign")
    expected = [1.152, 0.909796, -0.331551313, -1.80120766, -3.13718224, 0.5]
    assert by_sign.pg_loss.tolist() == pytest.approx(expected, rel=3e-7)
    absolute = cispo_loss(*golden(), eps_clip_high=5.0, bounds="upper-absolute")
    expected = [1.21487296, 0.909796, -0.331551313, -1.80120766, -3.13718224, 0.5]
    assert absolute.pg_loss.tolist() == pytest.approx(expected, rel=3e-7)
    tight = cispo_loss(*golden(), eps_clip_high=0.28, bounds="upper-absolute")
    expected = [0.252, 0.42, -0.0840000063, -0.616, -0.196, 0.14]
    assert tight.pg_loss.tolist() == pytest.approx(expected, rel=3e-7)
    assert tight.clipped.tolist() == [1, 1, 0, 0, 0, 1]


def test_golden_gspo() -> None:
    """G12: the ratio of the sample in the place of the tokens'."""
    _, log_ratio, _ = golden()
    tokens = sequence_log_ratio(log_ratio[:3], torch.ones(3), torch.tensor([0, 3]))
    for advantages, mean in (([1.0, 1.0, 1.0], -0.967216194), ([1.0, 2.0, 3.0], -1.93443239)):
        loss = clip_loss(tokens, torch.tensor(advantages), eps_clip_high=0.28).pg_loss
        assert loss.mean().item() == pytest.approx(mean, rel=2e-7)


def test_a_dual_clip_below_the_upper_bound_depends_on_its_side() -> None:
    log_ratio, advantages = torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])
    negative = clip_loss(log_ratio, advantages, eps_clip=0.5, dual_clip=1.25)
    both = clip_loss(log_ratio, advantages, eps_clip=0.5, dual_clip=1.25, dual_side="both")
    assert negative.pg_loss.tolist() == [-1.5, 1.25]
    assert both.pg_loss.tolist() == [-1.25, 1.5]


def test_nan_is_not_clipped() -> None:
    nan, one = torch.tensor([math.nan]), torch.ones(1)
    assert clip_loss(nan, one, dual_clip=3.0).pg_loss.isnan().all()
    assert clip_loss(nan, -one, dual_clip=3.0).dual_clipped.sum() == 0.0
    for bounds in BOUNDS:
        assert cispo_loss(one, nan, one, eps_clip_high=0.2, bounds=bounds).clipped.sum() == 0.0


def test_inputs_are_not_changed() -> None:
    inputs = torch.tensor([[-1.0], [0.5], [1.0]])
    clip_loss(*inputs[1:], dual_clip=3.0).pg_loss.zero_()
    cispo_loss(*inputs).weight.zero_()
    policy_gradient_loss(*inputs[::2]).zero_()
    assert inputs.tolist() == [[-1.0], [0.5], [1.0]]


def test_bad_arguments_are_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(StageError, match=r"dual_clip is 1\.0, expected more than 1"):
        clip_loss(one, one, dual_clip=1.0)
    with pytest.raises(StageError, match="no dual_side 'up', expected one of negative, both"):
        clip_loss(one, one, dual_side="up")
    with pytest.raises(StageError, match="advantages has 2 along N, expected 1"):
        clip_loss(one, torch.ones(2))
    with pytest.raises(StageError, match="eps_clip_high is None, expected the highest ratio"):
        cispo_loss(one, one, one, bounds="upper-absolute")
    with pytest.raises(StageError, match="no bounds 'low', expected one of two-sided, by-sign"):
        cispo_loss(one, one, one, bounds="low")
    with pytest.raises(StageError, match="advantages has 2 along N, expected 1"):
        policy_gradient_loss(one, torch.ones(2))
