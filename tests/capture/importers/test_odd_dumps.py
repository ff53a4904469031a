"""Dumps of torch with values of other kinds than a trainer writes: refused, or read as such."""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.slime_dumps import of_rank, rollout, saved, training
from trajreplay import CaptureError
from trajreplay.capture.importers import ImportOptions, import_files, importer_of

COUNT = 120
_ODD: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        3,
        2**31 - 1,
        2**31,
        2**63,
        -(2**70),
        0.5,
        -0.0,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        "x",
        "\x00",
        "é" * 200,
        [],
        {},
        [None],
        [[1]],
        {"a": 1},
        [1, "x"],
        [0.5, 2],
        [float("nan")],
    ),
    *(torch.zeros(0), torch.zeros(2, 2), torch.tensor(1.0), torch.ones(3, dtype=torch.bfloat16)),
    *(torch.tensor([float("nan"), 1.0]), torch.ones(1, dtype=torch.bool), torch.tensor([2**40])),
]


def _experience() -> Any:
    row = torch.ones(2, 4)
    names = ("action_mask", "action_log_probs", "base_action_log_probs", "advantages", "kl")
    return [
        {
            "sequences": torch.ones(2, 5, dtype=torch.int64),
            "attention_mask": torch.ones(2, 5, dtype=torch.int64),
            **dict.fromkeys(names, row),
            "rewards": torch.zeros(2),
            "truncated": torch.zeros(2),
            "prompts": ["a", "b"],
        }
    ]


def _relax() -> Any:
    sample = {"sample_index": 0, "tokens": [1, 2], "response_lengths": 1, "total_lengths": 2}
    sample |= {"loss_masks": [1], "rewards": 0.5, "raw_reward": 1.0, "log_probs": [-1.0]}
    return {"rollout_id": 0, "rank": 0, "samples": [sample, {**sample, "sample_index": 1}]}


def _by_rank() -> Any:
    return {"rollout_id": 0, "rank": 0, "rollout_data": of_rank(0, layout=False)}


MADE: dict[str, tuple[str, Callable[[], Any]]] = {
    "rollout": ("slime", rollout),
    "training": ("slime", training),
    "by rank": (
        "slime",
        lambda: {"rollout_id": 0, "rank": 0, "rollout_data": of_rank(0, layout=False)},
    ),
    "relax": ("relax-dump", _relax),
    "openrlhf": ("openrlhf", _experience),
}


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a tree."""
    if above:
        yield above
    inside = tree.items() if type(tree) is dict else enumerate(tree) if type(tree) is list else ()
    for name, value in inside:
        yield from places(value, (*above, name))


def replaced(tree: Any, place: tuple[Any, ...], value: Any, *, gone: bool) -> Any:
    """A tree in which one value is another, or is not there."""
    found = copy.deepcopy(tree)
    inner = found
    for name in place[:-1]:
        inner = inner[name]
    if gone:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return found


@pytest.mark.parametrize("form", MADE)
def test_a_value_of_another_kind_is_refused_or_read(form: str, tmp_path: Path) -> None:
    kind, make = MADE[form]
    whole, chance = make(), random.Random(3)
    ways, seen = list(places(whole)), set()
    options = ImportOptions(profile=kind.removesuffix("-dump"))
    for number in range(COUNT):
        gone = chance.random() < 0.3
        tree = replaced(whole, chance.choice(ways), chance.choice(_ODD), gone=gone)
        path = saved(tree, tmp_path / f"{number}" / "x.pt")
        try:
            (source,) = import_files(None, importer_of(kind), [path], options).sources
        except CaptureError:  # it is nothing of the kind any more
            continue
        seen.add(source.status)
        assert bool(source.problem) == (source.status == "refused")
    assert seen == {"checked", "refused"}


@pytest.mark.parametrize("value", [-(2**70), 2**63, 1e30, float("nan"), 0.5])
def test_a_mask_of_what_is_no_integer_is_refused(value: float, tmp_path: Path) -> None:
    dump = rollout()
    dump["samples"][3]["loss_mask"][0] = value
    path = saved(dump, tmp_path / "0.pt")
    (source,) = import_files(None, importer_of("slime"), [path]).sources
    assert "loss_mask is" in source.problem
    assert "whole numbers" in source.problem
