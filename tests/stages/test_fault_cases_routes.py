"""Real faults of captured routes: found by their checks, and by what sampler and trainer chose."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.captures import record, sample
from trajreplay import Lake
from trajreplay.stages import CohortReport

FILE = Path(__file__).parent.parent / "cases" / "fault_cases.json"
CASES = {one["id"]: one for one in json.loads(FILE.read_text())}
EXPERTS = 16
SIDES = ["right", "wrong"]


def _record(lake: Lake, routes: dict[str, Any], response: int, numbers: list[int]) -> None:
    """One sample, all tokens after the first of which the model answers with."""

    def use(builder: Any) -> None:
        builder.samples([sample(0, response, total_length=response + 1)])
        values = torch.linspace(-2.0, -0.1, response)
        builder.tensor("old_log_probs", [values])
        builder.tensor("rollout_log_probs", [values])
        for name, given in routes.items():
            builder.routes(name, [given], num_experts=EXPERTS, layer_numbers=numbers)

    record(lake, use)


def _judged(lake: Lake) -> tuple[CohortReport, list[str]]:
    """The report of the only cohort, and the faults that are named."""
    (cohort,) = lake.replay().cohorts
    explained = lake.explain().explanations
    return cohort, [one.first.faults[0] for one in explained if one.first is not None]


def _equal_sets(lake: Lake) -> dict[int | None, float]:
    rows = lake.route_agreement().table.to_pylist()
    return {row["layer"]: row["equal_sets"] for row in rows}


@pytest.mark.parametrize("side", SIDES)
def test_routes_shifted_by_a_dense_layer_are_found(lake: Lake, side: str) -> None:
    """K-047: what each layer replays is that of the layer before, the dense one's zeros first."""
    case = CASES["K-047"]
    numbers = case["config"]["trainer_routers"]
    engine = case["inputs"]["routes_by_engine_layer"]
    replayed = [case[side]["replayed"][str(layer)] for layer in numbers]
    sampled = [engine[layer] for layer in numbers]
    routes = {
        name: np.array([choices] * 3, np.int16)
        for name, choices in (("rollout_experts", sampled), ("old_experts", replayed))
    }
    _record(lake, routes, 2, numbers)
    cohort, named = _judged(lake)
    agree = _equal_sets(lake)
    if side == "right":
        assert not [one for one in cohort.findings if one.check.startswith("route.")]
        assert not named
        assert set(agree.values()) == {1.0}
        return
    assert cohort.first_divergent_stage == case["stage"]
    assert named == ["route.duplicate"]
    assert set(agree.values()) == {0.0}


@pytest.mark.parametrize("side", SIDES)
def test_rows_of_zeros_from_a_cache_are_found(lake: Lake, side: str) -> None:
    """K-049: of four tokens two have zeros, and a third agrees by half."""
    case = CASES["K-049"]
    reference = case["inputs"]["reference"]
    recorded = reference if side == "right" else case["inputs"]["recorded"]
    routes = {
        name: np.array([[row] for row in rows], np.int16)
        for name, rows in (("rollout_experts", recorded), ("old_experts", reference))
    }
    _record(lake, routes, len(reference), [0])
    cohort, named = _judged(lake)
    # Agreement of a token is that of its whole set: a half of it counts as none.
    whole = np.mean([one == 1.0 for one in case[side]["agreement"]])
    assert _equal_sets(lake)[0] == whole
    found = [one for one in cohort.findings if one.check == "route.duplicate"]
    if side == "right":
        assert not found
        assert not named
        return
    (one,) = found
    assert (one.severity, one.stage) == ("error", "sample")
    assert f"{case['wrong']['rows_all_zero']} of {len(reference)} rows" in one.message
    assert named == ["route.duplicate"]
