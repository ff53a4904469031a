import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import reference_advantages as references
from trajreplay.schema import StageError
from trajreplay.stages.kernels import decoupled_rewards, summed_rewards

SCORES = st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0, -2.0])
COMPONENTS = st.lists(st.tuples(SCORES, SCORES, SCORES), max_size=14)
WEIGHTS = [1.0, 0.5, -0.25]
MISSING = st.sampled_from(["keep", "exclude"])


def in_float64(rows: list[tuple[float, ...]], width: int = 3) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, width)


def with_gaps(rows: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Leave out whatever is 0.1, so that some samples have no component at all."""
    return [tuple(math.nan if one == 0.1 else one for one in row) for row in rows]


@given(COMPONENTS, MISSING)
def test_sums_equal_a_loop(rows: list[tuple[float, ...]], missing: str) -> None:
    rows = with_gaps(rows)
    total = summed_rewards(
        in_float64(rows), torch.tensor(WEIGHTS, dtype=torch.float64), missing=missing
    )
    expected = references.summed_rewards(rows, WEIGHTS, missing=missing)
    assert total.tolist() == pytest.approx(expected, nan_ok=True, abs=1e-12)


@given(
    COMPONENTS,
    st.lists(st.integers(0, 2), min_size=14, max_size=14),
    st.sampled_from(
        [
            {"baseline": "mean", "divisor": "std"},
            {"baseline": "leave-one-out", "divisor": "leave-one-out-std"},
            {"baseline": "mean", "divisor": "none"},
        ]
    ),
    st.sampled_from([None, 1e-4]),
    MISSING,
    st.sampled_from(["zero", "keep", "nan"]),
)
def test_decoupled_rewards_equal_a_loop(
    rows: list[tuple[float, ...]],
    groups: list[int],
    form: dict[str, str],
    batch_epsilon: float | None,
    missing: str,
    lone: str,
) -> None:
    rows = with_gaps(rows) if missing == "exclude" else rows
    groups = groups[: len(rows)]
    batches = [group // 2 for group in groups]
    options: dict[str, Any] = {
        "batch_epsilon": batch_epsilon,
        "missing": missing,
        "epsilon": 1e-4,
        "lone": lone,
        **form,
    }
    scored = decoupled_rewards(
        in_float64(rows),
        torch.tensor(WEIGHTS, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        batch_index=torch.tensor(batches, dtype=torch.int64),
        **options,
    )
    expected = references.decoupled_rewards(rows, WEIGHTS, groups, batch_index=batches, **options)
    assert scored.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)


def test_a_component_alone_in_its_group_adds_nothing_where_missing_ones_are_excluded() -> None:
    components = torch.tensor([[1.0, 5.0], [3.0, torch.nan], [torch.nan, torch.nan]])
    scored = decoupled_rewards(
        components,
        torch.ones(2),
        torch.zeros(3),
        batch_epsilon=None,
        divisor="none",
        lone="nan",
        missing="exclude",
    )
    assert scored.tolist() == [-1.0, 1.0, 0.0]


@given(COMPONENTS)
def test_order_of_components_does_not_matter(rows: list[tuple[float, ...]]) -> None:
    weights, groups = torch.tensor(WEIGHTS, dtype=torch.float64), torch.arange(len(rows)) % 2
    scored = decoupled_rewards(in_float64(rows), weights, groups)
    mirrored = decoupled_rewards(in_float64(rows).flip(1), weights.flip(0), groups)
    torch.testing.assert_close(scored, mirrored, rtol=1e-9, atol=1e-9)


def test_a_batch_whose_sums_are_equal_scores_0_without_an_epsilon() -> None:
    scored = decoupled_rewards(
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2), torch.zeros(2), batch_epsilon=0.0
    )
    assert scored.tolist() == [0.0, 0.0]


def test_components_count_alike_whatever_their_scale() -> None:
    """What decoupling is for: summed first, the component in hundreds drowns the other."""
    components = torch.tensor([[1.0, 0.0], [0.0, 100.0], [0.0, 0.0], [1.0, 100.0]])
    scored = decoupled_rewards(components, torch.ones(2), torch.zeros(4), epsilon=0.0)
    assert scored[0] == pytest.approx(scored[1].item(), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    components = torch.ones(3, 2, dtype=dtype)
    assert summed_rewards(components, torch.ones(2)).dtype == dtype
    assert decoupled_rewards(components, torch.ones(2), torch.zeros(3)).dtype == dtype


def test_no_samples_and_no_components_give_nothing() -> None:
    empty = torch.zeros(0, 2)
    assert summed_rewards(empty, torch.ones(2)).tolist() == []
    assert decoupled_rewards(empty, torch.ones(2), torch.zeros(0)).tolist() == []
    assert summed_rewards(torch.zeros(2, 0), torch.ones(0), missing="exclude").tolist() == [0, 0]


def test_what_does_not_fit_is_refused() -> None:
    components = torch.ones(2, 2)
    with pytest.raises(StageError, match="weights has 3 along K, expected 2 as in components"):
        summed_rewards(components, torch.ones(3))
    with pytest.raises(StageError, match="no missing rule 'drop', expected one of keep, exclude"):
        summed_rewards(components, torch.ones(2), missing="drop")
    with pytest.raises(StageError, match="1 components, expected two or more"):
        decoupled_rewards(components[:, :1], torch.ones(1), torch.zeros(2))
    with pytest.raises(StageError, match="group_index has 3 along S, expected 2"):
        decoupled_rewards(components, torch.ones(2), torch.zeros(3))
