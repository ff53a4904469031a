"""Expert choices come back bit for bit, or are refused; changed ones are found."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.captures import data_files, entries_of, record, sample, verify
from tests.helpers.mutate import change_entry, change_value, flip_bit
from tests.helpers.routed import EXPERTS, any_routes, healthy, record_routes
from trajreplay import CaptureError, Lake, ParallelCoordinates, TrajReplayError
from trajreplay.query.experts import routed_rows
from trajreplay.schema.dtypes import restore
from trajreplay.schema.entry import Entry
from trajreplay.schema.lakefile import open_lake
from trajreplay.schema.tables import EXPERT_LISTS

_rollouts = count()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return Lake.create(tmp_path_factory.mktemp("routes") / "lake")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@given(
    drawn=any_routes(),
    name=st.sampled_from(EXPERT_LISTS),
    form=st.sampled_from(["numpy", "torch", "lists"]),
    step=st.none() | st.just(0),
    numbered=st.booleans(),
)
def test_routes_come_back_bit_for_bit(
    shared: Lake, drawn: Any, name: str, form: str, step: int | None, numbered: bool
) -> None:
    total, routes = drawn
    if form == "lists" and any(one is None or not len(one) for one in routes):
        form = "numpy"  # an empty list has no shape
    given_as = {"numpy": lambda one: one, "torch": torch.from_numpy, "lists": np.ndarray.tolist}
    handed = [None if one is None else given_as[form](one) for one in routes]
    present = [one for one in routes if one is not None]
    layers = present[0].shape[1] if present else 1
    numbers = [3 * one + 1 for one in range(layers)] if numbered else None
    common = {"num_experts": 7, "layer_numbers": numbers}
    if not present:
        common = {}
    rollout = next(_rollouts)
    entry = record_routes(
        shared, {name: handed}, total, common=common, rollout_id=rollout, step_id=step
    )
    if not present:
        assert [file.table for file in entry.files] == ["steps" if step == 0 else "rollouts"]
        return
    seal = entry.files[1].columns[name]
    pieces = list(routed_rows(open_lake(shared.path), entry, [name]))
    values = np.concatenate([piece.choices[name].values for piece in pieces])
    tokens = np.concatenate([piece.choices[name].tokens for piece in pieces])
    assert tokens.tolist() == [0 if one is None else len(one) for one in routes]
    assert seal.source_dtype is not None
    back = restore(values, seal.source_dtype)
    expected = np.concatenate(present)
    if form != "lists":
        assert back.dtype == expected.dtype
    assert np.array_equal(back, expected)
    assert pieces[0].layer_numbers == tuple(numbers or range(layers))
    shared.refresh()
    rows = shared.sql(
        f"select sample_id, row, layers, top_k, num_experts, layer_numbers, {name} as found "
        f"from routes where rollout_id = {rollout} order by row"
    ).arrow()
    assert rows["sample_id"].to_pylist() == [f"s-{one}" for one in range(len(total))]
    assert rows["found"].to_pylist() == [
        None if one is None else one.reshape(-1).tolist() for one in routes
    ]
    assert set(rows["num_experts"].to_pylist()) == {7}
    assert rows["layer_numbers"].to_pylist() == [numbers] * len(total)


@given(total=st.lists(st.integers(1, 6), min_size=1, max_size=4), short=st.booleans())
def test_packed_routes_are_those_of_each_sample(
    shared: Lake, total: list[int], short: bool
) -> None:
    routes = healthy([one - short for one in total])
    rollout = next(_rollouts)
    packed = np.concatenate(routes)
    one = record_routes(shared, {"experts": packed}, total, rollout_id=rollout)
    again = record_routes(shared, {"experts": routes}, total, rollout_id=rollout)
    assert one.created_us == again.created_us  # a retry, though handed over in another form


def test_a_capture_with_routes_is_whole_and_one_commit(lake: Lake) -> None:
    entry = record_routes(lake, {"rollout_experts": healthy([4, 3])}, [4, 3])
    assert [file.table for file in entry.files] == ["rollouts", "routes"]
    verify(lake)
    assert data_files(lake) == {file.path for file in entry.files}
    report = lake.validate(deep=True)
    assert report.ok, report.findings
    assert report.files == 2
    checksums = lake.sql('select "table", "column", digest from checksums').arrow().to_pylist()
    found = {one["column"]: one["digest"] for one in checksums if one["table"] == "routes"}
    assert found["rollout_experts"] == entry.files[1].columns["rollout_experts"].digest
    assert found[None] == entry.files[1].digest


def test_other_routes_under_the_same_key_are_a_conflict_that_leaves_no_file(lake: Lake) -> None:
    record_routes(lake, {"experts": healthy([4], seed=1)}, [4])
    before = data_files(lake)
    with pytest.raises(CaptureError, match=r"column routes\.experts was"):
        record_routes(lake, {"experts": healthy([4], seed=2)}, [4])
    assert data_files(lake) == before


def test_choices_are_dictionary_encoded_and_take_about_a_byte_each(lake: Lake) -> None:
    routes = healthy([4000], layers=8, top_k=8)
    entry = record_routes(lake, {"experts": routes}, [4000])
    assert entry.files[1].bytes < 1.1 * routes[0].size
    chunk = pq.ParquetFile(Path(lake.path) / entry.files[1].path).metadata.row_group(0)
    by_name = {chunk.column(i).path_in_schema: chunk.column(i) for i in range(chunk.num_columns)}
    assert by_name["experts.list.element"].has_dictionary_page
    assert not by_name["experts.list.element"].is_stats_set


WRONG: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "unknown routes": ("log_probs", [np.zeros((2, 1, 1), np.int8)] * 2, {}),
    "is a int": ("experts", 7, {}),
    "array of shape": ("experts", [np.zeros((2, 2), np.int8)] * 2, {}),
    "shape (0, 1025, 1024)": ("experts", [np.zeros((0, 1025, 1024), np.int8)] * 2, {}),
    "cannot hold exactly": ("experts", [np.full((2, 1, 1), 40_000)] * 2, {}),
    "expected integers": ("experts", [np.zeros((2, 1, 1), np.float32)] * 2, {}),
    "expected one shape": ("experts", [np.zeros((2, n, 1), np.int8) for n in (1, 2)], {}),
    "5 tokens, expected": ("experts", [np.zeros((n, 1, 1), np.int8) for n in (2, 5)], {}),
    "0 tokens, expected": ("experts", [np.zeros((n, 1, 1), np.int8) for n in (0, 2)], {}),
    "1 rows, expected 2": ("experts", [np.zeros((2, 1, 1), np.int8)], {}),
    "packed tokens": ("experts", np.zeros((9, 1, 1), np.int8), {}),
    "distinct numbers": (
        "experts",
        [np.zeros((2, 2, 1), np.int8)] * 2,
        {"layer_numbers": [4, 4]},
    ),
    "num_experts": ("experts", [np.zeros((2, 1, 1), np.int8)] * 2, {"num_experts": -3}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_no_row_can_hold_is_refused_and_leaves_nothing(lake: Lake, message: str) -> None:
    name, values, common = WRONG[message]
    with pytest.raises(TrajReplayError) as error:
        record_routes(lake, {name: values}, [2, 2], common=common or {"num_experts": 8})
    assert message in str(error.value)
    assert not data_files(lake)
    assert not entries_of(lake)


def test_two_names_have_the_same_layers_and_each_is_given_once(lake: Lake) -> None:
    routes = healthy([3])
    for more in ({"experts": healthy([3], layers=2)}, {"old_experts": healthy([3], top_k=2)}):
        with pytest.raises(CaptureError, match="expected Routing"):
            record_routes(lake, {"rollout_experts": routes, **more}, [3])

    def twice(capture: Any) -> None:
        capture.samples([sample(0, 2)])
        capture.routes("experts", routes)
        capture.routes("experts", routes)

    with pytest.raises(CaptureError, match="given before"):
        record(lake, twice)
    with pytest.raises(CaptureError, match=r"samples\(\) was not called"):
        record(lake, lambda capture: capture.routes("experts", routes))


def test_the_trainers_array_may_change_after_it_was_handed_over(lake: Lake) -> None:
    routes = np.zeros((3, 1, 2), np.int16)

    def use(capture: Any) -> None:
        capture.samples([sample(0, 2)])
        capture.routes("experts", routes)
        routes[:] = 5

    entry = record(lake, use)
    (piece,) = routed_rows(open_lake(lake.path), entry, ["experts"])
    assert not piece.choices["experts"].values.any()


@given(data=st.data())
def test_any_flipped_bit_of_the_routes_file_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lake = Lake.create(tmp_path_factory.mktemp("flip") / "lake")
    entry = record_routes(lake, {"rollout_experts": healthy([4, 3])}, [4, 3])
    path = Path(lake.path) / entry.files[1].path
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    flip_bit(path, position, data.draw(st.integers(0, 7)))
    report = lake.validate()
    assert not report.ok
    assert any(one.path == entry.files[1].path for one in report.findings)


CHANGES = {
    "route.range": lambda value: EXPERTS,
    "route.partial": lambda value: -1,
    "route.duplicate": None,
}


@pytest.mark.parametrize("check", CHANGES)
@given(data=st.data())
def test_choices_changed_and_signed_anew_are_found_by_what_they_are(
    tmp_path_factory: pytest.TempPathFactory, check: str, data: st.DataObject
) -> None:
    lake = Lake.create(tmp_path_factory.mktemp("signed") / "lake")
    routes = healthy([4, 3])
    entry = record_routes(lake, {"rollout_experts": routes}, [4, 3])
    row = data.draw(st.integers(0, 1))
    place = data.draw(st.integers(0, routes[row].size - 1))
    neighbour = int(routes[row].reshape(-1)[place ^ 1])  # of the same four choices
    change = CHANGES[check] or (lambda value: neighbour)
    change_value(lake, entry.key, "rollout_experts", row, change, place, number=1)
    findings = [one for one in lake.validate(deep=True).findings if one.severity == "error"]
    assert [one.check for one in findings] == [check]
    layer = place // 4 % 3
    assert f"position {place // 12}, layer {layer}:" in findings[0].message
    assert f"s-{row}" in findings[0].message


def test_routes_of_other_samples_are_found_though_signed(lake: Lake) -> None:
    entry = record_routes(lake, {"experts": healthy([3, 3])}, [3, 3])
    change_value(lake, entry.key, "sample_id", 0, lambda _: "s-9", number=1)
    (error,) = [one for one in lake.validate().findings if one.severity == "error"]
    assert error.check == "content"
    assert "routes of other samples" in error.message


def test_a_length_that_is_no_sample_is_found_though_signed(lake: Lake) -> None:
    entry = record_routes(lake, {"experts": healthy([3, 3])}, [3, 3])
    change_value(lake, entry.key, "experts", 1, lambda row: row[:-12] * 2, number=1)
    (error,) = [one for one in lake.validate(deep=True).findings if one.severity == "error"]
    assert "choices of a sample of 3 tokens" in error.message
    change_value(lake, entry.key, "layers", 1, lambda _: 2, number=1)
    (error,) = [one for one in lake.validate(deep=True).findings if one.severity == "error"]
    assert "differ in layers" in error.message


def test_a_second_file_of_a_table_is_an_error(lake: Lake) -> None:
    entry = record_routes(lake, {"experts": healthy([3])}, [3])

    def doubled(old: Entry) -> Entry:
        return replace(old, files=(*old.files, old.files[1]))

    change_entry(lake, entry.key, doubled)
    (error,) = [one for one in lake.validate().findings if one.severity == "error"]
    assert error.check == "manifest"
    assert "at most one each of rollouts and routes" in error.message


TEXT = {"prompt": "truncate:9"}


def with_text(capture: Any) -> None:
    capture.samples([sample(0, 3, prompt="a question")])
    capture.routes("rollout_experts", healthy([4]), num_experts=EXPERTS)


@pytest.mark.parametrize("redaction", [None, {"prompt": "hash"}, {"prompt": "drop"}])
def test_a_lake_is_exported_with_its_routes(
    lake: Lake, tmp_path: Path, redaction: dict[str, str] | None
) -> None:
    entry = record(lake, with_text, redaction=TEXT)
    lake.export_lake(tmp_path / "out", redaction=redaction)
    out = Lake.open(tmp_path / "out")
    (copied,) = verify(out)
    assert copied.files[1].columns == entry.files[1].columns
    assert [file.table for file in copied.files] == ["rollouts", "routes"]
    assert out.validate(deep=True).ok
    (row,) = out.sql("select prompt from rollouts").arrow().to_pylist()
    assert (row["prompt"] == "a questio") == (redaction is None)
    assert dict(copied.redaction) == (TEXT if redaction is None else redaction)


def test_a_bundle_has_no_place_for_routes_and_says_so(lake: Lake, tmp_path: Path) -> None:
    record_routes(lake, {"experts": healthy([4])}, [4], step_id=0)
    (written,) = lake.export_bundles(tmp_path / "out")
    assert any("expert choices" in note for note in written.notes)


def test_a_copy_with_other_routes_than_its_owner_is_an_error(lake: Lake) -> None:
    for rank, seed in ((0, 1), (1, 2)):
        record_routes(
            lake,
            {"experts": healthy([4], seed=seed)},
            [4],
            rank=rank,
            expected_ranks=[0, 1],
            parallel=ParallelCoordinates(tensor_rank=rank, tensor_size=2),
        )
    (error,) = [one for one in lake.validate().findings if one.severity == "error"]
    assert "rank 1 is a copy of rank 0 and differs in experts" in error.message


def test_filters_on_keys_read_the_routes_of_their_captures_only(lake: Lake) -> None:
    for rollout in range(3):
        record_routes(lake, {"experts": healthy([4])}, [4], rollout_id=rollout)
    (gone,) = [one for one in entries_of(lake) if one.key.rollout_id == 2]
    (Path(lake.path) / gone.files[1].path).unlink()
    rows = lake.sql("select rollout_id, kind, len(experts) as n from routes where rollout_id < 2")
    assert [tuple(one.values()) for one in rows.arrow().to_pylist()] == [
        (0, "rollout", 48),
        (1, "rollout", 48),
    ]


@pytest.mark.parametrize(("column", "value"), [("layers", 2**31 - 1), ("top_k", 0), ("layers", -1)])
def test_a_shape_that_no_model_has_is_refused_before_memory_is_taken(
    lake: Lake, column: str, value: int
) -> None:
    entry = record_routes(lake, {"experts": [np.zeros((0, 1, 1), np.int8)]}, [1])
    change_value(lake, entry.key, column, 0, lambda _: value, number=1)
    (error,) = [one for one in lake.validate(deep=True).findings if one.severity == "error"]
    assert "layers of" in error.message
