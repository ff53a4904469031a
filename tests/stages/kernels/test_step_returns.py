from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.packed import float32s
from trajreplay.schema import StageError
from trajreplay.stages.kernels import step_returns

TRAJECTORIES = st.lists(
    st.lists(float32s(-10.0, 10.0), min_size=1, max_size=6), min_size=0, max_size=5
)


def shuffled(rows: list[list[float]], seed: int) -> list[tuple[float, int, int]]:
    steps = [
        (value, name, place) for name, row in enumerate(rows) for place, value in enumerate(row)
    ]
    Random(seed).shuffle(steps)
    return steps


@given(TRAJECTORIES, st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 9))
def test_returns_equal_a_loop_in_any_order(
    rows: list[list[float]], gamma: float, seed: int
) -> None:
    steps = shuffled(rows, seed)
    rewards, names, places = (
        (list(part) for part in zip(*steps, strict=True)) if steps else ([],) * 3
    )
    found = step_returns(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(names, dtype=torch.int64) * 7 - 3,
        torch.tensor(places, dtype=torch.int64),
        gamma=gamma,
    )
    expected = [
        sum(gamma ** (later - place) * rows[name][later] for later in range(place, len(rows[name])))
        for _, name, place in steps
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("places", [[0, 2], [1, 2], [0, 0], [-1, 0]])
def test_a_trajectory_without_one_of_its_steps_is_refused(places: list[int]) -> None:
    with pytest.raises(StageError, match=r"steps of 1 of 2 trajectories are not 0, 1, 2"):
        step_returns(torch.ones(3), torch.tensor([4, 4, 5]), torch.tensor([*places, 0]))


def test_a_reward_that_is_missing_reaches_the_steps_before_it() -> None:
    rewards = torch.tensor([1.0, torch.nan, 1.0, 1.0])
    found = step_returns(rewards, torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 0]))
    assert found.isnan().tolist() == [True, True, False, False]
