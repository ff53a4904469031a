"""Agreement of sampler and trainer by layer is what loops over every token say."""

import math
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.captures import record, sample
from tests.helpers.queried import catalog_of
from tests.helpers.routed import EXPERTS, healthy
from trajreplay import DatasetError, Lake, QueryError
from trajreplay.cli.shown.agreement_text import agreement_text
from trajreplay.query import Selection
from trajreplay.query.experts import AgreementReport, route_agreement

_runs = count()
Routes = list[Any]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def agreement(lake: Lake, **options: Any) -> AgreementReport:
    return route_agreement(catalog_of(lake), **options)


class Scene:
    """Samples of one step with what trainer and sampler have of them."""

    def __init__(
        self, random: np.random.Generator, lengths: Sequence[tuple[int, int]], layers: int
    ) -> None:
        self.prompts = [prompt for prompt, _ in lengths]
        self.responses = [response for _, response in lengths]
        totals = [sum(one) for one in lengths]
        self.sampler = healthy(totals, layers, 3, int(random.integers(2**31)))
        self.trainer = [one.copy() for one in self.sampler]
        for one in self.trainer:
            for place in np.ndindex(one.shape[:2]):
                kind = random.integers(6)
                if kind == 0:
                    one[place] = one[place][::-1]
                elif kind == 1:
                    one[place] = (one[place] + 1) % EXPERTS
                elif kind == 2 and random.integers(3) == 0:
                    one[place] = -1
        self.old = [(-random.random(n) * 3).astype(np.float32) for n in self.responses]
        self.rolled = [(-random.random(n) * 3).astype(np.float32) for n in self.responses]
        self.masks = [random.integers(0, 2, n).astype(np.uint8) for n in self.responses]

    def samples(self) -> list[Any]:
        return [
            sample(row, n, total_length=self.prompts[row] + n, loss_mask=self.masks[row])
            for row, n in enumerate(self.responses)
        ]

    def by_loops(self, numbers: Sequence[int], threshold: float) -> dict[int | None, Any]:
        """What each layer has, and all of them: a token after another."""
        found: dict[int | None, Any] = {
            layer: {"tokens": 0, "ordered": 0, "without": 0, False: [], True: []}
            for layer in (None, *numbers)
        }
        for row, response in enumerate(self.responses):
            for token in range(response):
                position = self.prompts[row] + token - 1
                if position < 0 or not self.masks[row][token]:
                    continue
                delta = abs(float(self.old[row][token]) - float(self.rolled[row][token]))
                compared, other, unordered = False, False, False
                for place, layer in enumerate(numbers):
                    mine = self.trainer[row][position, place].tolist()
                    theirs = self.sampler[row][position, place].tolist()
                    if min(mine) < 0 or min(theirs) < 0:
                        found[layer]["without"] += 1
                        continue
                    differs = sorted(mine) != sorted(theirs)
                    found[layer]["tokens"] += 1
                    found[layer]["ordered"] += mine == theirs
                    found[layer][differs].append(delta)
                    compared, other = True, other or differs
                    unordered = unordered or mine != theirs
                if compared:
                    found[None]["tokens"] += 1
                    found[None]["ordered"] += not unordered
                    found[None][other].append(delta)
                else:
                    found[None]["without"] += 1
        return found


def assert_as_loops(table: Any, expected: dict[int | None, Any], threshold: float) -> None:
    rows = {row["layer"]: row for row in table.to_pylist()}
    assert list(rows) == [None, *sorted(one for one in expected if one is not None)]
    for layer, loop in expected.items():
        row, tokens = rows[layer], loop["tokens"]
        assert (row["tokens"], row["without_route"]) == (tokens, loop["without"])
        assert row["equal_sets"] == (len(loop[False]) / tokens if tokens else None)
        assert row["equal_ordered"] == (loop["ordered"] / tokens if tokens else None)
        for name, side in (("agreeing", False), ("differing", True)):
            values = loop[side]
            assert row[f"{name}_tokens"] == len(values)
            over = sum(value > threshold for value in values)
            assert row[f"{name}_over"] == over
            if not values:
                assert row[f"{name}_abs_delta_max"] is None
                assert row[f"{name}_over_fraction"] is None
                continue
            assert row[f"{name}_over_fraction"] == over / len(values)
            assert row[f"{name}_abs_delta_max"] == max(values)
            for quantile in (50, 99):
                assert math.isclose(
                    row[f"{name}_abs_delta_p{quantile}"],
                    float(np.quantile(values, quantile / 100)),
                    rel_tol=1e-12,
                )


