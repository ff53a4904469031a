"""Bundles and lakes out, and in again: the same digests and the same report."""

import errno
import io
import json
import math
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.helpers.bundles import CASES, copied
from tests.helpers.captures import record, sample
from trajreplay import (
    CaptureError,
    DatasetError,
    Lake,
    LossSettings,
    ProducerInfo,
    QueryError,
    SampleRecord,
    Settings,
    with_changes,
)
from trajreplay.schema.bundles.archive import pack, unpack
from trajreplay.schema.bundles.relax import write
from trajreplay.schema.bundles.relax.describe import index_tree


def digests(lake: Lake) -> list[tuple[object, ...]]:
    """What the manifest says of every column of every capture."""
    found = lake.sql(
        'select run_id, rollout_id, step_id, rank, "column", digest, source_dtype from checksums '
        'where "column" is not null order by all'
    ).arrow()
    return [tuple(one.values()) for one in found.to_pylist()]


def verdicts(lake: Lake) -> Any:
    return json.loads(json.dumps(lake.replay().to_json()))


@pytest.mark.parametrize(
    "name",
    [
        *("v1_healthy", "v1_cohort_complete", "v1_advantage_tampered", "v1_loss_only"),
        *("v2_healthy", "v2_cohort_complete", "v2_pr65_fault", "v1_nan_log_probs_recorded_nan"),
        *("v1_loose_tolerance", "v1_total_lt_response"),
    ],
)
def test_a_bundle_comes_back_as_it_was(name: str, lake: Lake, tmp_path: Path) -> None:
    lake.import_files("relax-bundle", CASES / name)
    (written,) = lake.export_bundles(tmp_path / "out")
    again = Lake.create(tmp_path / "again")
    report = again.import_files("relax-bundle", written.path)
    assert not report.refused, report.refused[0].problem
    assert digests(again) == digests(lake)
    assert verdicts(again) == verdicts(lake)
    no_place = "a bundle has no place for these, which are left out"
    assert written.notes == (f"{name}: {no_place}: label_hash",)


def test_an_exported_bundle_says_what_it_came_with(lake: Lake, tmp_path: Path) -> None:
    lake.import_files("relax-bundle", CASES / "v1_cohort_complete")
    (written,) = lake.export_bundles(tmp_path)
    for rank in ("rank-0", "rank-1"):
        for file in ("index.json", "expected.json", "manifest.json"):
            mine = json.loads((written.path / rank / file).read_text())
            theirs = json.loads((CASES / "v1_cohort_complete" / rank / file).read_text())
            for tree in (mine, theirs):
                for one in tree.get("samples", []):
                    one.pop("label_hash")
                for one in tree.get("payloads", {}).values():
                    del one["sha256"], one["bytes"]
            assert mine == theirs


def test_placeholders_go_out_and_come_back_as_null(lake: Lake, tmp_path: Path) -> None:
    tokens = [[-0.1, -0.2]] * 2
    record(
        lake,
        lambda capture: capture.samples(
            [sample(i, group_index=None, raw_reward=None, reward=None) for i in (0, 1)]
        ),
        *(
            lambda capture, name=name: capture.tensor(name, tokens)
            for name in ("log_probs", "old_log_probs", "advantages", "entropy")
        ),
        step_id=0,
        stages=["loss.policy"],
    )
    (written,) = lake.export_bundles(tmp_path / "out")
    index = json.loads((written.path / "index.json").read_text())
    assert [one["raw_reward"] for one in index["samples"]] == [0.0, 0.0]
    assert [one["group_index"] for one in index["samples"]] == [0, 0]
    again = Lake.create(tmp_path / "again")
    again.import_files("relax-bundle", written.path)
    rows = again.sql("select distinct group_id, raw_reward, reward from steps").arrow()
    assert rows.to_pylist() == [{"group_id": None, "raw_reward": None, "reward": None}]


def test_what_a_bundle_cannot_say_is_refused_or_noted(lake: Lake, tmp_path: Path) -> None:
    odd = with_changes(Settings(), {"loss.aggregation": "token-mean"})
    record(
        lake,
        lambda capture: capture.samples([sample(0, group_id="math", group_index=None)]),
        settings=odd,
        run_id="odd",
    )
    with pytest.raises(CaptureError, match=r"cannot say the settings loss\.aggregation"):
        lake.export_bundles(tmp_path / "out", run="odd")
    assert list((tmp_path / "out").iterdir()) == []
    record(
        lake,
        lambda capture: capture.samples([sample(0, group_id="math", group_index=None)]),
        settings=Settings(loss=LossSettings()),
        run_id="plain",
    )
    lake.refresh()
    (written,) = lake.export_bundles(tmp_path / "out", run="plain")
    assert "theirs are given in order of appearance" in written.notes[0]
    with pytest.raises(CaptureError, match="is there already"):
        lake.export_bundles(tmp_path / "out", run="plain")


