import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.captures import record, sample
from tests.helpers.mutate import (
    change_entry,
    change_json,
    change_table,
    change_value,
    data_file,
    entry_file,
    sign_file,
)
from tests.helpers.queried import write_capture, write_rollout, write_step
from trajreplay import Lake, ParallelCoordinates, RecomputeConfig, SampleRecord
from trajreplay.query import ValidationReport
from trajreplay.schema.layout import attempt_path


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def found(report: ValidationReport, severity: str = "error") -> list[tuple[str, str]]:
    return [(one.check, one.message) for one in report.findings if one.severity == severity]


def only_error(lake: Lake, *, deep: bool = False) -> tuple[str, str]:
    (error,) = found(lake.validate(deep=deep))
    return error


def rewritten(path: Path, **options: Any) -> None:
    """Write a data file anew with other Parquet options."""
    table = pq.ParquetFile(path).read()
    pq.write_table(table, path, **{"store_schema": False} | options)


def test_a_healthy_lake_has_no_findings(lake: Lake) -> None:
    write_rollout(lake, 0)
    write_step(lake, 0, 0)
    seen: list[tuple[int, int]] = []
    report = lake.validate(progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert report.findings == []
    assert (report.captures, report.files) == (4, 4)
    assert report.bytes == sum(path.stat().st_size for path in Path(lake.path).glob("data/**/*.p*"))
    assert seen == [(2, 4), (4, 4)]
    assert report.arrow().num_rows == 0


def test_an_empty_lake_is_valid(lake: Lake) -> None:
    assert lake.validate().ok


@pytest.mark.parametrize("column", ["log_probs", "reward", "sample_id", "loss_mask", "rank"])
def test_a_changed_value_of_any_column_is_found_by_its_digest(lake: Lake, column: str) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    path = data_file(lake, entry.key)
    table = pq.ParquetFile(path).read()
    changed = table[column].to_pylist()[::-1]
    if column == "rank":
        changed = [1, 1]
    position = table.column_names.index(column)
    field = table.schema.field(position)
    pq.write_table(
        table.set_column(position, field, pa.array(changed, field.type)),
        path,
        store_schema=False,
        write_statistics=False,
    )
    sign_file(lake, entry.key)
    check, message = only_error(lake, deep=True)
    assert check == "integrity"
    assert column in message or "loss_mask" in message


@pytest.mark.parametrize("name", ["old_log_probs", "log_probs"])
def test_each_float_list_has_its_own_digest_made_anew(lake: Lake, name: str) -> None:
    entry = record(
        lake,
        lambda capture: capture.samples([sample(0, length=2)]),
        lambda capture: capture.tensor("old_log_probs", [[-1.0, -2.0]]),
        lambda capture: capture.tensor("log_probs", [[-1.5, -2.5]]),
    )
    path = data_file(lake, entry.key)
    table = pq.ParquetFile(path).read()
    index = table.column_names.index(name)
    values = pa.array([[-3.0, -4.0]], table[name].type)
    changed = table.set_column(index, table.schema.field(index), values)
    pq.write_table(changed, path, store_schema=False, write_statistics=False)
    sign_file(lake, entry.key)
    check, message = only_error(lake, deep=True)
    assert check == "integrity"
    assert f"column {name} has the digest" in message


def test_a_file_whose_bytes_are_not_sealed_is_decoded_whole(lake: Lake) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    change_json(lake, entry.key, lambda tree: tree["files"][0].update(digest=""))
    assert lake.validate().findings == []
    change_json(lake, entry.key, set_seal(0, "0" * 64))
    assert "column log_probs has the digest" in only_error(lake)[1]


@pytest.mark.parametrize("where", [0.02, 0.3, 0.5, 0.7, 0.97])
def test_a_changed_byte_anywhere_in_a_file_is_found_without_decoding(
    lake: Lake, where: float
) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    path = data_file(lake, entry.key)
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(bytes(data))
    assert "its bytes changed" in only_error(lake)[1]


def test_a_large_file_is_verified_to_its_last_byte(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    monkeypatch.setattr("trajreplay.query.files.datafile.WHOLE_LIMIT_BYTES", 0)
    assert lake.validate().findings == []
    path = data_file(lake, entry.key)
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(bytes(data))
    assert "its bytes changed" in only_error(lake)[1]


def test_a_lie_about_values_that_only_decoding_shows_is_left_to_deep_and_to_replay(
    lake: Lake,
) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    change_json(lake, entry.key, set_seal(0, "0" * 64))
    assert lake.validate().ok
    assert "column log_probs has the digest" in only_error(lake, deep=True)[1]


def test_key_pages_seen_before_are_no_proof_for_another_key(lake: Lake) -> None:
    _, second = write_rollout(lake, 0)
    zeros = pa.array([0, 0], pa.int32())  # as rank 0 has them
    change_table(
        lake,
        second.key,
        lambda table: table.set_column(table.column_names.index("rank"), "rank", zeros),
    )
    check, message = only_error(lake)
    assert check == "integrity"
    assert "column rank is not that of its entry" in message


@pytest.mark.parametrize("name", ["reward", "log_probs", "sample_id"])
def test_statistics_on_anything_but_keys_are_refused(lake: Lake, name: str) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    path = data_file(lake, entry.key)
    leaf = "log_probs.list.element" if name == "log_probs" else name
    rewritten(path, write_statistics=[leaf])
    sign_file(lake, entry.key)
    check, message = only_error(lake)
    assert check == "statistics"
    assert f"column {name} has statistics, expected them on keys only" in message


def test_statistics_that_are_not_the_entrys_key_are_refused(lake: Lake) -> None:
    (entry,) = write_rollout(lake, 7, ranks=[0], expected_ranks=[0])
    path = data_file(lake, entry.key)
    data = path.read_bytes()
    footer = data.rindex((7).to_bytes(8, "little"))
    path.write_bytes(data[:footer] + (9).to_bytes(8, "little") + data[footer + 8 :])
    sign_file(lake, entry.key)
    messages = [message for _, message in found(lake.validate())]
    assert any("rollout_id has statistics of" in message for message in messages)


def test_key_columns_of_another_capture_are_refused_though_signed(lake: Lake) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    change_table(
        lake,
        entry.key,
        lambda table: table.set_column(
            table.column_names.index("rollout_id"), "rollout_id", pa.array([9, 9], pa.int64())
        ),
    )
    check, message = only_error(lake)
    assert check == "integrity"
    assert "column rollout_id is not that of its entry" in message


def test_missing_truncated_linked_and_special_files_are_each_named(lake: Lake) -> None:
    entries = [*write_rollout(lake, 0), *write_rollout(lake, 1)]
    paths = [data_file(lake, entry.key) for entry in entries]
    paths[0].unlink()
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    moved = paths[2].rename(paths[2].with_suffix(".moved"))
    paths[2].symlink_to(moved)
    paths[3].unlink()
    os.mkfifo(paths[3])
    messages = [message for _, message in found(lake.validate())]
    for path, text in zip(paths, ("is missing", "bytes", "is a link", "is a pipe"), strict=True):
        assert any(path.name in message and text in message for message in messages), text


def test_damaged_entries_and_attempt_records_are_each_named(lake: Lake) -> None:
    entries = write_rollout(lake, 0)
    write_rollout(lake, 0, run_id="x")
    entry_file(lake, entries[0].key).write_bytes(b"{}")
    (Path(lake.path) / attempt_path("x", 0)).write_bytes(b"{}")
    errors = found(lake.validate())
    assert any(check == "integrity" and "rollout.-.0" in message for check, message in errors)
    assert any(check == "attempt" and "run_id=x/0.json" in message for check, message in errors)
    assert not any("no capture of rank 0" in message for _, message in errors)


def test_a_misnamed_entry_and_a_link_among_entries_are_findings(lake: Lake) -> None:
    entries = write_rollout(lake, 0)
    path = entry_file(lake, entries[0].key)
    path.with_name("notes.json").write_bytes(b"{}")
    assert "no capture has this name" in only_error(lake)[1]
    path.with_name("notes.json").unlink()
    path.with_name("link.json").symlink_to(path)
    assert "link or special file" in found(lake.validate())[0][1]


def test_incomplete_sets_are_errors_and_superseded_ones_are_told(lake: Lake) -> None:
    write_rollout(lake, 0, ranks=[1])
    check, message = only_error(lake)
    assert check == "completeness"
    assert "no capture of rank 0" in message
    write_rollout(lake, 0, attempt=1, resumed_from=(0, 0))
    report = lake.validate()
    assert report.ok
    assert "superseded" in found(report, "info")[0][1]


def test_overlapping_attempts_are_an_error(lake: Lake) -> None:
    write_rollout(lake, 0)
    write_rollout(lake, 0, attempt=1)
    assert len(found(lake.validate())) == 2


def test_a_damaged_entry_does_not_hide_that_attempts_overlap(lake: Lake) -> None:
    write_rollout(lake, 0)
    (first, _) = write_rollout(lake, 0, attempt=1)
    path = entry_file(lake, first.key)
    path.write_bytes(path.read_bytes()[:-1])
    found = [(one.check, one.message) for one in Lake.open(lake.path).validate().findings]
    assert sum(check == "integrity" for check, _ in found) == 1
    assert any("none is recorded as resumed" in text for _, text in found)
    damage = next(text for check, text in found if check == "integrity")
    assert sum(damage in text for _, text in found) == 1  # said once


def test_a_source_that_is_not_in_the_lake_is_told(lake: Lake) -> None:
    write_step(lake, 3, 0)
    report = lake.validate()
    assert report.ok
    ((check, message),) = found(report, "info")
    assert check == "closure"
    assert "rollout 3, which is not in the lake" in message


def test_files_that_no_entry_names_are_a_warning_and_leftovers_are_told(lake: Lake) -> None:
    entries = write_rollout(lake, 0)
    path = data_file(lake, entries[0].key)
    path.with_name("stray.parquet").write_bytes(b"whatever")
    (Path(lake.path) / "_tmp").mkdir(exist_ok=True)
    (Path(lake.path) / "_tmp" / "half").write_bytes(b"123")
    report = lake.validate()
    assert report.ok
    ((check, message),) = found(report, "warning")
    assert (check, message) == ("stray", "no manifest entry names it: ignored")
    assert "1 unfinished files of 3 bytes" in found(report, "info")[0][1]


@pytest.mark.parametrize(
    ("rules", "stored", "expected"),
    [
        ({"prompt": "hash"}, "plain words", "prompt is plain text, though the policy says hash"),
        ({"prompt": "truncate:4"}, "12345", "prompt has 5 characters, expected at most 4"),
        ({}, "anything", "prompt is stored, though the policy drops it"),
        ({"prompt": "shred"}, "anything", "policy cannot be read"),
    ],
)
def test_text_beyond_the_redaction_policy_is_an_error(
    lake: Lake, rules: dict[str, str], stored: str, expected: str
) -> None:
    entry = record(
        lake,
        lambda capture: capture.samples([sample(0, prompt="x" * 9)]),
        redaction={"prompt": "truncate:100"},
    )
    change_value(lake, entry.key, "prompt", 0, lambda _: stored)
    assert lake.validate().ok
    change_json(lake, entry.key, lambda tree: tree.update(redaction=rules))
    check, message = only_error(lake)
    assert check == "redaction"
    assert expected in message


def drop_value(values: list[Any]) -> list[Any]:
    return values[:-1]


@pytest.mark.parametrize("column", ["log_probs", "loss_mask"])
def test_lists_of_another_length_than_the_response_are_an_error(lake: Lake, column: str) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    change_value(lake, entry.key, column, 1, drop_value)
    check, message = only_error(lake, deep=True)
    assert check == "content"
    assert f"row 1: {column} has 2 values, expected response_length = 3" in message


def test_too_many_values_of_a_list_are_an_error_without_decoding_it(lake: Lake) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    change_value(lake, entry.key, "log_probs", 1, drop_value)
    check, message = only_error(lake)
    assert check == "content"
    assert "column log_probs has 4 values, expected 5, the sum of response_length" in message


def test_a_mask_of_something_else_than_0_and_1_is_an_error(lake: Lake) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    change_value(lake, entry.key, "loss_mask", 0, lambda _: 7, token=0)
    assert "loss_mask has the value 7, expected 0 or 1" in only_error(lake)[1]


def set_seal(position: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        tree["files"][0]["columns"]["log_probs"][position] = value

    return change


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [(2, 1, "has 0 nulls, its entry says 1"), (3, 5, "has 0 non-finite values, its entry says 5")],
)
def test_counts_of_the_entry_are_held_against_the_values(
    lake: Lake, position: int, value: int, message: str
) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    change_json(lake, entry.key, set_seal(position, value))
    assert message in only_error(lake, deep=True)[1]


def test_nan_and_infinity_are_no_error(lake: Lake) -> None:
    record(
        lake,
        lambda capture: capture.samples([sample(0, reward=float("nan"))]),
        lambda capture: capture.tensor("log_probs", [[float("inf"), float("nan")]]),
    )
    assert lake.validate().findings == []


def test_the_token_count_is_held_against_the_lengths(lake: Lake) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    change_entry(lake, entry.key, lambda old: replace(old, tokens=99))
    assert "has 5 response tokens, its entry says 99" in only_error(lake)[1]


def test_a_sample_that_two_ranks_of_a_shard_hold_is_an_error(lake: Lake) -> None:
    for rank in (0, 1):
        record(
            lake,
            lambda capture: capture.samples([sample(0)]),
            rank=rank,
            expected_ranks=[0, 1],
        )
    check, message = only_error(lake)
    assert check == "identity"
    assert "rank 1 holds sample 's-0' twice" in message


def test_the_same_id_from_two_rollouts_or_shards_is_no_error(lake: Lake) -> None:
    write_rollout(lake, 0, ranks=[0], expected_ranks=[0], size=1)
    write_rollout(lake, 1, ranks=[0], expected_ranks=[0], size=1)
    both = [sample(0, source_rollout_id=0), sample(0, source_rollout_id=1)]
    record(lake, lambda capture: capture.samples(both), rollout_id=1, step_id=0)
    for rank in (0, 1):
        parallel = ParallelCoordinates(data_rank=rank, data_size=2)
        write_capture(lake, 0 + rank, rollout_id=2, fields={"sample_id": "s"}, size=1,
                      parallel=parallel)  # fmt: skip
    assert lake.validate().findings == []


def test_a_copy_that_differs_from_its_owner_is_an_error(lake: Lake) -> None:
    for rank in (0, 1):
        reward = float(rank)
        record(
            lake,
            lambda capture, reward=reward: capture.samples([sample(0, reward=reward)]),  # type: ignore[misc]
            rank=rank,
            expected_ranks=[0, 1],
            parallel=ParallelCoordinates(tensor_rank=rank, tensor_size=2),
        )
    check, message = only_error(lake)
    assert check == "copies"
    assert "differs in reward" in message


def test_settings_of_a_newer_version_are_a_warning(lake: Lake) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    change_json(lake, entry.key, lambda tree: tree["settings_tree"].update(novel={}))
    report = lake.validate()
    assert report.ok
    assert "novel" in found(report, "warning")[0][1]


def test_large_captures_are_checked_a_column_at_a_time(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    monkeypatch.setattr("trajreplay.query.validating.files.WHOLE_LIMIT_BYTES", 0)
    assert lake.validate(deep=True).ok
    change_value(lake, entry.key, "log_probs", 1, drop_value)
    assert "expected response_length = 3" in only_error(lake, deep=True)[1]


def test_findings_come_as_a_table(lake: Lake) -> None:
    write_rollout(lake, 0, ranks=[1])
    report = lake.validate()
    assert report.counts == {"error": 1}
    assert report.arrow()["severity"].to_pylist() == ["error"]


def test_spans_of_weights_are_as_many_as_they_are(tmp_path: Path) -> None:
    """A span for each response of five tokens: no list of tokens, and as right as one."""
    lake = Lake.create(tmp_path / "spans")
    with lake.capture(
        run_id="r", rollout_id=0, rank=0, expected_ranks=[0], settings=RecomputeConfig()
    ) as capture:
        spans = [(0, 5, 3)]
        capture.samples([SampleRecord("s-0", 5, 6, [1] * 5, weight_versions=spans)])
    assert lake.validate().ok, lake.validate().findings
