"""Rollouts of NeMo-Gym: tokens, log-probs and routes of every call, or a refusal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.dumps import imported, rows
from trajreplay import Lake
from trajreplay.schema.bundles.r3 import encode_envelope

KIND = "nemo-gym"
ROUTES = np.arange(5 * 2 * 2, dtype=np.int16).reshape(5, 2, 2)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def call(**changes: Any) -> dict[str, Any]:
    """A message of the model as it was collected: 3 tokens of prompt, 2 of answer."""
    usual = {
        "type": "message",
        "content": [],
        "prompt_token_ids": [5, 6, 7],
        "generation_token_ids": [8, 9],
        "generation_log_probs": [-0.5, -0.25],
        "routed_experts": encode_envelope(ROUTES),
    }
    return {name: value for name, value in (usual | changes).items() if value is not None}


def line(*outputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    usual = {"responses_create_params": {"input": []}, "reward": 1.0}
    return {**usual, "response": {"output": list(outputs)}, **more}


def written(folder: Path, *lines: dict[str, Any], name: str = "rollouts_7.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_every_call_is_a_sample_with_its_routes(lake: Lake, tmp_path: Path) -> None:
    longer = call(
        prompt_token_ids=list(range(10)),
        routed_experts=np.full((11, 2, 2), 3).tolist(),  # of the last token there is none
    )
    first = line(call(), {"type": "function_call_output", "output": "4"}, longer, reward=0.5)
    tasks = {"_ng_task_index": 4, "_ng_rollout_index": 1}
    source = imported(lake, KIND, written(tmp_path / "runs", first, line(call(), **tasks)))
    assert (source.status, source.samples, source.tokens) == ("imported", 3, 6)
    assert source.captures == [("runs", 0, 7, None, 0)]
    found = rows(
        lake,
        "select sample_id, group_id, trajectory_id, fragment_index, raw_reward, response_length, "
        "total_length, rollout_log_probs, loss_mask from rollouts order by row",
    )
    logged = ([-0.5, -0.25], [1, 1])
    assert found == [
        ("line-0/0", None, "line-0", 0, 0.5, 2, 5, *logged),
        ("line-0/1", None, "line-0", 1, 0.5, 2, 12, *logged),
        ("task-4/1", "task-4", None, None, 1.0, 2, 5, *logged),
    ]
    routes = rows(lake, "select layers, top_k, rollout_experts from routes order by row")
    assert [one[:2] for one in routes] == [(2, 2)] * 3
    assert routes[0][2] == routes[2][2] == ROUTES.reshape(-1).tolist()
    assert routes[1][2] == [3] * 44
    held = "select source_dtype from checksums where \"column\" = 'rollout_experts'"
    assert rows(lake, held) == [("int16",)]


def test_it_is_idempotent_and_its_replay_proves_nothing(lake: Lake, tmp_path: Path) -> None:
    path = written(tmp_path / "runs", line(call()))
    assert imported(lake, KIND, path).status == "imported"
    assert imported(lake, KIND, path).status == "unchanged"
    lake.refresh()
    assert lake.replay().exit_code == 3


def test_calls_without_routes_are_counted(lake: Lake, tmp_path: Path) -> None:
    source = imported(
        lake, KIND, written(tmp_path / "runs", line(call(routed_experts=None)), line(call()))
    )
    assert source.status == "imported"
    assert any("1 of 2 calls have no routed_experts" in note for note in source.notes)
    assert rows(lake, "select rollout_experts is null from routes order by row") == [
        (True,),
        (False,),
    ]


BROKEN: dict[str, Callable[[], dict[str, Any]]] = {
    "routes of 3 tokens": lambda: line(call(routed_experts=encode_envelope(ROUTES[:3]))),
    "has 1 values": lambda: line(call(generation_log_probs=[-0.5])),
    "begins with 'nrlre2": lambda: line(call(routed_experts="nrlre2:int8:1x1x1:AA==")),
    "nested lists": lambda: line(call(routed_experts=42)),
    "integers": lambda: line(call(routed_experts=[[[0.5]]] * 5)),
    "no output has": lambda: line({"type": "message"}),
    "reward is missing": lambda: line(call(), reward=None),
    "output is": lambda: {**line(), "response": {"output": 3}},
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_is_broken_is_refused_and_leaves_nothing(
    lake: Lake, tmp_path: Path, message: str
) -> None:
    source = imported(lake, KIND, written(tmp_path / "runs", BROKEN[message]()))
    assert source.status == "refused"
    assert message in source.problem
    assert rows(lake, "select count(*) from manifest") == [(0,)]
