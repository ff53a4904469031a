"""`trajreplay validate`: findings, summary, exit codes."""

import json
import re
from pathlib import Path
from typing import Any

from tests.helpers.cli import Outcome, run
from tests.helpers.mutate import change_json
from tests.helpers.small_lakes import faulty_lake, gappy_lake
from trajreplay.cli.verbs.validate import validation_lines
from trajreplay.query import Catalog, ValidationFinding, ValidationReport


def validate(lake: Path, *args: str) -> Outcome:
    outcome = run("validate", "--lake", lake, *args)
    return Outcome(outcome.code, re.sub(r"[\d,]+ bytes", "N bytes", outcome.out), outcome.err)


def test_a_whole_lake_is_ok_whatever_its_arithmetic(tmp_path: Path) -> None:
    lake = Path(faulty_lake(tmp_path / "lake").path)
    assert validate(lake) == Outcome(0, "ok: 3 captures, 3 files, N bytes: nothing found\n", "")


def test_deep_finds_a_seal_that_its_column_does_not_have(tmp_path: Path) -> None:
    lake = faulty_lake(tmp_path / "lake")
    key = next(iter(Catalog.open(lake._store).keys))

    def forge(tree: dict[str, Any]) -> None:
        columns = tree["files"][0]["columns"]
        columns["reward"][0] = "0" * 64

    change_json(lake, key, forge)
    assert validate(Path(lake.path)).code == 0
    outcome = validate(Path(lake.path), "--deep")
    assert outcome.code == 3
    assert "error integrity: " in outcome.out
    assert "column reward has the digest" in outcome.out


def test_what_a_replay_would_refuse_is_an_error(tmp_path: Path) -> None:
    outcome = validate(Path(gappy_lake(tmp_path / "lake").path))
    assert outcome.code == 3
    first, closing = outcome.out.splitlines()
    assert first.startswith("error completeness: run 'r' rollout 1: no capture of rank 1")
    assert closing == "broken: 2 captures, 2 files, N bytes: 1 error"


def test_a_file_that_nothing_names_is_a_warning(tmp_path: Path) -> None:
    lake = Path(faulty_lake(tmp_path / "lake").path)
    (lake / "data" / "stray\x1b.parquet").write_bytes(b"")
    outcome = validate(lake)
    assert outcome.code == 0
    assert outcome.out.splitlines() == [
        "warning stray: data/stray\\x1b.parquet: no manifest entry names it: ignored",
        "ok: 3 captures, 3 files, N bytes: 1 warning",
    ]


def test_other_formats_are_the_findings_with_the_summary_on_stderr(tmp_path: Path) -> None:
    lake = Path(gappy_lake(tmp_path / "lake").path)
    outcome = validate(lake, "--format", "ndjson")
    assert outcome.code == 3
    (finding,) = map(json.loads, outcome.out.splitlines())
    assert (finding["severity"], finding["check"]) == ("error", "completeness")
    assert outcome.err.startswith("broken: 2 captures")
    assert validate(lake, "--format", "ndjson", "-q").err == ""


def test_many_findings_of_a_kind_are_counted_unless_all_are_asked_for() -> None:
    findings = [ValidationFinding("error", "stray", f"data/{one}", "ignored") for one in range(30)]
    report = ValidationReport(
        [*findings, ValidationFinding("error", "integrity", "x", "x has 3 bytes")]
    )
    lines = list(validation_lines(report))
    assert lines[-3] == "error stray: and 20 more (--all shows them)"
    assert lines[-2] == "error integrity: x has 3 bytes"
    assert lines[-1] == "broken: 0 captures, 0 files, 0 bytes: 31 errors"
    assert len(lines) == 13
    assert len(list(validation_lines(report, everything=True))) == 32
    assert "\x1b[31merror\x1b[0m stray" in next(validation_lines(report, color=True))


def test_notes_that_say_the_same_of_several_places_are_told_once() -> None:
    notes = [
        ValidationFinding("info", "closure", None, f"run 'r-{one}' rollout {one}: judged alone")
        for one in range(200)
    ]
    strays = [
        ValidationFinding("warning", "stray", f"data/{one}", f"data/{one}: ignored")
        for one in range(3)
    ]
    other = [ValidationFinding("info", "closure", None, "run 'r-0' rollout 7: not judged")]
    report = ValidationReport([*notes, *strays, *other])
    assert list(validation_lines(report))[:-1] == [
        "warning stray: 3 alike, the first data/0: ignored",
        "info closure: 200 alike, the first run 'r-0' rollout 0: judged alone",
        "info closure: run 'r-0' rollout 7: not judged",
    ]
    assert len(list(validation_lines(report, everything=True))) == 205


def test_notes_that_differ_in_a_number_are_told_apart() -> None:
    notes = [ValidationFinding("info", "size", None, f"{one} samples are short") for one in (2, 3)]
    assert len(list(validation_lines(ValidationReport(notes)))) == 3


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    lake = Path(faulty_lake(tmp_path / "lake").path)
    file = min((lake / "data").rglob("*.parquet"))
    content = bytearray(file.read_bytes())
    content[40] ^= 4
    file.write_bytes(content)
    outcome = validate(lake)
    assert outcome.code == 3
    assert file.name in outcome.out
