"""Components of rewards: handed over by name, stored in the order of the names."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from trajreplay import CaptureError, Lake, RewardSettings, SampleRecord, Settings

WEIGHED = Settings(reward=RewardSettings(weights={"b": 1.0, "a": 0.5}))


def _capture(folder: Path, components: list[Any], settings: Settings = WEIGHED) -> Lake:
    lake = Lake.create(folder / "lake")
    with lake.capture(
        run_id="r", rollout_id=0, rank=0, expected_ranks=[0], settings=settings
    ) as capture:
        capture.samples(
            [
                SampleRecord(f"s-{row}", 1, 2, [1], reward_components=one)
                for row, one in enumerate(components)
            ]
        )
    return lake


def _stored(lake: Lake) -> list[Any]:
    query = lake.sql("select reward_components from rollouts order by row")
    return list(query.arrow()["reward_components"].to_pylist())


def test_components_are_stored_in_the_order_of_their_names(tmp_path: Path) -> None:
    lake = _capture(tmp_path, [{"b": 2, "a": torch.tensor(1.0)}, None, {"b": None}, {}])
    stored = _stored(lake)
    assert stored[:2] == [[1.0, 2.0], None]
    assert all(math.isnan(one) for row in stored[2:] for one in row)
    assert lake.validate().ok


@pytest.mark.parametrize(
    ("components", "problem"),
    [
        ({"c": 1.0}, "have 'c', expected one of a, b"),
        ({"a": "1"}, "have a = a str, expected a number"),
        ([1.0, 2.0], "expected an object of numbers by name"),
    ],
)
def test_what_is_no_component_is_refused_by_name(
    tmp_path: Path, components: Any, problem: str
) -> None:
    with pytest.raises(CaptureError, match=f"row 0: reward_components of sample 's-0' .*{problem}"):
        _capture(tmp_path, [components])


def test_components_that_no_setting_weighs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="have 'a', expected one of none"):
        _capture(tmp_path, [{"a": 1.0}], Settings())


def test_components_are_no_tensor(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    with (
        pytest.raises(CaptureError, match="unknown tensor 'reward_components'"),
        lake.capture(
            run_id="r", rollout_id=0, rank=0, expected_ranks=[0], settings=WEIGHED
        ) as capture,
    ):
        capture.tensor("reward_components", [[1.0]])
