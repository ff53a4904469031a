"""What short answers and a policy that is sure of itself give by chance is no finding."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cohorts import capture
from tests.helpers.scenes import WAY
from tests.helpers.trainer import Sample
from trajreplay import Lake
from trajreplay.stages import Finding

COLUMNS = ("rollout_log_probs", "old_log_probs")


def _answer(number: int, group: str, sampled: np.ndarray, old: np.ndarray) -> Sample:
    one = Sample(f"s-{number}", group, [1] * len(sampled), float(number % 2))
    for name, values in zip(COLUMNS, (sampled, old), strict=True):
        one.columns[name] = torch.tensor(values, dtype=torch.float32)
    return one


def _answers(seed: int, size: int, length: int, deciding: int, drift: float) -> list[Sample]:
    """Answers of which a few tokens are open, and the sampler is behind the trainer there."""
    numbers = np.random.default_rng(seed)
    found = []
    for row in range(size):
        sampled, old = -np.abs(numbers.normal(0.0, 1e-4, (2, length))) - 1e-6
        chance = numbers.uniform(0.05, 0.95, deciding)
        moved = np.log(chance / (1 - chance)) + numbers.normal(0.0, drift, deciding)
        sampled[:deciding], old[:deciding] = np.log(chance), -np.log1p(np.exp(-moved))
        found.append(_answer(row, f"g-{row // 4}", sampled, old))
    return found


def _found(shares: dict[int, list[Sample]], columns: Sequence[str] = COLUMNS) -> dict[str, Finding]:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(f"{folder}/lake")
        capture(lake, shares, WAY, columns=columns, stages=["sample"], settings=WAY.full)
        (cohort,) = lake.replay().cohorts
    return {one.check: one for one in cohort.findings}


@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([8, 16, 64]),
    length=st.integers(4, 9),
    deciding=st.integers(1, 4),
    drift=st.sampled_from([0.3, 0.6, 1.5]),
)
def test_an_answer_that_is_near_to_another_by_chance_is_not_permuted(
    seed: int, size: int, length: int, deciding: int, drift: float
) -> None:
    samples = _answers(seed, size, length, deciding, drift)
    found = _found({0: samples[::2], 1: samples[1::2]})
    assert [one for one in found.values() if one.severity == "error"] == []


@given(
    seed=st.integers(0, 2**20),
    order=st.permutations(range(12)).filter(lambda one: sum(i != j for i, j in enumerate(one)) > 1),
    length=st.integers(6, 20),
)
def test_samples_that_changed_places_are_found_beside_some_that_are_near_certain(
    seed: int, order: Sequence[int], length: int
) -> None:
    samples = _answers(seed, 12, length, 6, 0.001)
    sure = _answers(seed + 1, 12, length, 1, 0.001)
    held = [one.columns["rollout_log_probs"] for one in samples]
    for one, source in zip(samples, order, strict=True):
        one.columns["rollout_log_probs"] = held[source]
    for number, one in enumerate(sure):
        one.sample_id, one.group = f"t-{number}", f"h-{number // 4}"
    found = _found({0: samples, 1: sure})
    permuted = found["sample.permuted"]
    assert permuted.severity == "error"
    moved = sum(at != source for at, source in enumerate(order))
    assert f"of {moved} samples" in permuted.message
    first = next(at for at, source in enumerate(order) if at != source)
    assert (permuted.sample_id, permuted.message.split()[-1]) == (f"s-{first}", f"s-{order[first]}")


@given(
    seed=st.integers(0, 2**20),
    prompts=st.integers(1, 4),
    size=st.sampled_from([2, 4, 8]),
    length=st.integers(8, 40),
    ranks=st.integers(2, 4),
)
def test_a_policy_that_says_one_thing_for_each_prompt_doubles_no_rank(
    seed: int, prompts: int, size: int, length: int, ranks: int
) -> None:
    """Greedy or collapsed: the samples of a prompt are equal, and lie on every rank."""
    numbers = np.random.default_rng(seed)
    said = -np.abs(numbers.normal(0.0, 1.0, (prompts, length))) - 1e-3
    rows = [
        _answer(number, f"g-{number % prompts}", said[number % prompts], said[number % prompts])
        for number in range(prompts * size)
    ]
    shares = {
        rank: rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks]
        for rank in range(ranks)
    }
    found = _found(shares)
    assert [one for one in found.values() if one.severity == "error"] == []


@given(seed=st.integers(0, 2**20), groups=st.integers(1, 3), length=st.integers(16, 40))
def test_a_rank_with_all_samples_of_another_is_found(seed: int, groups: int, length: int) -> None:
    numbers = np.random.default_rng(seed)
    said = -np.abs(numbers.normal(0.0, 1.0, (4 * groups, length))) - 1e-3
    shares = {
        rank: [
            _answer(row + 100 * rank, f"g-{rank}-{row // 4}", values, values)
            for row, values in enumerate(said)
        ]
        for rank in (0, 1)
    }
    assert _found(shares)["rank.doubled"].severity == "error"


@pytest.mark.parametrize(("certainty", "said"), [(0.99, False), (0.3, True)])
def test_equal_responses_are_remarked_where_the_policy_makes_them_unlikely(
    certainty: float, said: bool
) -> None:
    """A response of ten tokens that has nine in ten of the probability is there more than once."""
    numbers = np.random.default_rng(0)
    base = np.log(certainty + numbers.uniform(-0.005, 0.005, (8, 10)))
    samples = [_answer(row, f"g-{row // 4}", base[row], base[row]) for row in range(8)]
    samples[3] = _answer(3, "g-0", base[1], base[1])
    found = _found({0: samples})
    assert ("sample.duplicated" in found) == said
    if said:
        assert (found["sample.duplicated"].severity, found["sample.duplicated"].sample_id) == (
            "warning",
            "s-3",
        )


@pytest.mark.parametrize("certainty", [0.9999, 0.5])
def test_prompts_that_several_ranks_were_given_double_none_where_their_answers_are_sure(
    certainty: float,
) -> None:
    """A small dataset repeats within a batch, and a greedy policy repeats itself."""
    numbers = np.random.default_rng(0)
    said = np.log(certainty) * numbers.uniform(0.5, 1.0, (4, 10))
    shares = {
        rank: [
            _answer(row + 100 * rank, f"g-{rank}-{row}", values, values)
            for row, values in enumerate(said)
        ]
        for rank in (0, 1)
    }
    assert ("rank.doubled" in _found(shares)) == (certainty == 0.5)


@pytest.mark.parametrize(("length", "said"), [(10, False), (40, True)])
def test_what_another_policy_finds_unlikely_the_sampler_may_have_been_sure_of(
    length: int, said: bool
) -> None:
    numbers = np.random.default_rng(0)
    moved = -np.abs(numbers.normal(3.0, 1.0, (8, length)))
    samples = [_answer(row, f"g-{row // 4}", moved[row], moved[row]) for row in range(8)]
    samples[3] = _answer(3, "g-0", moved[1], moved[1])
    found = _found({0: samples}, columns=COLUMNS[1:])
    assert ("sample.duplicated" in found) == said
