"""The files of train dumps: one for all ranks since format 2, before that one of each rank.

Source: slime/utils/train_dump_utils.py, 0.2 and 0.3; relax/utils/training/train_dump_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trajreplay.capture.importers.places import is_plain_file
from trajreplay.capture.importers.registry import ImportOptions
from trajreplay.capture.importers.slime.consumed import TrainDump
from trajreplay.capture.importers.slime.shards import Shard, layout_of, without_copies
from trajreplay.capture.importers.torch_dumps import integers, load_fields, scalar
from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.torchhead import Head, head_of
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ParallelCoordinates

_FORMAT = 2
ROLLOUT, TRAIN, BY_RANK, BY_SAMPLE = "rollout", "train", "train by rank", "train by sample"


def content_of(head: Head | None) -> str:
    """Which of the dumps a file is; empty for none."""
    if head is None or not head.archive or "rollout_id" not in head.values:
        return ""
    if head.nested == "samples":
        if "format_version" in head.values:
            return TRAIN
        if "rank" in head.values:
            return BY_SAMPLE if "loss_masks" in head.names else ""
        return ROLLOUT if "response_length" in head.names else ""
    return BY_RANK if head.nested == "rollout_data" and "rank" in head.values else ""


def read_whole(path: Path, options: ImportOptions) -> TrainDump:
    """Read a train dump that holds all ranks.

    Raises:
        DatasetError: It is broken, or a rank is missing.
    """
    dump = load_fields(path, options)
    version = dump.get("format_version", read.count)
    if version != _FORMAT:
        raise dump.error("format_version", f"is {version}", f"{_FORMAT}")
    rows = dump.objects("samples")
    by_position = {one.get("rollout_position", read.count): one for one in rows}
    raw: list[float] | None = dump.get("raw_reward", _numbers, None)
    places = dump.objects("dp_shards")
    taken = [row for one in places for row in one.get("partition", _indices)]
    if len(by_position) < len(rows) or sorted(taken) != sorted(by_position):
        raise dump.error(
            "dp_shards", f"take {len(taken)} samples of {len(rows)}", "each of them once"
        )
    ranks = [one.get("data_parallel_rank", read.count) for one in places]
    if sorted(ranks) != list(range(len(places))):
        raise dump.error("dp_shards", f"are of ranks {ranks}", "every data-parallel rank once")
    processes = [one.get("rank", read.count) for one in places]
    if len(set(processes)) < len(processes):
        raise dump.error("dp_shards", f"are of the processes {processes}", "each process once")
    shards = []
    for one, data_rank, process in zip(places, ranks, processes, strict=True):
        positions = one.get("partition", _indices)
        mine = [by_position[place] for place in positions]
        steps, sizes = layout_of(one, len(mine))
        shard = Shard(
            rank=process,
            where=one.where,
            rows=mine,
            positions=positions,
            indices=[row.get("sample_index", read.coordinate) for row in mine],
            raw_rewards=_chosen(raw, positions),
            steps=steps,
            sizes=sizes,
            parallel=ParallelCoordinates(data_rank=data_rank, data_size=len(places)),
        )
        _check_shard(one, shard)
        shards.append(shard)
    return TrainDump(path, dump.get("rollout_id", read.coordinate), shards, "slime")


def _check_shard(one: Fields, shard: Shard) -> None:
    """Hold a shard against the samples that it takes."""
    told = one.get("sample_indices", _indices, shard.indices)
    of = {row.get("data_parallel_rank", read.count, None) for row in shard.rows}
    if told != shard.indices or not of <= {None, shard.parallel.data_rank}:
        raise one.error("sample_indices", "are of other samples", "those that partition names")


def rank_files(path: Path) -> list[Path]:
    """The files of all ranks of the rollout that a file is of, the first rank first.

    Raises:
        DatasetError: Two are of one rank.
    """
    mine = _place(path)
    if mine is None:
        raise DatasetError(f"{path} changed while it was read", path=str(path))
    ranks: dict[int, Path] = {}
    for one in _by_place(path.parent).get(mine, [path]):
        if _place(one) != mine:
            raise DatasetError(f"{one} changed while it was read", path=str(one))
        if (rank := _rank(one)) in ranks:
            raise DatasetError(
                f"{one} and {ranks[rank].name} are both of rank {rank} of rollout {mine[2]}, "
                "expected one file of each rank",
                hint="Move the one away that is not of this training.",
                path=str(one),
            )
        ranks[rank] = one
    return [ranks[rank] for rank in sorted(ranks)]


@cache
def _by_place(folder: Path) -> Mapping[tuple[Path, str, int], Sequence[Path]]:
    """The files by rank of a folder, whatever their names, with one look at each."""
    found: dict[tuple[Path, str, int], list[Path]] = {}
    for one in sorted(folder.iterdir()):
        place = _place(one) if is_plain_file(one) else None
        if place is not None:
            found.setdefault(place, []).append(one)
    return found


def rank_sets(paths: Sequence[Path]) -> Iterator[Path]:
    """Of files by rank, the first of each rollout, which stands for all."""
    _by_place.cache_clear()  # every search sees folders as they are
    if len(paths) == 1:  # perhaps one of several, of which it alone was named
        yield _first(paths[0])
        return
    first: dict[tuple[Path, str, int] | None, Path] = {}
    for one in paths:
        place = _place(one)
        if place not in first or _rank(one) < _rank(first[place]):
            first[place] = one
    yield from first.values()


def _first(path: Path) -> Path:
    try:
        return rank_files(path)[0]
    except DatasetError:
        return path  # reading it says what is wrong


def _place(path: Path) -> tuple[Path, str, int] | None:
    """Which rollout of which folder a file by rank is of."""
    head = head_of(path)
    content = content_of(head)
    if head is None or content not in (BY_RANK, BY_SAMPLE):
        return None
    return path.parent, content, _whole(head.values["rollout_id"])


def _rank(path: Path) -> int:
    head = head_of(path)
    return -1 if head is None else _whole(head.values.get("rank"))


def _whole(value: object) -> int:
    return value if type(value) is int else -1  # what it should be shows when it is read


def read_by_rank(path: Path, options: ImportOptions) -> TrainDump:
    """Read a train dump that is a file for each rank.

    Raises:
        DatasetError: A file is broken.
    """
    by_sample = content_of(head_of(path)) == BY_SAMPLE
    shards, rollout_id = [], 0
    for one in rank_files(path):
        dump = load_fields(one, options)
        rollout_id = dump.get("rollout_id", read.coordinate)
        rank = dump.get("rank", read.count)
        where = str(one)
        shards.append(
            _of_samples(dump, rank, where) if by_sample else _of_fields(dump, rank, where)
        )
    return TrainDump(
        path,
        rollout_id,
        without_copies(shards),
        framework="relax" if by_sample else "slime",
        own_ids=any(one.positions is None and one.indices is None for one in shards),
    )


def _of_samples(dump: Fields, rank: int, where: str) -> Shard:
    """The rows of a rank as Relax writes them: counted on each rank from 0."""
    rows = dump.objects("samples")
    known = [one.get("raw_reward", scalar) for one in rows if "raw_reward" in one]
    return Shard(rank, where, rows, raw_rewards=known if len(known) == len(rows) else None)


def _of_fields(dump: Fields, rank: int, where: str) -> Shard:
    """The rows of a rank as slime wrote them before format 2: a list for each field."""
    data = dump.object("rollout_data")
    count = len(data.get("tokens", _list))
    columns = {
        name: value
        for name, value in data.tree.items()
        if type(value) is list and len(value) == count and name != "raw_reward"
    }
    rows = [
        Fields({name: value[row] for name, value in columns.items()}, f"{where}: row {row}")
        for row in range(count)
    ]
    positions: list[int] | None = data.get("partition", _indices, None)
    indices: list[int] | None = data.get("sample_indices", _indices, None)
    for name, found in (("partition", positions), ("sample_indices", indices)):
        if found is not None and len(found) != count:
            raise data.error(name, f"has {len(found)} values", f"{count}, one for each sample")
    raw: list[float] | None = data.get("raw_reward", _numbers, None)
    if raw is not None and positions is None and len(raw) != count:
        raw = None  # those of the whole rollout, and which are this rank's is not recorded
    steps, sizes = layout_of(data, count)
    return Shard(
        rank,
        where,
        rows,
        positions,
        indices,
        raw if positions is None else _chosen(raw, positions),
        steps,
        sizes,
    )


def _chosen(values: list[float] | None, positions: list[int]) -> list[float] | None:
    if values is None or max(positions, default=-1) >= len(values):
        return None
    return [values[place] for place in positions]


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("a list with a value for each sample")
    return value


def _numbers(value: Any) -> list[float]:
    return [scalar(one) for one in _list(value)]


def _indices(value: Any) -> list[int]:
    found: list[int] = integers(value).tolist()
    if min(found, default=0) < 0:
        raise ValueError("integers from 0 on")
    return found
