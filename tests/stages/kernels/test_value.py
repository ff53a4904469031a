import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import reference_losses
from tests.helpers.packed import float32s
from trajreplay.schema import StageError
from trajreplay.stages.kernels.value import value_loss

REWARDS = float32s(-20.0, 20.0) | float32s(-1.0, 1.0)
TOKENS = st.lists(st.tuples(REWARDS, REWARDS, REWARDS), max_size=15)
Tokens = list[tuple[float, float, float]]

G25 = torch.tensor([[0.5, 1.5, -0.2], [1.0, 1.0, 0.0], [0.4, 0.9, 0.3]])


@given(
    huber_delta=st.sampled_from([None, 10.0, 0.5]),
    tokens=TOKENS,
    value_clip=st.sampled_from([None, 0.2, 0.5]),
    factor=st.sampled_from([0.5, 1.0]),
)
def test_equals_a_loop(
    huber_delta: float | None, tokens: Tokens, value_clip: float | None, factor: float
) -> None:
    values, returns, old_values = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 3).T
    expected = [
        reference_losses.value_loss(
            *token, value_clip=value_clip, factor=factor, huber_delta=huber_delta
        )
        for token in tokens
    ]
    for counted, flag in (("loss", 1), ("value", 2)):
        found = value_loss(
            values,
            returns,
            old_values,
            value_clip=value_clip,
            factor=factor,
            huber_delta=huber_delta,
            counted=counted,
        )
        losses = [one[0] for one in expected]
        assert found.value_loss.tolist() == pytest.approx(losses, rel=1e-12, abs=1e-300)
        assert found.clipped.tolist() == [one[flag] for one in expected]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.2)])
@given(tokens=st.lists(st.tuples(*[float32s(-1.0, 1.0)] * 3), max_size=9))
def test_narrow_inputs_give_narrow_results_near_the_exact(
    dtype: torch.dtype, near: float, tokens: Tokens
) -> None:
    values, returns, old_values = torch.tensor(tokens).reshape(-1, 3).to(dtype).T
    found = value_loss(values, returns, old_values, value_clip=0.2)
    exact = value_loss(values.double(), returns.double(), old_values.double(), value_clip=0.2)
    assert {one.dtype for one in found} == {dtype}
    difference = (found.value_loss.double() - exact.value_loss).abs()
    assert (difference <= near * exact.value_loss.clamp(min=0.1)).all()


def test_golden_values() -> None:
    """G25: slime's factor and count, and verl's."""
    values, returns, old_values = G25
    slime = value_loss(values, returns, old_values, value_clip=0.2, factor=1.0, counted="value")
    assert slime.value_loss.tolist() == pytest.approx([0.25, 0.25, 0.04], rel=1e-6)
    assert slime.value_loss.mean().item() == pytest.approx(0.18, rel=1e-6)
    assert slime.clipped.mean().item() == pytest.approx(0.6667, abs=1e-4)
    verl = value_loss(values, returns, old_values, value_clip=0.2)
    assert verl.value_loss.mean().item() == pytest.approx(0.09, rel=1e-6)
    assert verl.clipped.sum() == 0.0


def test_without_a_clip_old_values_play_no_part() -> None:
    values, returns, _ = G25
    found = value_loss(values, returns)
    assert found.value_loss.tolist() == (0.5 * (values - returns) ** 2).tolist()
    assert found.clipped.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("counted", ["loss", "value"])
def test_nan_gives_a_nan_loss_that_is_not_clipped(column: int, counted: str) -> None:
    columns = torch.zeros(3, 1)
    columns[column] = math.nan
    found = value_loss(*columns, value_clip=0.2, counted=counted)
    assert found.value_loss.isnan().all()
    assert found.clipped.sum() == 0.0


def test_inputs_are_not_changed() -> None:
    columns = torch.tensor([[1.0], [2.0], [3.0]])
    value_loss(*columns, value_clip=0.2).value_loss.zero_()
    assert columns.tolist() == [[1.0], [2.0], [3.0]]


def test_bad_arguments_are_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(StageError, match=r"old_values is None, expected \(N,\) values"):
        value_loss(one, one, value_clip=0.2)
    with pytest.raises(StageError, match=r"value_clip is -1\.0, expected more than 0"):
        value_loss(one, one, one, value_clip=-1.0)
    with pytest.raises(StageError, match=r"huber_delta is 0\.0, expected more than 0"):
        value_loss(one, one, huber_delta=0.0)
    with pytest.raises(StageError, match="no counted 'both', expected one of loss, value"):
        value_loss(one, one, counted="both")
    with pytest.raises(StageError, match="returns has 2 along N, expected 1"):
        value_loss(one, torch.ones(2))
    with pytest.raises(StageError, match="old_values has 2 along N, expected 1"):
        value_loss(one, one, torch.ones(2), value_clip=0.2)
