"""Router-replay traces as files: strict records, bounded, and never more than regular files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.schema import DatasetError
from trajreplay.schema.bundles.r3 import (
    MAX_LINE_BYTES,
    RecordError,
    parse_record,
    read_trace_folder,
)

CASES = Path(__file__).parents[2] / "cases" / "r3_traces"
LINES = [
    line
    for file in sorted((CASES / "tq_healthy").iterdir())
    for line in file.read_bytes().splitlines()
]
ONE_OF_EACH = list({json.loads(line)["event"]: line for line in LINES}.values())


def parse(line: bytes) -> object:
    return parse_record(line, "trace.jsonl", 1, {})


def test_all_six_events_are_read() -> None:
    assert len(ONE_OF_EACH) == 6
    assert len({type(parse(line)).__name__ for line in ONE_OF_EACH}) == 5  # put and fetched alike


@given(st.sampled_from(ONE_OF_EACH), st.data())
def test_a_line_cut_anywhere_is_refused(line: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(line) - 1))
    with pytest.raises(RecordError) as caught:
        parse(line[:cut])
    assert not caught.value.is_json


def without(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    head, *rest = path
    if not rest:
        return {key: value for key, value in tree.items() if key != head}
    return tree | {head: without(tree[head], tuple(rest))}


def changed(tree: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    head, *rest = path
    return tree | {head: changed(tree[head], tuple(rest), value) if rest else value}


def paths(tree: dict[str, Any]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, value in tree.items():
        found.append((key,))
        found += [(key, *inner) for inner in paths(value)] if isinstance(value, dict) else []
    return found


OPTIONAL = {
    "rank",
    "world_size",
    "input_ids",
    "token_identity",
    "cp_token_identity_verified_count",
    "layer_number",
    "scores_shape",
    "expected",
    "fallback_rows",
}
UNREAD = {
    "replay_backward_list_len",
    "replay_backward_list_len_after",
    "replay_backward_list_len_before",
}


@pytest.mark.parametrize("line", ONE_OF_EACH, ids=lambda line: json.loads(line)["event"])
def test_no_field_may_be_missing_or_of_another_type(line: bytes) -> None:
    tree = json.loads(line)
    action = tree["event"] == "router_replay_action"
    for path in paths(tree):
        if path[-1] in UNREAD:
            continue
        if path[-1] not in OPTIONAL and not (action and path == ("tensor",)):
            with pytest.raises(RecordError):
                parse(json.dumps(without(tree, path)).encode())
        for wrong in (True, {"a": [1]}, 1e300, -5, "\x00" * 2000):
            if (wrong is True and path[-1] == "matches_expected") or (
                wrong == -5 and path[-1] == "time"
            ):
                continue
            with pytest.raises(RecordError) as caught:
                parse(json.dumps(changed(tree, path, wrong)).encode())
            assert path[0] in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        b'{"event": NaN}',
        b'{"event": "tq_fetch_sample", "event": "tq_fetch_sample"}',
        b"[" * 100_000,
        b'{"a":' * 500 + b"1" + b"}" * 500,
        b'{"event": ' + b"9" * 10_000 + b"}",
        b" " * (MAX_LINE_BYTES + 1),
    ],
)
def test_what_is_no_bounded_standard_json_is_refused(line: bytes) -> None:
    with pytest.raises(RecordError):
        parse(line)


def test_an_event_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match="policy_payload_sample"):
        parse(ONE_OF_EACH[0].replace(b"rollout_payload_sample", b"policy_payload_sample"))


def test_a_preview_has_no_more_values_than_the_tensor() -> None:
    tree = json.loads(next(one for one in ONE_OF_EACH if b"router_replay_assignment" in one))
    tree["tensor"]["shape"] = [1, 2]
    with pytest.raises(RecordError, match="at most the 2 values"):
        parse(json.dumps(tree).encode())


def test_equal_tensors_are_held_once() -> None:
    found = read_trace_folder(CASES / "la_healthy")
    tensors = [getattr(one, "routes", None) for one in found.records]
    held = {id(one) for one in tensors if one is not None}
    assert len(held) == len({one for one in tensors if one is not None})


def test_only_traces_are_read_and_lines_are_counted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not json")
    (tmp_path / "deeper.jsonl.d").mkdir()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*ONE_OF_EACH, b"{"]))
    found = read_trace_folder(tmp_path)
    assert (len(found.records), found.files) == (6, ("a.jsonl",))
    (problem,) = found.problems
    assert (problem.file, problem.line, problem.is_json) == ("a.jsonl", 7, False)


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + ONE_OF_EACH[0] + b"\n")
    found = read_trace_folder(tmp_path)
    assert ([one.line for one in found.problems], len(found.records)) == ([1], 1)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    if kind == "link":
        (tmp_path / "other").write_bytes(ONE_OF_EACH[0])
        path.symlink_to(tmp_path / "other")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(DatasetError):
        read_trace_folder(tmp_path)


def test_a_cut_line_counts_unless_all_around_it_is_left_out(tmp_path: Path) -> None:
    early, late = ONE_OF_EACH[0], ONE_OF_EACH[0].replace(b"17959800", b"17959900")
    assert early != late
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([early, early[:40], early, late]) + b"\n")
    found = read_trace_folder(tmp_path, keep=lambda origin: origin.time > 1795985000)
    assert (len(found.records), found.left_out, found.problems) == (1, 3, [])
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([early, early[:40], late]) + b"\n")
    found = read_trace_folder(tmp_path, keep=lambda origin: origin.time > 1795985000)
    assert [one.line for one in found.problems] == [2]


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no folder"):
        read_trace_folder(tmp_path / "nothing")
