"""Entries on disk: everything comes back, and nothing damaged does."""

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.strategies import entries
from trajreplay.schema.canonical import dump_signed, load_signed
from trajreplay.schema.entry import ColumnSeal, DataFile, Entry, Output
from trajreplay.schema.entry_codec import decode_all, dump_entry, load_entry, same_content
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import make_key
from trajreplay.schema.layout import entry_path
from trajreplay.schema.settings import Settings

KEY = make_key("r1", 0, "step", 120, 3, 1)
PATH = entry_path(KEY)
FILE = DataFile(
    "steps",
    "data/x.parquet",
    9,
    "ef",
    "01",
    0,
    (2,),
    0,
    2,
    {"reward": ColumnSeal("ab", 2, 0, 1, "float32")},
)
ENTRY = Entry(
    KEY,
    (0, 1),
    settings_tree=Settings().to_json(),
    files=(FILE,),
    outputs=(Output("loss.policy", "loss", 0.5, scope="rank", reduction="sum"),),
    tokens=7,
)


def changed(path: tuple[str | int, ...], value: Any) -> bytes:
    """The entry with one field changed, signed again."""
    tree = load_signed(dump_entry(ENTRY), PATH)
    inner: Any = tree
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return dump_signed(tree)


@given(entries())
def test_an_entry_comes_back_equal(entry: Entry) -> None:
    path = entry_path(entry.key)
    back = load_entry(dump_entry(entry), path)
    decode_all(back)
    assert dump_entry(back) == dump_entry(entry)
    assert same_content(back, entry)
    assert back.key == entry.key
    assert [file.rows for file in back.files] == [file.rows for file in entry.files]


def test_settings_come_back_as_the_settings_they_were() -> None:
    assert load_entry(dump_entry(ENTRY), PATH).settings == Settings()


def test_every_one_of_456_single_bit_flips_is_refused() -> None:
    data = dump_entry(ENTRY)
    step = max(1, 8 * len(data) // 456)
    flips = range(0, 8 * len(data), step)[:456]
    assert len(flips) == 456
    for bit in flips:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DatasetError):
            load_entry(bytes(flipped), PATH)


@given(st.integers(0, len(dump_entry(ENTRY)) - 1))
def test_a_truncated_entry_is_refused(size: int) -> None:
    with pytest.raises(DatasetError):
        load_entry(dump_entry(ENTRY)[:size], PATH)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("expected_ranks",), [True]),
        (("expected_ranks",), "0"),
        (("owner",), 1),
        (("status",), "done"),
        (("tokens",), -1),
        (("tokens",), 7.0),
        (("created_us",), "7"),
        (("cohort_size",), False),
        (("sources",), [[0]]),
        (("resumed_from",), [0, 1, 2]),
        (("files",), {}),
        (("files", 0, "path"), 3),
        (("files", 0, "row_groups"), [None]),
        (("files", 0, "rows"), "2"),
        (("reason",), None),
        (("parallel",), {"data_rank": 1, "data_size": 1}),
        (("parallel",), {"data_rank": False}),
        (("parallel",), {"color": 1}),
    ],
)
def test_a_field_of_another_type_is_refused_at_once(
    path: tuple[str | int, ...], value: object
) -> None:
    with pytest.raises(DatasetError, match="not a manifest entry"):
        load_entry(changed(path, value), PATH)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("outputs", 0, "value"), True),
        (("outputs", 0, "value"), None),
        (("outputs", 0, "values"), ["0x1p0"]),
        (("outputs", 0, "scope"), "world"),
        (("outputs", 0, "scope"), ["rank"]),
        (("outputs", 0), [1]),
        (("contracts",), {"no.stage": {}}),
        (("contracts",), {"sample": {"capability": 3}}),
        (("redaction",), {"prompt": 1}),
        (("settings_tree",), []),
        (("tolerances",), {"loss": [1]}),
        (("origins",), {"log_probs": {"source": "trainer"}}),
        (("files", 0, "columns"), {"reward": ["ab", 2, 0, 1]}),
        (("files", 0, "columns"), {"reward": ["ab", "2", 0, 1, "float32"]}),
        (("files", 0, "columns"), {"reward": ["ab", 2, True, 1, "float32"]}),
        (("files", 0, "columns"), {"reward": ["ab", 2, -1, None, None]}),
    ],
)
def test_a_section_of_another_type_is_refused_before_its_use(
    path: tuple[str | int, ...], value: object
) -> None:
    entry = load_entry(changed(path, value), PATH)
    with pytest.raises(DatasetError, match=f"^{PATH}: not a manifest entry"):
        decode_all(entry)


def test_a_missing_section_is_refused() -> None:
    tree = load_signed(dump_entry(ENTRY), PATH)
    del tree["outputs"]
    entry = load_entry(dump_signed(tree), PATH)
    with pytest.raises(DatasetError, match="outputs"):
        _ = entry.outputs


def test_an_entry_has_no_other_attributes() -> None:
    entry: Any = load_entry(dump_entry(ENTRY), PATH)
    with pytest.raises(AttributeError, match="'Entry' object has no attribute 'rewards'"):
        _ = entry.rewards


def test_an_entry_can_be_sent_to_another_process() -> None:
    entry = load_entry(dump_entry(ENTRY), PATH)
    assert dump_entry(pickle.loads(pickle.dumps(entry))) == dump_entry(ENTRY)  # noqa: S301


def test_a_newer_format_says_so() -> None:
    with pytest.raises(DatasetError, match=r"format 2, expected at most 1\n\nUpgrade"):
        load_entry(changed(("format",), 2), PATH)


def test_an_entry_under_another_name_is_refused() -> None:
    other = entry_path(KEY._replace(rank=0))
    with pytest.raises(DatasetError, match=r"holds the entry of .*\n\nThe file was renamed"):
        load_entry(dump_entry(ENTRY), other)


def test_paths_times_and_producer_are_not_content() -> None:
    moved = dataclasses.replace(FILE, path="data/y.parquet", bytes=10, row_groups=(1, 1))
    other = dataclasses.replace(
        ENTRY, files=(moved,), created_us=5, producer={"commit": "later", "extra": {}}
    )
    assert same_content(ENTRY, other)


@pytest.mark.parametrize(
    "change",
    [
        {"expected_ranks": (0, 1, 2)},
        {"outputs": ()},
        {"cohort_size": 3},
        {"files": ()},
        {"settings_tree": Settings(handoff={"reward": "bfloat16"}).to_json()},
    ],
)
def test_ranks_outputs_settings_and_data_are_content(change: dict[str, Any]) -> None:
    assert not same_content(ENTRY, dataclasses.replace(ENTRY, **change))
