"""slime's dumps in every layout, made of the one that slime itself wrote."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SLIME = Path(__file__).parents[1] / "cases" / "dumps" / "slime"
_LAYOUT = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")


def rollout() -> dict[str, Any]:
    """The rollout dump."""
    return dict(torch.load(SLIME / "rollout_data" / "0.pt", weights_only=True))


def training() -> dict[str, Any]:
    """The train dump, in format 2."""
    return dict(torch.load(SLIME / "train_data" / "0.pt", weights_only=True))


def saved(content: Any, path: Path) -> Path:
    """Write a dump."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def dumped(folder: Path, *, train: Any = None, rolled: Any = None) -> Path:
    """A folder of `--dump-details` with the rollout and the train dump, changed or as they are."""
    saved(rollout() if rolled is None else rolled, folder / "rollout_data" / "0.pt")
    saved(training() if train is None else train, folder / "train_data" / "0.pt")
    return folder


def of_rank(shard: int, *, layout: bool = True) -> dict[str, Any]:
    """What a rank of the train dump held, as a list for each field: format 1."""
    dump = training()
    found = dump["dp_shards"][shard]
    rows = [dump["samples"][place] for place in found["partition"]]
    names = set(rows[0]) - {"data_parallel_rank", "rollout_position", "sample_index"}
    data: dict[str, Any] = {name: [row[name] for row in rows] for name in sorted(names)}
    data |= {"sample_indices": found["sample_indices"], "raw_reward": dump["raw_reward"]}
    return data | ({name: found[name] for name in _LAYOUT} if layout else {})


def by_rank(folder: Path, *, copies: int = 1, layout: bool = True) -> Path:
    """A folder of train dumps in format 1, each data-parallel rank with its tensor copies."""
    for shard in range(2):
        for copy_of in range(copies):
            rank = shard * copies + copy_of
            content = {
                "rollout_id": 0,
                "rank": rank,
                "rollout_data": of_rank(shard, layout=layout),
            }
            saved(content, folder / "train_data" / f"0_{rank}.pt")
    return folder


def relaxed(folder: Path, ranks: Sequence[int] = (0, 1)) -> Path:
    """A folder of Relax's train dumps: a file a rank, its samples as dictionaries of lists."""
    for rank in ranks:
        data = of_rank(rank, layout=False)
        raw = data.pop("raw_reward")
        data["raw_reward"] = [raw[index] for index in data.pop("sample_indices")]
        rows = [
            {"sample_index": row, **{name: _plain(values[row]) for name, values in data.items()}}
            for row in range(4)
        ]
        content = {"rollout_id": 0, "rank": rank, "samples": rows}
        saved(content, folder / "train_data" / f"0_{rank}.pt")
    return folder


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else copy.copy(value)