LENGTHS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=4)


@pytest.mark.parametrize("split", [False, True])
@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=LENGTHS,
    layers=st.sampled_from([1, 2, 70]),
    threshold=st.sampled_from([0.0, 0.5, 1.5]),
)
def test_every_number_is_that_of_a_loop(
    tmp_path_factory: pytest.TempPathFactory,
    split: bool,
    seed: int,
    lengths: list[tuple[int, int]],
    layers: int,
    threshold: float,
) -> None:
    lake = Lake.create(tmp_path_factory.mktemp("agree") / "lake")
    scene = Scene(np.random.default_rng(seed), lengths, layers)
    numbers = [2 * one + 1 for one in range(layers)]
    common = {"num_experts": EXPERTS, "layer_numbers": numbers}
    sides = {
        "trainer": ("old_log_probs", scene.old, "old_experts", scene.trainer),
        "sampler": ("rollout_log_probs", scene.rolled, "rollout_experts", scene.sampler),
    }

    def hand_over(*names: str) -> Any:
        def use(capture: Any) -> None:
            capture.samples(scene.samples())
            for name in names:
                column, values, choices, routes = sides[name]
                capture.tensor(column, values, source=name)
                capture.routes(choices, routes, **common)

        return use

    if split:  # the step has what the trainer did, and the rollout what the sampler did
        record(lake, hand_over("sampler"))
        record(lake, hand_over("trainer"), step_id=0)
    else:
        record(lake, hand_over("trainer", "sampler"), step_id=0)
    expected = scene.by_loops(numbers, threshold)
    if not expected[None]["tokens"] + expected[None]["without"]:
        with pytest.raises(QueryError, match="no routes to compare"):
            agreement(lake, threshold=threshold)
        return
    report = agreement(lake, threshold=threshold)
    assert report.levels == {"r": "step"}
    assert_as_loops(report.table, expected, threshold)


def write(
    lake: Lake,
    trainer: Routes,
    sampler: Routes,
    *,
    old: Sequence[float] = (-1.0, -1.0, -1.0),
    common: tuple[Any, Any] = ({}, {}),
    **options: Any,
) -> None:
    """One sample of one prompt token and three of response, in the rollout and its step."""
    said = options.pop("said", {})
    fields = options.pop("fields", {})

    def of_sampler(capture: Any) -> None:
        capture.samples([sample(0, 3, **fields)])
        capture.tensor("rollout_log_probs", [np.full(3, -1.0, np.float32)], source="sampler")
        capture.routes("rollout_experts", sampler, **common[1])

    def of_trainer(capture: Any) -> None:
        capture.samples([sample(0, 3, **fields)])
        told = {"source": "trainer"} | said
        capture.tensor("old_log_probs", [np.array(old, np.float32)], **told)
        capture.routes("old_experts", trainer, **common[0])

    record(lake, of_sampler, **options)
    record(lake, of_trainer, step_id=0, **options)


def test_the_choice_at_a_position_is_that_of_the_token_after_it(lake: Lake) -> None:
    sampler = healthy([4], 1, 2)
    trainer = [sampler[0].copy()]
    trainer[0][1] = (trainer[0][1] + 1) % EXPERTS  # predicts the second token of the response
    write(lake, trainer, sampler, old=(-1.0, -3.0, -1.0))
    whole, layer = agreement(lake).table.to_pylist()
    for row in (whole, layer):
        assert (row["tokens"], row["agreeing_tokens"], row["differing_tokens"]) == (3, 2, 1)
        assert (row["differing_abs_delta_max"], row["agreeing_abs_delta_max"]) == (2.0, 0.0)
        assert (row["differing_over"], row["agreeing_over"]) == (1, 0)


