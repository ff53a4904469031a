"""Captured routes of two runs: where they part is what loops over every token and layer say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.captures import record, sample
from tests.helpers.cli import run
from tests.helpers.routed import EXPERTS, healthy
from trajreplay import Lake
from trajreplay.query.differences import DiffReport

PROMPT = 2


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def step(
    lake: Lake, run_id: str, routes: list[Any], numbers: list[int], order: list[int] | None = None
) -> None:
    """One step of samples with routes; `order` is that of its rows."""
    order = list(range(len(routes))) if order is None else order
    lengths = [3 + row for row in range(len(routes))]

    def use(capture: Any) -> None:
        capture.samples(
            [
                sample(row, lengths[row], sample_id=f"s-{row}", total_length=PROMPT + lengths[row])
                for row in order
            ]
        )
        capture.tensor("old_log_probs", [np.full(lengths[row], -1, np.float32) for row in order])
        capture.routes(
            "old_experts",
            [routes[row] for row in order],
            num_experts=EXPERTS,
            layer_numbers=numbers,
        )

    record(lake, use, run_id=run_id, step_id=0, stages=[])


def compared(lake: Lake) -> DiffReport:
    return Lake.open(lake.path).diff("a", "b")


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(1, 3),
    layers=st.integers(1, 4),
    share=st.sampled_from([0.0, 0.1, 0.7]),
    turned=st.booleans(),
)
def test_every_number_is_that_of_a_loop(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    samples: int,
    layers: int,
    share: float,
    turned: bool,
) -> None:
    lake = Lake.create(tmp_path_factory.mktemp("routed") / "lake")
    random = np.random.default_rng(seed)
    numbers = [3 * layer + 1 for layer in range(layers)]
    left = healthy([PROMPT + 3 + row for row in range(samples)], layers, 2, seed % 1000)
    right = [one.copy() for one in left]
    for one in right:
        for token_and_layer in np.ndindex(one.shape[:2]):
            if random.random() < share:
                one[token_and_layer] = (
                    one[token_and_layer][::-1]
                    if random.random() < 0.5
                    else (one[token_and_layer] + 1) % EXPERTS
                )
    order = list(range(samples))
    step(lake, "a", left, numbers)
    step(lake, "b", right, numbers, order[::-1] if turned else order)
    expected = {}
    for place, number in enumerate(numbers):
        found = [
            (row, token)
            for row in order
            for token in range(len(left[row]))
            if left[row][token, place].tolist() != right[row][token, place].tolist()
        ]
        if found:
            expected[number] = found
    report = compared(lake)
    fields = {one.layer: one for one in report.fields if one.field == "old_experts"}
    assert set(fields) == set(expected)
    assert (report.verdict == "same") is not bool(expected)
    for number, found in expected.items():
        of_layer, (row, token) = fields[number], found[0]
        assert (of_layer.sample_id, of_layer.token) == (f"s-{row}", token)
        assert of_layer.left == left[row][token, numbers.index(number)].tolist()
        assert of_layer.right == right[row][token, numbers.index(number)].tolist()
        assert (of_layer.differing_values, of_layer.values) == (len(found), sum(map(len, left)))
        assert (of_layer.differing_samples, of_layer.samples) == (
            len({row for row, _ in found}),
            samples,
        )


def test_what_one_side_lacks_differs(lake: Lake) -> None:
    whole = healthy([PROMPT + 3], 2, 2)
    step(lake, "a", whole, [0, 1])
    step(lake, "b", [whole[0][:, :1]], [0])
    (one,) = compared(lake).fields
    assert (one.layer, one.differing_values, one.values) == (1, 5, 5)
    assert (one.left, one.right) == (whole[0][0, 1].tolist(), None)


def test_a_sample_without_routes_differs_from_one_that_has_them(lake: Lake) -> None:
    routes = healthy([PROMPT + 3, PROMPT + 4], 1, 2)
    step(lake, "a", routes, [0])
    step(lake, "b", [routes[0], None], [0])
    (one,) = compared(lake).fields
    assert (one.layer, one.sample_id, one.differing_samples) == (None, "s-1", 1)
    assert (one.left, one.right) == ("routes", None)


def test_the_command_names_token_and_layer(lake: Lake) -> None:
    left = healthy([PROMPT + 3], 2, 2)
    right = [left[0].copy()]
    right[0][3, 1] = right[0][3, 1][::-1]
    step(lake, "a", left, [2, 5])
    step(lake, "b", right, [2, 5])
    outcome = run("diff", "a", "b", "--lake", lake.path)
    first = outcome.out.splitlines()[0]
    assert outcome.code == 1
    assert "stage sample, old_experts of sample s-0 at 3, layer 5 (rank 0)" in first
    assert "layer 5" in outcome.out.splitlines()[5]
    (row,) = json.loads(run("diff", "a", "b", "--lake", lake.path, "--format", "json").out)[
        "fields"
    ]
    assert (row["layer"], row["left"], row["right"]) == (
        5,
        left[0][3, 1].tolist(),
        right[0][3, 1].tolist(),
    )
