"""Files changed without signing them anew: every change that matters is refused, exit code 3."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from tests.helpers.cohorts import STEP_COLUMNS
from tests.helpers.mutate import copied, data_file, entry_file, flip_bit
from tests.helpers.scenes import (
    drawn,
    rollout_key,
    step_key,
    write_rollout,
    write_step,
    write_whole,
)
from trajreplay import DatasetError, Lake, TrajReplayError
from trajreplay.query import Catalog, read_columns
from trajreplay.schema import CaptureKey
from trajreplay.schema.tables import STEPS

FLIPS = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with a rollout, a step that consumed it, and a step with all stages."""
    lake = Lake.create(tmp_path_factory.mktemp("intact") / "lake")
    samples = drawn()
    write_rollout(lake, samples)
    write_step(lake, samples)
    write_whole(lake, samples, step_id=1)
    return Path(lake.path)


def _code(lake: Lake) -> int:
    """The exit code that a replay of the lake comes to."""
    try:
        return lake.replay().exit_code
    except TrajReplayError:
        return 3


def _spread(size: int, count: int, seed: int) -> Iterator[tuple[int, int]]:
    """Positions all over a file, one in each of so many regions, and a bit of each."""
    choose = random.Random(seed)
    for region in range(count):
        start, stop = region * size // count, (region + 1) * size // count
        if start < stop:
            yield choose.randrange(start, stop), choose.randrange(8)


def test_an_intact_copy_passes(folder: Path) -> None:
    with copied(folder) as lake:
        assert lake.replay().verdict == "pass"


@pytest.mark.parametrize("key", [rollout_key(0), step_key(1), step_key(0, 1)])
def test_every_flipped_bit_of_an_entry_is_refused(folder: Path, key: CaptureKey) -> None:
    with copied(folder) as lake:
        path = entry_file(lake, key)
        for position, bit in _spread(path.stat().st_size, FLIPS, seed=key.rank):
            flip_bit(path, position, bit)
            assert _code(Lake.open(lake.path)) == 3, (position, bit)
            flip_bit(path, position, bit)
        assert _code(Lake.open(lake.path)) == 0


@pytest.mark.parametrize("name", ["lake.json", "_manifest/attempts/run_id=r/0.json"])
def test_every_flipped_bit_of_the_other_records_is_refused(folder: Path, name: str) -> None:
    with copied(folder) as lake:
        path = Path(lake.path) / name
        for position, bit in _spread(path.stat().st_size, 20, seed=3):
            flip_bit(path, position, bit)
            with pytest.raises(DatasetError):
                Lake.open(lake.path).replay()
            flip_bit(path, position, bit)


@pytest.mark.parametrize("key", [rollout_key(0), step_key(1), step_key(0, 1)])
def test_every_flipped_bit_of_a_data_file_is_refused(folder: Path, key: CaptureKey) -> None:
    with copied(folder) as lake:
        path = data_file(lake, key)
        for position, bit in _spread(path.stat().st_size, FLIPS, seed=key.rank):
            flip_bit(path, position, bit)
            assert _code(Lake.open(lake.path)) == 3, (position, bit)
            flip_bit(path, position, bit)
        assert _code(Lake.open(lake.path)) == 0


def test_a_flipped_bit_of_a_large_file_changes_no_value_unseen(tmp_path: Path) -> None:
    """Of a large file only what is read is verified: its end, and the values that come out."""
    lake = Lake.create(tmp_path / "lake")
    samples = drawn()
    for one in samples:
        length = 3000
        one.mask = [1] * length
        seeded = torch.Generator().manual_seed(int(one.sample_id[2:]))
        one.columns = {name: torch.rand(length, generator=seeded) for name in STEP_COLUMNS}
    write_step(lake, {0: samples}, stages=["sample"], expected={})
    path, refused = data_file(lake, step_key(0)), 0
    assert path.stat().st_size > 128 << 10
    intact = _entropy(lake)
    for position, bit in _spread(path.stat().st_size, FLIPS, seed=7):
        flip_bit(path, position, bit)
        assert _code(Lake.open(lake.path)) in (0, 3)
        try:
            assert _entropy(lake).equals(intact)
        except DatasetError:
            refused += 1
        flip_bit(path, position, bit)
    assert 0 < refused < FLIPS


def _entropy(lake: Lake) -> pa.Table:
    catalog = Catalog.open(Lake.open(lake.path)._store)
    return read_columns(catalog.store, catalog.entry(step_key(0)), STEPS, ["entropy"])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("part", ["entry", "data"])
def test_a_truncated_file_is_refused(folder: Path, part: str, share: float) -> None:
    with copied(folder) as lake:
        path = (entry_file if part == "entry" else data_file)(lake, step_key(0))
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        assert _code(Lake.open(lake.path)) == 3
        path.unlink()
        assert _code(Lake.open(lake.path)) == 3


def test_bytes_after_the_end_are_refused(folder: Path) -> None:
    for part in (entry_file, data_file):
        with copied(folder) as lake, part(lake, step_key(0)).open("ab") as file:
            file.write(b"\0")
            file.flush()
            assert _code(Lake.open(lake.path)) == 3


def test_the_files_of_two_captures_cannot_be_exchanged(folder: Path) -> None:
    with copied(folder) as lake:
        one, two = data_file(lake, step_key(0)), data_file(lake, step_key(1))
        aside = one.with_suffix(".aside")
        one.rename(aside)
        shutil.copy(two, one)
        shutil.copy(aside, two)
        assert _code(Lake.open(lake.path)) == 3


def test_the_entry_of_another_rank_or_step_is_refused(folder: Path) -> None:
    for source in (step_key(0), step_key(1, 1)):
        with copied(folder) as lake:
            shutil.copy(entry_file(lake, source), entry_file(lake, step_key(1)))
            assert _code(Lake.open(lake.path)) == 3


def test_a_file_that_no_entry_names_is_ignored(folder: Path) -> None:
    with copied(folder) as lake:
        path = data_file(lake, step_key(0))
        shutil.copy(path, path.with_name("stray.parquet"))
        assert _code(Lake.open(lake.path)) == 0


@pytest.mark.parametrize("part", ["entry", "data"])
def test_a_link_in_the_place_of_a_file_is_refused(folder: Path, part: str) -> None:
    with copied(folder) as lake:
        path = (entry_file if part == "entry" else data_file)(lake, step_key(0))
        outside = Path(lake.path).parent / "elsewhere"
        path.rename(outside)
        path.symlink_to(outside)
        assert _code(Lake.open(lake.path)) == 3