def test_layers_are_held_against_those_of_their_number(lake: Lake) -> None:
    sampler = healthy([4], 4, 2)
    trainer = [sampler[0][:, [3, 1]]]
    write(
        lake,
        trainer,
        sampler,
        common=({"layer_numbers": [3, 1]}, {"layer_numbers": [0, 1, 2, 3]}),
    )
    rows = agreement(lake).table.to_pylist()
    assert [(row["layer"], row["equal_ordered"]) for row in rows] == [(None, 1), (1, 1), (3, 1)]


def test_other_widths_and_no_common_layer_are_refused(tmp_path: Path) -> None:
    for top_k, numbers, message in (
        (3, [0, 1], "are 3 experts a token, rollout_experts are 2"),
        (2, [7, 8], "no layer in common"),
    ):
        lake = Lake.create(tmp_path / str(top_k))
        common: tuple[Any, Any] = ({"layer_numbers": numbers}, {})
        write(lake, healthy([4], 2, top_k), healthy([4], 2, 2), common=common)
        with pytest.raises(DatasetError, match=message):
            agreement(lake)


def test_tokens_of_other_weights_are_left_out_unless_asked_for(lake: Lake) -> None:
    routes = healthy([4], 1, 2)
    spans = {"weight_versions": [(0, 2, 6), (2, 3, 7)]}
    write(lake, routes, routes, fields=spans, said={"weight_version": 7})
    report = agreement(lake)
    assert report.table["tokens"].to_pylist() == [1, 1]
    (finding,) = report.findings
    assert "2 valid tokens are left out" in finding.message
    assert agreement(lake, any_version=True).table["tokens"].to_pylist() == [3, 3]


@pytest.mark.parametrize(
    ("fields", "said", "told"),
    [
        ({}, {}, None),
        ({}, {"weight_version": 7}, "which sampled 3 of the valid tokens is not"),
        ({"weight_versions": [(0, 2, 7)]}, {"weight_version": 7}, "which sampled 1 of the valid"),
        ({"weight_versions": [(0, 3, 7)]}, {}, "which recomputed old_log_probs is not"),
        (
            {},
            {"temperature": 0.7},
            "of old_log_probs is stated (0.7) and that of rollout_log_probs",
        ),
    ],
)
def test_what_one_side_states_is_not_taken_for_that_of_the_other(
    lake: Lake, fields: dict[str, Any], said: dict[str, Any], told: str | None
) -> None:
    routes = healthy([4], 1, 2)
    write(lake, routes, routes, fields=fields, said=said)
    report = agreement(lake)
    assert report.table["tokens"].to_pylist() == [3, 3]
    found = [(one.severity, told is not None and told in one.message) for one in report.findings]
    assert found == ([("warning", True)] if told else [])


@settings(max_examples=20)
@given(
    versions=st.lists(st.tuples(st.integers(6, 8), st.integers(1, 3)), min_size=1, max_size=4),
    told_by=st.sampled_from(["rollout", "step", "both", "none"]),
    sampler_in_step=st.booleans(),
    trainer=st.integers(6, 8),
)
def test_weights_count_whoever_says_which_sampled_a_token(
    tmp_path_factory: pytest.TempPathFactory,
    versions: list[tuple[int, int]],
    told_by: str,
    sampler_in_step: bool,
    trainer: int,
) -> None:
    """What the step does not say of a sample its rollout does, whatever else the step has."""
    lake = Lake.create(tmp_path_factory.mktemp("weights") / "lake")
    weights = [version for version, tokens in versions for _ in range(tokens)]
    ends = np.cumsum([tokens for _, tokens in versions]).tolist()
    spans = [
        (end - tokens, end, version) for end, (version, tokens) in zip(ends, versions, strict=True)
    ]
    routes = healthy([1 + len(weights)], 1, 2)
    values = [np.full(len(weights), -1.0, np.float32)]

    def hand_over(level: str, *, sampler: bool, trained: bool) -> Any:
        told = {"weight_versions": spans} if told_by in (level, "both") else {}

        def use(capture: Any) -> None:
            capture.samples([sample(0, len(weights), **told)])
            if sampler:
                capture.tensor("rollout_log_probs", values, source="sampler")
                capture.routes("rollout_experts", routes)
            if trained:
                capture.tensor(
                    "old_log_probs", [values[0] - 1], source="trainer", weight_version=trainer
                )
                capture.routes("old_experts", routes)

        return use

    record(lake, hand_over("rollout", sampler=True, trained=False))
    record(lake, hand_over("step", sampler=sampler_in_step, trained=True), step_id=0)
    counted = len(weights) if told_by == "none" else weights.count(trainer)
    left = len(weights) - counted
    measured = lake_tokens(lake)
    assert measured["agreement"] == (counted, left)
    assert measured["mismatch"] == counted  # as the other measurement of the same pair