@pytest.mark.parametrize("fault", [0.0, 0.01])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_means_of_a_rank_become_the_sums_that_a_bundle_has(
    reduction: str, scale: float, fault: float, lake: Lake, tmp_path: Path
) -> None:
    names = ("old_log_probs", "log_probs", "advantages")
    with lake.capture(
        run_id="means",
        rollout_id=3,
        step_id=0,
        rank=0,
        expected_ranks=[0],
        settings=Settings(loss=LossSettings()),
        stages=["loss.policy"],
    ) as capture:
        capture.samples([sample(row, 2) for row in range(3)])
        for name in names:
            capture.tensor(name, np.full(6, -1.0, np.float32))
        whole = {"loss": 3.0, "pg_loss": 3.0, "pg_clipfrac": 0.0, "ppo_kl": 0.0}
        factor = scale / (3 if reduction == "mean" else 1)
        given: dict[str, Any] = {name: (value + fault) * factor for name, value in whole.items()}
        capture.expected(
            "loss.policy",
            scope="rank",
            reduction=reduction,
            scale=scale,
            **given,
        )
    before = verdicts(lake)["verdict"]
    assert before == ("diverged" if fault else "pass")
    (written,) = lake.export_bundles(tmp_path)
    again = Lake.create(tmp_path / "again")
    assert not again.import_files("relax-bundle", written.path).refused
    assert verdicts(again)["verdict"] == before
    expected = json.loads((written.path / "expected.json").read_text())["loss.policy"]
    assert expected == pytest.approx({name: one + fault for name, one in whole.items()}, rel=1e-15)
    converted = "are sums over each rank in a bundle"
    assert any(converted in note for note in written.notes) == ((reduction, scale) != ("sum", 1.0))
    assert not any("no place" in note for note in written.notes)


def exported(
    lake: Lake, folder: Path, *samples: SampleRecord, dtype: str = "float32", **about: Any
) -> tuple[str, ...]:
    """The notes of the export of one capture."""
    record(
        lake,
        lambda capture: capture.samples(samples, reward_dtype=dtype),
        settings=Settings(loss=LossSettings()),
        **about,
    )
    lake.refresh()
    (written,) = lake.export_bundles(folder)
    return written.notes


