"""The checks of routes find what loops over every row find, and nothing of a router."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.routed import EXPERTS, healthy, record_routes
from trajreplay import DatasetError, Lake
from trajreplay.query.experts import captured, route_problems, routed_rows
from trajreplay.query.experts.captured import Choices, RoutedRows
from trajreplay.query.experts.dummies import are_lost
from trajreplay.query.files import datafile, scanning
from trajreplay.schema.lakefile import open_lake
from trajreplay.writer import parquet

Routes = list[np.ndarray[Any, Any]]


def rows_of(
    entry: Any, routes: Routes, prompt: int, num_experts: int | None, without_last: bool = False
) -> RoutedRows:
    """Routes as they are read, of samples with so many prompt tokens."""
    counts = np.array([len(one) for one in routes], np.int64)
    total = counts + without_last
    values = np.concatenate(routes)
    return RoutedRows(
        entry,
        [f"s-{row}" for row in range(len(routes))],
        total,
        total - prompt,
        tuple(range(10, 10 + values.shape[1])),
        num_experts,
        {"experts": Choices(values, counts)},
    )


def preferred(tokens: list[list[list[int]]], layer: int) -> float:
    """The share of the dummy route in a layer, of tokens with another route in another layer."""
    dummy = list(range(len(tokens[0][0])))
    others = [one[layer] for one in tokens if any(row != dummy for row in drop(one, layer))]
    count = others.count(dummy)
    return min(1.0, (count + 2 * math.sqrt(count)) / len(others)) if others else 0.0


def drop(token: list[list[int]], layer: int) -> list[list[int]]:
    return token[:layer] + token[layer + 1 :]


def by_loops(
    routes: Routes, prompt: int, num_experts: int | None, total: Sequence[int]
) -> dict[str, Any]:
    """Count and first place of each fault, a row after another."""
    found: dict[str, Any] = {}

    def add(check: str, row: int, position: int, layer: int | None) -> None:
        token = position + 1 - prompt
        place = (f"s-{row}", position, token if token >= 0 else None, layer)
        count, first = found.get(check, (0, place))
        found[check] = (count + 1, first)

    highest = max(int(one.max()) for one in routes)
    _, layers, top_k = routes[0].shape
    experts = num_experts or highest + 1
    chance = 0.0
    if experts >= top_k:
        tokens = [token for one in routes for token in one.tolist()]
        chance = math.prod(
            max(1 / math.perm(experts, top_k), preferred(tokens, layer)) for layer in range(layers)
        )
    dummies: list[tuple[float, int]] = []
    for row, one in enumerate(routes):
        dummies.append((chance * (len(one) - (len(one) == total[row])), 0))
        for position, token in enumerate(one.tolist()):
            for layer, choices in enumerate(token, 10):
                if all(value == -1 for value in choices):
                    add("route.missing", row, position, layer)
                elif any(value < 0 for value in choices):
                    add("route.partial", row, position, layer)
                elif len(set(choices)) < len(choices):
                    add("route.duplicate", row, position, layer)
                if num_experts is not None and any(value >= num_experts for value in choices):
                    add("route.range", row, position, layer)
            dummy = all(choices == list(range(top_k)) for choices in token)
            last = position + 1 == len(one) == total[row]
            if dummy and not last:
                add("route.dummy", row, position, None)
                dummies[row] = (dummies[row][0], dummies[row][1] + 1)
    if not are_lost(dummies):
        found.pop("route.dummy", None)
    return found


@given(data=st.data())
def test_what_is_found_is_what_loops_find(data: st.DataObject) -> None:
    layers, top_k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    num_experts = data.draw(st.sampled_from([None, 2, 5, 60]))
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    routes = [
        data.draw(
            st.lists(st.sampled_from([-2, -1, 0, 1, 2, 3, 58]), min_size=count, max_size=count)
        )
        for count in (length * layers * top_k for length in lengths)
    ]
    arrays = [np.array(one, np.int16).reshape(-1, layers, top_k) for one in routes]
    for array in arrays:
        if data.draw(st.booleans()):
            array[data.draw(st.integers(0, len(array) - 1))] = np.arange(top_k)
        if data.draw(st.booleans()):
            array[data.draw(st.integers(0, len(array) - 1)), 0] = -1
    prompt = data.draw(st.integers(0, min(lengths)))
    cut = data.draw(st.booleans())
    problems = route_problems([rows_of(None, arrays, prompt, num_experts, cut)])
    expected = by_loops(arrays, prompt, num_experts, [one + cut for one in lengths])
    assert {one.check for one in problems} == set(expected)
    for one in problems:
        count, (sample_id, position, token, layer) = expected[one.check]
        assert f" {count} " in one.message
        assert (one.sample_id, one.token) == (sample_id, token)
        assert f"position {position}" in one.message
        assert ("layer" in one.message.split(";")[1]) == (layer is not None)
        few = one.check == "route.dummy" and layers <= 2
        assert (one.severity == "warning") == (one.check == "route.missing" or few)


@given(seed=st.integers(0, 2**32 - 1), layers=st.integers(1, 8), top_k=st.integers(1, 8))
def test_routes_of_a_router_have_no_problem(seed: int, layers: int, top_k: int) -> None:
    routes = healthy([40, 30], layers, top_k, seed)
    for one in routes:
        one[-1] = np.arange(top_k)  # the last token of a sample has no route of its own
    assert route_problems([rows_of(None, routes, 3, EXPERTS)]) == []


@pytest.mark.parametrize(
    ("layers", "top_k", "experts", "counts"),
    [(2, 2, 8, [1000]), (2, 2, 8, [250] * 4), (4, 1, 8, [10_000]), (2, 1, 16, [1000])],
)
def test_the_more_tokens_lost_their_routes_the_surer_it_is_however_small_the_model(
    layers: int, top_k: int, experts: int, counts: list[int]
) -> None:
    random = np.random.default_rng(3)
    routes: Routes = [
        random.random((count, layers, experts)).argsort(-1)[:, :, :top_k].astype(np.int16)
        for count in counts
    ]
    assert route_problems([rows_of(None, routes, 3, experts)]) == []
    found = []
    for count in (counts[0] // 4, counts[0] // 2, counts[0] - 1):
        routes[0][:count] = np.arange(top_k)
        (problem,) = route_problems([rows_of(None, routes, 3, experts)])
        found.append(int(problem.message.split()[1]))
    assert found == sorted(found)
    assert found[-1] >= counts[0] - 1


@given(
    seed=st.integers(0, 2**32 - 1),
    shares=st.lists(st.floats(0, 0.9), min_size=3, max_size=6),
    counts=st.lists(st.integers(1, 300), min_size=1, max_size=6),
)
def test_a_router_that_prefers_the_first_experts_lost_nothing(
    seed: int, shares: list[float], counts: list[int]
) -> None:
    random = np.random.default_rng(seed)
    routes: Routes = []
    for count in counts:
        of = random.random((count, len(shares), 8)).argsort(-1)[:, :, :2].astype(np.int16)
        of[random.random((count, len(shares))) < np.array(shares)] = (0, 1)
        routes.append(of)
    assert route_problems([rows_of(None, routes, 1, 8)]) == []


def test_in_one_or_two_layers_many_dummies_are_a_warning() -> None:
    for layers, severity in ((1, "warning"), (2, "warning"), (3, "error")):
        routes = healthy([40, 40], layers)
        routes[0][:-1] = np.arange(routes[0].shape[2])
        (problem,) = route_problems([rows_of(None, routes, 3, EXPERTS)])
        assert (problem.check, problem.severity) == ("route.dummy", severity)


def test_pieces_of_a_capture_count_together() -> None:
    routes = healthy([4, 4])
    routes[1][2, 1] = -1
    whole = route_problems([rows_of(None, routes, 1, EXPERTS)])
    one, two = (rows_of(None, [part], 1, EXPERTS) for part in routes)
    two.sample_ids[0] = "s-1"  # type: ignore[index]
    assert route_problems([one, two]) == whole
    assert "1 of 24 rows have no route" in whole[0].message


@pytest.mark.parametrize("stage", ["sample", "loss.policy"])
def test_a_replay_checks_the_routes_where_it_judges_samples(tmp_path: Path, stage: str) -> None:
    lake = Lake.create(tmp_path / "lake")
    routes = healthy([5, 5])
    routes[1][3] = np.arange(4)
    routes[0][1, 2, 0] = routes[0][1, 2, 3]
    record_routes(lake, {"rollout_experts": routes}, [5, 5], response=[3, 3], stages=[stage])
    (cohort,) = lake.replay().cohorts
    found = {
        one.check: (one.severity, one.sample_id, one.token)
        for one in cohort.findings
        if one.check.startswith("route.")
    }
    if stage != "sample":
        assert found == {}
        return
    assert found == {
        "route.duplicate": ("error", "s-0", 0),
        "route.dummy": ("error", "s-1", 2),
    }
    assert cohort.verdict == "diverged"
    assert cohort.first_divergent_stage == "sample"


def test_healthy_routes_change_no_verdict(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    routes = healthy([5, 5])
    routes[0][2, 1] = -1
    record_routes(lake, {"rollout_experts": routes}, [5, 5])
    (cohort,) = lake.replay().cohorts
    assert cohort.verdict == "pass"
    (finding,) = [one for one in cohort.findings if one.check.startswith("route.")]
    assert (finding.check, finding.severity, finding.sample_id) == (
        "route.missing",
        "warning",
        "s-0",
    )


def test_routes_that_are_not_those_captured_are_refused(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    entry = record_routes(lake, {"experts": healthy([5])}, [5])
    path = Path(lake.path) / entry.files[1].path
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(bytes(content))
    (cohort,) = lake.replay().cohorts
    assert cohort.verdict == "refused"
    assert "its bytes changed" in str(cohort.refusal)


@pytest.mark.parametrize("at_once", [True, False])
def test_no_piece_of_a_large_capture_is_taken_unverified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    lake = Lake.create(tmp_path / "lake")
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 2)
    entry = record_routes(lake, {"experts": healthy([200] * 5)}, [200] * 5)
    if not at_once:
        for module in (captured, scanning, datafile):
            monkeypatch.setattr(module, "WHOLE_LIMIT_BYTES", 100)
        monkeypatch.setattr(datafile, "_SMALL_BYTES", 100)
    store = open_lake(lake.path)
    pieces = list(routed_rows(store, entry, ["experts"]))
    assert len(pieces) == 3
    assert [one.start for one in pieces] == [0, 2, 4]
    whole = np.concatenate([piece.choices["experts"].values for piece in pieces])
    assert np.array_equal(whole, np.concatenate(healthy([200] * 5)))
    path = Path(lake.path) / entry.files[1].path
    content = path.read_bytes()
    for position in range(4, len(content), len(content) // 40):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises(DatasetError):
            list(routed_rows(store, entry, ["experts"]))
