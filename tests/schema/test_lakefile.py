"""What makes a folder a lake, and what is said of a folder that is none."""

import json
from pathlib import Path

import pytest

from trajreplay import DatasetError, Lake
from trajreplay.schema.canonical import dump_signed
from trajreplay.schema.filedigest import bytes_digest


def test_a_folder_becomes_a_lake_once(tmp_path: Path) -> None:
    Lake.create(tmp_path / "deep" / "lake")
    with pytest.raises(DatasetError, match=r"is a lake already\n\nOpen it"):
        Lake.create(tmp_path / "deep" / "lake")


def test_creating_may_open_what_is_there(tmp_path: Path) -> None:
    before = Lake.create(tmp_path / "lake").path
    identity = (tmp_path / "lake" / "lake.json").read_bytes()
    assert Lake.create(tmp_path / "lake", exist_ok=True).path == before
    assert (tmp_path / "lake" / "lake.json").read_bytes() == identity


def test_its_file_names_format_digest_and_identity(tmp_path: Path) -> None:
    Lake.create(tmp_path / "a")
    Lake.create(tmp_path / "b")
    first, second = (json.loads((tmp_path / one / "lake.json").read_text()) for one in "ab")
    assert (first["format"], first["digest"]) == (1, "blake3")
    assert first["lake_id"] != second["lake_id"]


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_what_is_no_lake_says_so_and_how_to_make_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(DatasetError, match=r"is not a lake: .*\n\nTo make it one: trajreplay init"):
        Lake.open(tmp_path / name)


@pytest.mark.parametrize("signed", [True, False])
def test_a_newer_format_is_refused_however_it_is_signed(tmp_path: Path, signed: bool) -> None:
    tree = {"format": 2, "digest": "blake4", "lake_id": "x"}
    data = dump_signed(tree) if signed else json.dumps(tree).encode()
    (tmp_path / "lake.json").write_bytes(data)
    with pytest.raises(DatasetError, match="format 2, expected at most 1\n\nUpgrade trajreplay"):
        Lake.open(tmp_path)


@pytest.mark.parametrize(
    "tree", [{"format": 0, "digest": "blake3"}, {"format": 1, "digest": "sha256"}, {"x": 1}]
)
def test_another_format_or_digest_is_refused(tmp_path: Path, tree: dict[str, object]) -> None:
    (tmp_path / "lake.json").write_bytes(dump_signed(tree))
    with pytest.raises(DatasetError, match="expected format 1 with digest 'blake3'"):
        Lake.open(tmp_path)


@pytest.mark.parametrize("version", ["true", "1.0", '"1"', "[1]", "null"])
def test_a_format_that_only_equals_the_number_is_refused(tmp_path: Path, version: str) -> None:
    body = f'{{"digest":"blake3","format":{version}'.encode()
    (tmp_path / "lake.json").write_bytes(
        body + b',"~blake3":"' + bytes_digest(body).encode() + b'"}'
    )
    with pytest.raises(DatasetError, match="expected format 1 with digest 'blake3'"):
        Lake.open(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 10_000, b'{"format":1}', b"\xff"])
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "lake.json").write_bytes(data)
    with pytest.raises(DatasetError, match="do not have the digest"):
        Lake.open(tmp_path)


def test_a_place_where_no_folder_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DatasetError, match="cannot make this folder"):
        Lake.create(tmp_path / "file" / "lake")
