"""Each check on both sides of its bound and exactly at it; what is missing or not finite fails."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gates import HEALTHY
from tests.helpers.r3_traces import Layout, make_trace
from trajreplay import Lake
from trajreplay.query import Catalog
from trajreplay.query.routes.policy import STAGES
from trajreplay.schema.lakefile import open_lake
from trajreplay.stages.gate.checks import CHECKS_BY_NAME, judged
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.policy import Policy, load_gate_policy

UP = math.nextafter


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    lake = Lake.create(tmp_path_factory.mktemp("gate") / "lake")
    return Catalog.open(open_lake(lake.path))


def outcome(
    catalog: Catalog,
    check: str,
    changed: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    steps: int = 10,
) -> bool | None:
    """What a check says of healthy steps with one field changed, for all or step by step."""
    rows = {}
    for place in range(steps):
        told: dict[str, Any] = {"attempt": 0, **HEALTHY}
        for name, given in (changed or {}).items():
            told[name] = given[place] if isinstance(given, list) else given
        _fit(told)
        rows[place + 1] = told
    found = Evidence(catalog, "r", (0,), steps=rows, records=1)
    held = policy or load_gate_policy("router-replay")
    return judged(CHECKS_BY_NAME[check], found, held).passed


def _fit(told: dict[str, Any]) -> None:
    """Let what was not changed say the same: a token beyond 0.5 is counted, and is the largest."""
    largest, over = (told.get(name) for name in ("abs_delta_max", "over_0_5"))
    if largest == HEALTHY["abs_delta_max"] and over:
        told["abs_delta_max"] = 0.6
    elif over == HEALTHY["over_0_5"] and isinstance(largest, float) and largest > 0.5:
        told["over_0_5"] = 1


@pytest.mark.parametrize(
    ("check", "field", "holds", "fails"),
    [
        ("truncation", "truncation_rate", 0.8999, 0.9),
        ("delta_tail", "abs_delta_max", 1.0, UP(1.0, 2)),
        ("delta_tail", "over_1_0", 0, 1),
        ("generation_kl", "generation_kl", UP(0.001, 0), 0.001),
        ("generation_kl", "generation_kl", 0.0, -5e-324),
        ("nonzero_loss", "loss", 5e-324, 0.0),
        ("learning_signal", "reward_std", 5e-324, 0.0),
        ("learning_signal", "advantage_abs_max", 5e-324, 0.0),
    ],
)
def test_a_bound_is_exact(
    catalog: Catalog, check: str, field: str, holds: float, fails: float
) -> None:
    assert outcome(catalog, check, {field: holds}) is True
    assert outcome(catalog, check, {field: fails}) is False


def test_a_mean_is_a_sum_without_rounding(catalog: Catalog) -> None:
    """Ten tenths added in order are less than one; their exact sum is not."""
    tenths = [0.1 * 9] * 9 + [0.9 * 10 - 0.1 * 9 * 9]
    assert math.fsum(tenths) / 10 >= 0.9
    assert outcome(catalog, "truncation", {"truncation_rate": tenths}) is False


def test_the_share_of_tokens_is_that_of_the_run(catalog: Catalog) -> None:
    tokens = [10_000] * 10
    over = [0] * 9
    assert (
        outcome(catalog, "delta_fraction", {"valid_tokens": tokens, "over_0_5": [*over, 9]}) is True
    )
    assert (
        outcome(catalog, "delta_fraction", {"valid_tokens": tokens, "over_0_5": [*over, 10]})
        is False
    )
    assert outcome(catalog, "delta_fraction", {"valid_tokens": 0, "over_0_5": 0}) is False


@pytest.mark.parametrize(
    ("check", "field"), [("learning_signal", "reward_std"), ("nonzero_loss", "loss")]
)
def test_shares_count_over_max_steps(catalog: Catalog, check: str, field: str) -> None:
    for good, expected in ((8, True), (7, False)):
        values = [1.0] * good + [None] * (10 - good)
        assert outcome(catalog, check, {field: values}) is expected
    assert outcome(catalog, check, steps=7) is False, "seven recorded of ten are not 8 of 10"


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, -math.inf, "0.1", True])
@pytest.mark.parametrize(
    ("check", "field"),
    [
        ("truncation", "truncation_rate"),
        ("delta_fraction", "over_0_5"),
        ("delta_fraction", "valid_tokens"),
        ("generation_kl", "generation_kl"),
        ("mismatch_baseline", "abs_delta"),
    ],
)
def test_a_mean_with_a_value_that_is_none_fails(
    catalog: Catalog, check: str, field: str, missing: object
) -> None:
    policy = load_gate_policy("mismatch-baseline") if check == "mismatch_baseline" else None
    good = HEALTHY.get(field, 0.01)
    assert outcome(catalog, check, {field: [good] * 10}, policy) is True
    assert outcome(catalog, check, {field: [good] * 9 + [missing]}, policy) is False


def test_no_step_passes_nothing(catalog: Catalog) -> None:
    policy = load_gate_policy("router-replay")
    for check in policy.checks:
        assert outcome(catalog, check, None, policy, steps=0) is False, check


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_the_baseline_is_that_of_the_warm_up(catalog: Catalog, patience: int) -> None:
    policy = load_gate_policy("mismatch-baseline").with_parameters(
        "mismatch_baseline", patience=patience, factor=5.0, window=3
    )
    quiet = [0.01] * 10
    at_bound, above = [*quiet[:6], 0.05, 0.05, 0.05, 0.01], [*quiet[:6], 0.06, 0.06, 0.01, 0.06]
    assert outcome(catalog, "mismatch_baseline", {"abs_delta": at_bound}, policy) is True
    assert outcome(catalog, "mismatch_baseline", {"abs_delta": above}, policy) is (patience == 3)


def test_an_intermediate_run_is_judged_on_the_steps_that_it_has(catalog: Catalog) -> None:
    policy = load_gate_policy("router-replay", run="intermediate")
    assert outcome(catalog, "complete", None, policy, steps=4) is True
    assert outcome(catalog, "learning_signal", None, policy, steps=4) is None
    assert outcome(catalog, "complete", {"loss": [1, None, 1, 1]}, policy, steps=4) is False
    assert outcome(catalog, "complete", steps=4) is False


@pytest.mark.parametrize(
    ("length", "fallback", "passed"),
    [(200, 0, True), (200, 2, True), (200, 3, False), (8, 8, False)],
)
def test_the_preset_bounds_the_share_of_rows_that_no_route_was_replayed_for(
    catalog: Catalog, tmp_path: Path, length: int, fallback: int, passed: bool
) -> None:
    layout = Layout(lengths=(length,) * 2, fallback=fallback, queue=False)
    traces = str(make_trace(layout).write(tmp_path / "trace"))
    policy = load_gate_policy("router-replay").with_parameters(
        "routes", traces=traces, contract="legacy-async", since=0.0
    )
    assert outcome(catalog, "routes", policy=policy) is passed


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"require": ["stage.routes"], "stages": ["train"]}, "stage.routes is not-applicable, and"),
        ({"require": ["installed.payload"]}, "installed.payload is unverified, and has to be"),
        ({"layers": [2, 3, 4, 5]}, "layer.coverage: no rank replays layer 5"),
    ],
)
def test_what_makes_the_routes_fail_is_named(
    catalog: Catalog, tmp_path: Path, stated: dict[str, Any], reason: str
) -> None:
    """Not what else could not be decided, and need not be."""
    layout = Layout(lengths=(70, 90), queue=False, stages=tuple(stated.get("stages", STAGES)))
    traces = str(make_trace(layout).write(tmp_path / "trace"))
    policy = load_gate_policy("router-replay").with_parameters(
        "routes", traces=traces, contract="legacy-async", since=0.0, **stated
    )
    rows = {1: {"attempt": 0, **HEALTHY}}
    found = Evidence(catalog, "r", (0,), steps=rows, records=1)
    told = judged(CHECKS_BY_NAME["routes"], found, policy)
    assert (told.passed, told.reason.startswith(f"attempt 0: {reason}")) == (False, True)