def lake_tokens(lake: Lake) -> dict[str, Any]:
    """How many tokens each measurement counts, and how many agreement leaves out."""
    again = Lake.open(lake.path)
    try:
        report = again.route_agreement()
    except QueryError:
        return {"agreement": (0, all_left_out(again)), "mismatch": 0}
    left = [one.message.split()[0] for one in report.findings if "left out" in one.message]
    return {
        "agreement": (report.table["tokens"][0].as_py(), int(left[0]) if left else 0),
        "mismatch": again.mismatch().table["valid_tokens"][0].as_py(),
    }


def all_left_out(lake: Lake) -> int:
    with pytest.raises(QueryError, match="sampled by other weights") as error:
        lake.route_agreement()
    with pytest.raises(QueryError, match="sampled by other weights"):
        lake.mismatch()
    return int(str(error.value.message).split("; ")[1].split()[0])


def test_a_copy_is_refused_and_what_is_not_finite_is_an_error(tmp_path: Path) -> None:
    routes = healthy([4], 1, 2)
    lake = Lake.create(tmp_path / "copy")
    write(lake, routes, routes, said={"source": "copy:rollout_log_probs"})
    with pytest.raises(DatasetError, match="is a copy of rollout_log_probs"):
        agreement(lake)
    lake = Lake.create(tmp_path / "nan")
    write(lake, routes, routes, old=(-1.0, math.nan, -math.inf))
    report = agreement(lake)
    assert not report.ok
    assert report.table["tokens"].to_pylist() == [1, 1]


def test_runs_stand_side_by_side_and_a_selection_restricts(lake: Lake) -> None:
    sampler = healthy([4], 1, 2)
    other = [(sampler[0] + 1) % EXPERTS]
    write(lake, sampler, sampler, run_id="on")
    write(lake, other, sampler, run_id="off")
    rows = agreement(lake, runs=["off", "on"]).table.to_pylist()
    assert [(row["run_id"], row["layer"], row["equal_sets"]) for row in rows] == [
        ("off", None, 0.0),
        ("off", 0, 0.0),
        ("on", None, 1.0),
        ("on", 0, 1.0),
    ]
    with pytest.raises(QueryError):
        agreement(lake, selection=Selection(run="on", samples=("s-9",)))


def test_without_routes_of_a_side_nothing_is_compared(lake: Lake) -> None:
    routes = healthy([4], 1, 2)
    write(lake, routes, [None])
    with pytest.raises(QueryError, match="1 samples lack choices") as error:
        agreement(lake)
    assert "capture.routes" in str(error.value.hint)
    with pytest.raises(QueryError, match="no choices of experts belong to ref_log_probs"):
        agreement(lake, pair="ref_log_probs:rollout_log_probs")


@pytest.mark.parametrize("side", ["sampler", "trainer", "a layer of either"])
def test_where_no_token_has_a_route_on_both_sides_nothing_is_compared(
    lake: Lake, side: str
) -> None:
    trainer, sampler = (healthy([4], 2, 2) for _ in range(2))
    if side == "a layer of either":
        trainer[0][:, 0], sampler[0][:, 1] = -1, -1
    else:
        (sampler if side == "sampler" else trainer)[0][:] = -1
    write(lake, trainer, sampler)
    report = agreement(lake)
    assert not report.ok
    assert (
        "nothing is compared: of none of its 3 tokens do both sides" in report.findings[0].message
    )
    assert "Nothing is compared: no token has a route on both sides." in agreement_text(report)