@pytest.mark.parametrize("name", ["raw_reward", "reward"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_json_has_no_word_for_is_refused(
    name: str, value: float, lake: Lake, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match=f"{name} of 's-0' is {value}"):
        exported(lake, tmp_path / "out", sample(0, 2, **{name: value}))
    assert list((tmp_path / "out").iterdir()) == []


def test_metadata_that_is_larger_than_what_is_read_is_refused(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "MAX_METADATA_BYTES", 2000)
    with pytest.raises(CaptureError, match=r"index\.json would take [0-9,]+ bytes"):
        exported(lake, tmp_path / "out", *(sample(row) for row in range(20)))
    assert list((tmp_path / "out").iterdir()) == []


def test_everything_that_a_bundle_has_no_place_for_is_noted(lake: Lake, tmp_path: Path) -> None:
    held: dict[str, Any] = {
        "kept_baseline": 0.5,
        "turns": 2,
        "agent_id": "a",
        "greedy_reward": 0.25,
    }
    (note,) = exported(lake, tmp_path / "out", sample(0, 2, **held), dtype="float64")
    for name in (*held, "that rewards were computed in float64"):
        assert name in note


def test_a_bundle_that_would_be_refused_is_not_written(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for change in ("tamper", "remove"):

        def odd(*args: Any, change: str = change, **named: Any) -> Any:
            tree = index_tree(*args, **named)
            tree["samples"][0] |= {"reward": 7.5} if change == "tamper" else {"sample_id": ""}
            return tree

        monkeypatch.setattr(write, "index_tree", odd)
        with pytest.raises(CaptureError, match=r"a bundle (would say|of it would be refused)"):
            exported(lake, tmp_path / change, sample(0), run_id=change)
        assert list((tmp_path / change).iterdir()) == []


def test_an_incomplete_step_is_not_exported(lake: Lake, tmp_path: Path) -> None:
    record(lake, lambda capture: capture.samples([sample(0)]), expected_ranks=[0, 1])
    for export in (lake.export_bundles, lake.export_lake):
        with pytest.raises(DatasetError, match="no capture of rank 1"):
            export(tmp_path / "out")
    with pytest.raises(QueryError, match="selects nothing"):
        lake.export_bundles(tmp_path / "out", rollouts=[99])


def test_a_lake_is_copied_with_equal_digests(lake: Lake, tmp_path: Path) -> None:
    for name in ("v1_healthy", "v1_cohort_complete"):
        lake.import_files("relax-bundle", CASES / name)
    report = lake.export_lake(tmp_path / "small", run="v1_cohort_complete")
    assert (report.ok, report.captures) == (True, 2)
    small = Lake.open(tmp_path / "small")
    assert digests(small) == [one for one in digests(lake) if one[0] == "v1_cohort_complete"]
    assert verdicts(small)["cohorts"] == [
        one for one in verdicts(lake)["cohorts"] if one["run_id"] == "v1_cohort_complete"
    ]
    with pytest.raises(DatasetError, match="is there already"):
        lake.export_lake(tmp_path / "small")


def test_steps_bring_the_rollouts_that_they_consumed_from(lake: Lake, tmp_path: Path) -> None:
    record(lake, lambda capture: capture.samples([sample(0)]))
    record(lake, lambda capture: capture.samples([sample(0)]), step_id=0)
    lake.export_lake(tmp_path / "small", steps=[(0, 0)])
    kinds = Lake.open(tmp_path / "small").sql("select kind from manifest order by 1").arrow()
    assert kinds["kind"].to_pylist() == ["rollout", "step"]


def test_text_can_only_be_redacted_further(lake: Lake, tmp_path: Path) -> None:
    record(
        lake,
        lambda capture: capture.samples([sample(0, prompt="how long", response="ten")]),
        redaction={"prompt": "truncate:64", "response": "hash"},
    )
    lake.export_lake(tmp_path / "small", redaction={"prompt": "truncate:3"})
    small = Lake.open(tmp_path / "small")
    found = small.sql("select prompt, response from rollouts").arrow().to_pylist()[0]
    assert found["prompt"] == "how"
    assert found["response"].startswith("sha256:")
    texts = ("prompt", "response")
    assert [one for one in digests(small) if one[4] not in texts] == [
        one for one in digests(lake) if one[4] not in texts
    ]
    for number, rule in enumerate(({"prompt": "truncate:65"}, {"response": "truncate:1"})):
        with pytest.raises(CaptureError, match="can only tighten"):
            lake.export_lake(tmp_path / f"more-{number}", redaction=rule)
    lake.export_lake(tmp_path / "none", redaction={"prompt": "drop", "response": "drop"})
    rows = Lake.open(tmp_path / "none").sql("select prompt, response from rollouts").arrow()
    assert rows.to_pylist() == [{"prompt": None, "response": None}]


@pytest.mark.parametrize("what", ["bundle", "lake"])
def test_one_file_for_mail_is_read_as_it_is(what: str, lake: Lake, tmp_path: Path) -> None:
    lake.import_files("relax-bundle", CASES / "v1_entropy_tampered")
    file = tmp_path / "step.tar.zst"
    if what == "bundle":
        lake.export_bundles(file)
    else:
        lake.export_lake(file)
    with Lake.of_files(file) as mailed:
        assert digests(mailed) == digests(lake)
        assert mailed.replay().first_divergent_stage == "loss.policy"
    with pytest.raises(DatasetError, match="is there already"):
        lake.export_bundles(file)


def test_a_file_for_mail_is_written_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", none)
    pack(CASES / "v1_healthy", tmp_path / "x.tar.zst")
    assert [one.name for one in tmp_path.iterdir()] == ["x.tar.zst"]
    with pytest.raises(DatasetError, match="is there already"):
        pack(CASES / "v1_healthy", tmp_path / "x.tar.zst")
    unpack(tmp_path / "x.tar.zst", tmp_path / "x")
    assert (tmp_path / "x" / "COMPLETE").is_file()


def test_a_refused_bundle_of_an_archive_is_named_by_its_place(lake: Lake, tmp_path: Path) -> None:
    pack(CASES / "v1_pickle_reduce", tmp_path / "odd.tar.zst")
    (source,) = lake.import_files("relax-bundle", tmp_path / "odd.tar.zst").sources
    file = str(tmp_path / "odd.tar.zst")
    assert source.path == file
    assert source.files[0] == f"{file}:COMPLETE"
    assert source.problem.startswith(f"{file}:payloads/")
    (tmp_path / "two").mkdir()
    for name in ("v1_pickle_reduce", "v1_healthy"):
        shutil.copytree(CASES / name, tmp_path / "two" / name)
    pack(tmp_path / "two", tmp_path / "two.tar.zst")
    file = str(tmp_path / "two.tar.zst")
    with Lake.of_files(file) as mailed:
        (finding,) = (one for one in mailed.validate().findings if one.severity == "error")
        assert finding.path == f"{file}:v1_pickle_reduce"
        assert finding.message.startswith(f"{file}:v1_pickle_reduce/payloads/")
    pack(CASES.parent / "dumps" / "prime-rl", tmp_path / "several.tar.zst")
    with pytest.raises(CaptureError) as caught, Lake.of_files(tmp_path / "several.tar.zst"):
        pass
    assert caught.value.message.startswith(f"{tmp_path / 'several.tar.zst'}: files of several")


Member = Callable[[tarfile.TarFile], object]


def add(tar: tarfile.TarFile, name: str, size: int = 1, **about: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    for field, value in about.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(b"\0" * size))


def twice(tar: tarfile.TarFile) -> None:
    add(tar, "x")
    add(tar, "x")


def again(tar: tarfile.TarFile) -> None:
    add(tar, "x")
    add(tar, "./x")


def many(tar: tarfile.TarFile) -> None:
    for number in range(20_000):
        add(tar, f"x{number}", 0)


def attributes(tar: tarfile.TarFile) -> None:
    for number in range(100):
        add(tar, f"x{number}", pax_headers={f"a{one}": "" for one in range(number)})


HOSTILE: dict[str, tuple[Member, str]] = {
    "out of the folder": (lambda tar: add(tar, "../x"), "leaves its folder"),
    "an absolute path": (lambda tar: add(tar, "/tmp/x"), "leaves its folder"),
    "a link": (lambda t: add(t, "x", 0, type=tarfile.SYMTYPE, linkname="/etc"), "no plain file"),
    "a device": (lambda tar: add(tar, "x", 0, type=tarfile.CHRTYPE), "no plain file"),
    "the same twice": (twice, "holds 'x' twice"),
    "the same by another name": (again, "holds './x' twice"),
    "many empty files": (many, "far more than it is"),
    "a bomb": (lambda tar: add(tar, "x", 80 << 20), "far more than it is"),
    "a long header": (
        lambda tar: add(tar, "x", pax_headers={"a": "b" * (1 << 20)}),
        "bytes of headers",
    ),
    "a long name": (lambda tar: add(tar, "x" * (1 << 20)), "bytes of headers"),
    "many attributes": (attributes, "too many attributes"),
    "a name of many folders": (lambda tar: add(tar, "a/" * 1500 + "x"), "folders deep"),
    "headers of headers": (
        lambda tar: tar.fileobj.write(tarfile.TarInfo.create_pax_global_header({"a": "b"}) * 1000),
        "bytes of headers",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_for(what: str, tmp_path: Path) -> None:
    fill, says = HOSTILE[what]
    archive = tmp_path / "a.tar.zst"
    with (
        pa.OSFile(str(archive), "wb") as file,
        pa.CompressedOutputStream(file, "zstd") as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        fill(tar)
    (tmp_path / "out").mkdir()
    with pytest.raises(DatasetError, match=says):
        unpack(archive, tmp_path / "out")


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.zst"
    pack(copied("v1_healthy", tmp_path), archive)
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    (tmp_path / "out").mkdir()
    with pytest.raises(DatasetError, match=r"is no \.tar\.zst file that is whole"):
        unpack(archive, tmp_path / "out")


@pytest.mark.parametrize("told", ["9" * 5000, "-1", "x", "٣"])
def test_what_a_stranger_put_for_the_size_is_not_taken(
    told: str, lake: Lake, tmp_path: Path
) -> None:
    producer = ProducerInfo(extra={"dp": told})
    exported(lake, tmp_path / "out", sample(0), producer=producer)
    (index,) = (tmp_path / "out").rglob("index.json")
    assert json.loads(index.read_text())["identity"]["rank"]["dp"] == 1


def test_an_archive_that_was_packed_inside_its_folder_is_read(tmp_path: Path) -> None:
    """As `tar -cf - . | zstd` does, which begins every name with a dot."""
    archive = tmp_path / "a.tar.zst"
    with (
        pa.OSFile(str(archive), "wb") as file,
        pa.CompressedOutputStream(file, "zstd") as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        tar.add(CASES / "v1_cohort_complete", ".")
    with Lake.of_files(archive) as lake:
        assert lake.replay().exit_code == 0
