"""Router-replay traces become events of the ranks that wrote them, every line or none."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.dumps import copied, imported, rows
from trajreplay import Lake

CASES = Path(__file__).parents[2] / "cases" / "r3_traces"
KIND = "nemo-rl-r3"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def lines_of(folder: Path) -> list[tuple[str, int, dict[str, Any]]]:
    return [
        (file.name, number, json.loads(line))
        for file in sorted(folder.glob("r3_trace_*.jsonl"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
    ]


@pytest.mark.parametrize("name", ["tq_healthy", "la_healthy", "tq_healthy_pp2cp2"])
def test_every_line_is_an_event_as_it_stands(lake: Lake, name: str) -> None:
    source = imported(lake, KIND, CASES / name)
    assert (source.status, source.problem) == ("imported", "")
    expected = sorted(
        (
            one.get("rank") or 0,
            file,
            number,
            one["event"],
            one.get("key"),
            round(one["time"] * 1e6),
            {key: value for key, value in one.items() if key not in ("event", "time")},
        )
        for file, number, one in lines_of(CASES / name)
    )
    found = []
    for rank, event, key, time, text in rows(
        lake, "select rank, event, sample_id, epoch_us(time), detail from events order by rank, seq"
    ):
        detail = json.loads(text)
        file, number = detail.pop("file"), detail.pop("line")
        found.append((rank, file, number, event, key, time, detail))
    assert found == expected  # in the order of each rank's files
    ranks = {one[0] for one in found}
    assert [(one[0], one[2:]) for one in source.captures] == [
        (name, (None, None, rank)) for rank in sorted(ranks)
    ]
    assert lake.validate(deep=True).ok


def test_imported_again_it_is_unchanged_and_another_trace_is_refused(
    lake: Lake, tmp_path: Path
) -> None:
    folder = copied(CASES / "la_healthy", tmp_path)
    assert imported(lake, KIND, folder).status == "imported"
    before = rows(lake, "select count(*), max(created) from manifest")
    assert imported(lake, KIND, folder).status == "unchanged"
    lake.refresh()
    assert rows(lake, "select count(*), max(created) from manifest") == before
    file = min(folder.glob("*.jsonl"))
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    source = imported(lake, KIND, folder)
    assert source.status == "refused"
    assert "other content" in source.problem
    assert imported(lake, KIND, folder, attempt=1).status == "imported"


def test_a_line_that_is_no_record_is_named_and_nothing_is_left(lake: Lake) -> None:
    source = imported(lake, KIND, CASES / "tq_cut_line_middle")
    assert source.status == "refused"
    assert ", line " in source.problem
    assert "trajreplay routes" in source.hint
    assert rows(lake, "select count(*) from events") == [(0,)]


def test_each_folder_below_a_path_is_a_run_of_its_own(lake: Lake, tmp_path: Path) -> None:
    for name in ("la_healthy", "tq_healthy"):
        copied(CASES / name, tmp_path / "logs")
    (tmp_path / "logs" / "other.jsonl").write_text("{}\n")
    report = lake.import_files(KIND, tmp_path / "logs")
    assert [one.status for one in report.sources] == ["imported", "imported"]
    assert rows(lake, "select distinct run_id from events order by 1") == [
        ("la_healthy",),
        ("tq_healthy",),
    ]


def test_ranks_that_wrote_nothing_are_told(lake: Lake, tmp_path: Path) -> None:
    folder = copied(CASES / "tq_healthy_pp2cp2", tmp_path)
    for file in folder.glob("*.jsonl"):
        ranks = {one.get("rank") for name, _, one in lines_of(folder) if name == file.name}
        if 3 in ranks:
            file.unlink()
    source = imported(lake, KIND, folder)
    assert source.status == "imported"
    assert any("no record of ranks 3" in note for note in source.notes)


@settings(max_examples=20)
@given(data=st.data())
def test_a_changed_byte_is_another_value_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("flip")
    folder = copied(CASES / "la_healthy", place)
    file = min(folder.glob("*.jsonl"))
    content = bytearray(file.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(bytes(content))
    lake = Lake.create(place / "lake")
    source = imported(lake, KIND, folder)
    if source.status == "imported":
        assert rows(lake, "select count(*) from events") == [(len(lines_of(folder)),)]
    else:
        assert source.problem
    shutil.rmtree(place)


@pytest.mark.parametrize("field", ["rank", "world_size"])
def test_a_rank_that_no_job_has_is_refused(field: str, lake: Lake, tmp_path: Path) -> None:
    folder = copied(CASES / "la_healthy", tmp_path)
    file = min(folder.glob("*.jsonl"))
    first, *others = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps(json.loads(first) | {field: 1 << 61}), *others]))
    source = imported(lake, KIND, folder)
    assert source.status == "refused"
    assert "line 1: is of 2,305,843," in source.problem
    assert "expected at most 1,048,576" in source.problem
