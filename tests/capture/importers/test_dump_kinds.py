"""Which kind files are of is told by what they begin with, and kinds are told apart."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.dumps import (
    AREAL,
    DUMPS,
    EXPORT,
    NEMO_RL,
    SAMPLES,
    TRANSPORT,
    TRL,
    VERL,
    copied,
)
from trajreplay import CaptureError, DatasetError, Lake
from trajreplay.capture.importers import ImportOptions, importer_of, recognise

OWN = {
    "nemo-rl": (NEMO_RL, NEMO_RL / "val_data_step1.jsonl"),
    "prime-rl-export": (EXPORT.parent, EXPORT / "rank_0.jsonl"),
    "prime-rl-rollout": (TRANSPORT.parent, TRANSPORT / "rank_0.bin"),
    "verl": (VERL, VERL / "validation_data_dir" / "3.jsonl"),
    "trl": (TRL.parent, TRL / "completions_00003.parquet"),
    "areal": (AREAL.parents[2], AREAL / "17.jsonl"),
}


@pytest.mark.parametrize("kind", OWN)
def test_files_and_folders_are_recognised(kind: str) -> None:
    for path in OWN[kind]:
        assert recognise([path]).kind == kind
    for other in set(OWN) - {kind}:
        assert not [one for path in OWN[kind] for one in importer_of(other).find(path)]


def test_files_of_several_kinds_are_to_be_named() -> None:
    with pytest.raises(CaptureError, match="several kinds: prime-rl-export, prime-rl-rollout"):
        recognise([SAMPLES["prime-rl-export"]])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train_data_step1.jsonl", '{"loss": 1}\n'),
        ("3.jsonl", '{"input": "a", "output": "b"}\n'),
        ("3.jsonl", "[1, 2]\n"),
        ("3.jsonl", ""),
        ("3.jsonl", '{"input": "a", "outp'),
        ("completions_00001.parquet", "PAR2"),
        ("step_1/rank_0.bin", "\x91\x01"),
        ("step_1/rank_0.jsonl", '{"token_ids": []}\n'),
        ("2/17.jsonl", '{"task_id": 17}\n'),
    ],
)
def test_a_name_alone_makes_no_kind(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="latin-1")
    for kind in OWN:
        assert not list(importer_of(kind).find(tmp_path))


BESIDE = {
    "nemo-rl": (OWN["nemo-rl"][1], "train_data_step7.jsonl"),
    "verl": (OWN["verl"][1], "7.jsonl"),
    "trl": (OWN["trl"][1], "completions_00007.parquet"),
    "nemo-gym": (None, "rollouts_7.jsonl"),
}
GYM = '{"responses_create_params": {}, "response": {"output": []}, "reward": 1.0}\n'


@pytest.mark.parametrize("kind", BESIDE)
@pytest.mark.parametrize("content", [b"", b'{"inp', b"\0\0\0\0"])
def test_a_damaged_file_among_dumps_is_found_and_refused(
    kind: str, content: bytes, tmp_path: Path
) -> None:
    source, name = BESIDE[kind]
    if source is None:
        (tmp_path / "rollouts_3.jsonl").write_text(GYM)
    else:
        shutil.copy(source, tmp_path)
    damaged = tmp_path / name
    damaged.write_bytes(content)
    (tmp_path / "other.jsonl").touch()
    for path in (tmp_path, damaged):
        found = list(importer_of(kind).find(path))
        assert [one for one in found if one.name == name] == [damaged]
        assert len(found) == 1 + (path == tmp_path)
    with pytest.raises(DatasetError, match=name):
        importer_of(kind).read(damaged, ImportOptions())


FOLDERS = {
    "prime-rl-export": (EXPORT, "step_6/rank_0.jsonl"),
    "prime-rl-rollout": (TRANSPORT, "step_6/rank_0.bin"),
    "areal": (AREAL, "3/18.jsonl"),
}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("content", [b"", b'{"inp', b"\0\0\0\0"])
def test_a_damaged_folder_among_dumps_is_found_and_refused(
    kind: str, content: bytes, tmp_path: Path
) -> None:
    source, name = FOLDERS[kind]
    whole = copied(source, tmp_path / "dumps")
    damaged = tmp_path / "dumps" / name
    damaged.parent.mkdir()
    damaged.write_bytes(content)
    (tmp_path / "dumps" / "7").mkdir()
    assert set(importer_of(kind).find(tmp_path)) == {whole, damaged.parent}
    for path in (damaged, damaged.parent):
        assert list(importer_of(kind).find(path)) == [damaged.parent]
    with Lake.of_files(tmp_path / "dumps", kind=kind) as lake:
        assert lake.imported is not None
        assert {one.path: one.status for one in lake.imported.sources} == {
            str(whole): "imported",
            str(damaged.parent): "refused",
        }
    shutil.rmtree(whole)
    assert not list(importer_of(kind).find(tmp_path))  # a name alone makes no kind


def test_an_evaluation_of_areal_that_is_damaged_is_not_passed_by(tmp_path: Path) -> None:
    whole = copied(AREAL, tmp_path / "trial" / "rollout")
    damaged = tmp_path / "trial" / "eval-rollout" / "2" / "17.jsonl"
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    assert set(importer_of("areal").find(tmp_path)) == {whole, damaged.parent}


@pytest.mark.parametrize("place", ["", "rollout_data/"])
def test_a_broken_dump_of_slime_is_found_wherever_it_lies(place: str, tmp_path: Path) -> None:
    dump = DUMPS / "slime" / "rollout_data" / "0.pt"
    folder = tmp_path / "runs" / place
    folder.mkdir(parents=True)
    shutil.copy(dump, folder / "0.pt")
    (folder / "1.pt").touch()
    (folder / "2.pt").write_bytes(dump.read_bytes()[:99])
    torch.save(torch.zeros(2), tmp_path / "runs" / "model_7.pt")  # is none, and is called otherwise
    for path in (tmp_path, folder):
        found = list(importer_of("slime").find(path))
        assert [one.name for one in found] == ["0.pt", "1.pt", "2.pt"]
    with Lake.of_files(tmp_path) as lake:
        assert lake.imported is not None
        assert [one.status for one in lake.imported.sources] == ["imported", *["refused"] * 2]
    assert [one.name for one in importer_of("slime").find(folder / "1.pt")] == ["1.pt"]


@pytest.mark.parametrize("kind", OWN)
def test_no_link_is_followed(kind: str, tmp_path: Path) -> None:
    source = OWN[kind][1]
    folder = tmp_path / source.parent.name
    folder.mkdir()
    (folder / source.name).symlink_to(source)
    (tmp_path / "linked").symlink_to(source.parent)
    assert not list(importer_of(kind).find(tmp_path))


def test_a_link_that_is_named_is_followed_and_none_below_it(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "train_data_step1.jsonl").write_bytes(OWN["nemo-rl"][1].read_bytes())
    (real / "train_data_step2.jsonl").symlink_to(OWN["nemo-rl"][1])
    (tmp_path / "latest").symlink_to(real)
    (tmp_path / "file.jsonl").symlink_to(real / "train_data_step1.jsonl")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for name in ("latest", "file.jsonl"):
        with Lake.of_files(tmp_path / name) as lake:
            assert lake.imported is not None
            (one,) = lake.imported.sources
        assert (one.status, one.path) == ("imported", str(real / "train_data_step1.jsonl"))
    with pytest.raises(CaptureError, match="gone is not there"), Lake.of_files(tmp_path / "gone"):
        pass


def test_every_file_that_was_read_is_reported(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    read: dict[str, list[str]] = {}
    for kind, path in SAMPLES.items():
        for one in lake.import_files(kind, path).to_json()["sources"]:
            assert one["status"] == "imported"
            read[kind] = [*read.get(kind, []), *one["files"]]
    assert read["prime-rl-rollout"] == [str(one) for one in sorted(TRANSPORT.glob("*.bin"))]
    assert read["areal"] == [str(one) for one in sorted(AREAL.glob("*.jsonl"))]
    assert set(read["trl"]) == {str(one) for one in TRL.glob("*_0000[13].parquet")}
    report = lake.import_files("slime", DUMPS / "slime")
    assert {Path(one).name for one in report.sources[-1].files} == {"0.pt"}


def test_steps_are_found_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for step in (10, 9, 1):
        shutil.copy(NEMO_RL / "train_data_step1.jsonl", tmp_path / f"train_data_step{step}.jsonl")
    found = [one.name for one in importer_of("nemo-rl").find(tmp_path)]
    assert found == [f"train_data_step{step}.jsonl" for step in (1, 9, 10)]


def test_every_sample_is_of_a_kind() -> None:
    assert {one.name for one in DUMPS.iterdir()} >= {
        one.relative_to(DUMPS).parts[0] for one in SAMPLES.values()
    }
