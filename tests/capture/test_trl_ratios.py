"""The ratios of a micro-batch of TRL: those of trained tokens, whatever a padding holds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.capture.trl.hooks import _extremes

NUMBER = st.floats(-4.0, 0.0, width=32)
PADDED = st.one_of(NUMBER, st.sampled_from([math.inf, -math.inf, math.nan]))


@given(st.data(), st.booleans(), st.sampled_from([torch.bool, torch.int64, torch.float32]))
def test_a_padding_tells_nothing_whatever_it_holds(
    data: st.DataObject, is_old_told: bool, dtype: torch.dtype
) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=1, max_size=8))
    now, old = ([data.draw(NUMBER if one else PADDED) for one in mask] for _ in range(2))
    inputs = {"completion_mask": torch.tensor([mask]).to(dtype)}
    if is_old_told:
        inputs["old_per_token_logps"] = torch.tensor([old])
    found = [float(one) for one in _extremes(torch.tensor([now]), inputs)]
    tokens = zip(mask, now, old, strict=True)
    moved = [new - before if one and is_old_told else 0.0 for one, new, before in tokens]
    assert found == pytest.approx([math.exp(max(moved)), math.exp(min(moved))], rel=1e-5)


def test_a_trained_token_that_is_undefined_is_told() -> None:
    inputs = {"completion_mask": torch.ones(1, 2), "old_per_token_logps": torch.zeros(1, 2)}
    found = _extremes(torch.tensor([[math.nan, 0.0]]), inputs)
    assert all(math.isnan(one) for one in found)
