"""Dumps that are damaged at random: refused or read, never a traceback, never a pass by mistake."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dumps import AREAL, EXPORT, NEMO_RL, TRANSPORT, TRL, VERL, rows
from trajreplay import CaptureError, Lake
from trajreplay.capture.importers import ImportOptions, import_files, importer_of

FILES = {
    "nemo-rl": NEMO_RL / "train_data_step1.jsonl",
    "prime-rl-export": EXPORT / "rank_0.jsonl",
    "prime-rl-rollout": TRANSPORT / "rank_0.bin",
    "verl": VERL / "rollout_data_dir" / "3.jsonl",
    "trl": TRL / "completions_00001.parquet",
    "areal": AREAL / "17.jsonl",
}
STATED: dict[str, dict[str, Any]] = {
    "nemo-rl": {"profile": "nemo-rl", "group_by_position": 4},
    "trl": {
        "profile": "trl",
        "group_by_position": 4,
        "changes": {"reward.weights": {"r_digit": 1.0, "r_len": 0.5}},
    },
}
JUDGED = {"nemo-rl": "raw_reward", "trl": "reward_components"}
COUNT, JUDGED_COUNT = 350, 100


def damaged(content: bytes, count: int) -> Iterator[bytes]:
    """Copies of a file that were cut, or of which bytes were flipped, changed, lost or doubled."""
    chance = random.Random(11)
    for _ in range(count):
        copy = bytearray(content)
        at = chance.randrange(len(copy))
        size = chance.randrange(1, 40)
        match chance.randrange(5):
            case 0:
                del copy[at:]
            case 1:
                for _ in range(chance.choice((1, 1, 2, 8))):
                    copy[chance.randrange(len(copy))] ^= 1 << chance.randrange(8)
            case 2:
                copy[at] = chance.randrange(256)
            case 3:
                del copy[at : at + size]
            case _:
                start = chance.randrange(len(copy))
                copy[at:at] = content[start : start + size]
        yield bytes(copy)


def placed(kind: str, to: Path) -> Path:
    """A copy of the sample of a kind, alone beside what marks it as whole."""
    source = FILES[kind]
    folder = to / source.parent.name
    folder.mkdir(parents=True)
    if (source.parent / "STABLE").exists():
        (folder / "STABLE").touch()
    return Path(shutil.copy(source, folder))


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    path, importer, seen = placed(kind, tmp_path), importer_of(kind), set()
    for content in damaged(path.read_bytes(), COUNT):
        path.write_bytes(content)
        try:
            (source,) = import_files(None, importer, [path], ImportOptions()).sources
        except CaptureError:  # it is nothing of the kind any more
            seen.add("not found")
        else:
            seen.add(source.status)
            assert bool(source.problem) == (source.status == "refused")
    assert {"checked", "refused"} <= seen


@pytest.mark.parametrize("kind", STATED)
def test_what_passes_is_what_was_written(kind: str, tmp_path: Path) -> None:
    path, options = placed(kind, tmp_path), ImportOptions(**STATED[kind])
    query = f"select {JUDGED[kind]}, reward from rollouts order by row"
    whole = Lake.create(tmp_path / "whole")
    whole.import_files(kind, path, options=options)
    written = rows(whole, query)
    verdicts = set()
    for number, content in enumerate(damaged(path.read_bytes(), JUDGED_COUNT)):
        path.write_bytes(content)
        lake = Lake.create(tmp_path / f"lake-{number}")
        try:
            report = lake.import_files(kind, path, options=options)
        except CaptureError:
            continue
        if report.refused:
            continue
        verdict = lake.replay().verdict
        verdicts.add(verdict)
        if verdict in ("pass", "precision"):
            found = rows(lake, query)
            assert found
            for mine, theirs in zip(found, written, strict=False):
                assert mine[1] == pytest.approx(theirs[1], abs=1e-5)
                assert mine[0] == pytest.approx(theirs[0], abs=1e-5, nan_ok=True)
    assert verdicts >= {"pass"}
