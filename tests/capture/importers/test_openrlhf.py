"""Experiences of OpenRLHF: read where they are dictionaries, cut out of their padding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.slime_dumps import saved
from trajreplay import Lake
from trajreplay.capture.importers import ImportOptions, recognise

_ALL = "select * from rollouts order by row"


def experience(**changes: Any) -> dict[str, Any]:
    """Two samples: prompts of 2 and 1 tokens, responses of 3 and 2, the second with a gap."""
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 1, 0]], dtype=torch.bool)
    old = torch.arange(8, dtype=torch.float32).reshape(2, 4) / -8
    found = {
        "sequences": torch.tensor([[5, 6, 7, 8, 9], [5, 1, 2, 3, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
        "action_mask": mask,
        "action_log_probs": old,
        "base_action_log_probs": old - 0.5,
        "rollout_log_probs": None,
        "values": None,
        "returns": torch.ones(2, 4),
        "advantages": torch.ones(2, 4) * 2,
        "kl": torch.full((2, 4), 0.5),
        "rewards": torch.tensor([1.0, 0.0]),
        "truncated": torch.tensor([False, True]),
        "index": None,
        "prompts": ["a", "a"],
        "labels": ["7", "7"],
        "info": {"reward": torch.zeros(2)},
    }
    return found | changes


def rows(path: Path, options: ImportOptions | None = None) -> list[dict[str, Any]]:
    with Lake.of_files(path, options=options) as lake:
        assert lake.imported is not None
        assert not lake.imported.refused
        found: list[dict[str, Any]] = lake.sql(_ALL).arrow().to_pylist()
    return found


def test_a_response_begins_at_the_first_action_and_ends_with_the_sequence(tmp_path: Path) -> None:
    path = saved([experience(), experience(prompts=["b", "b"])], tmp_path / "run" / "exp_12.pt")
    assert recognise([path]).kind == "openrlhf"
    first, second, *others = rows(path)
    assert (first["run_id"], first["rollout_id"]) == ("run", 12)
    assert (first["total_length"], first["response_length"]) == (5, 3)
    assert (second["total_length"], second["response_length"]) == (4, 3)
    assert first["loss_mask"] == [1, 1, 1]
    assert second["loss_mask"] == [1, 0, 1]
    assert first["tokens"] == [5, 6, 7, 8, 9]
    assert second["tokens"] == [5, 1, 2, 3]
    assert first["old_log_probs"] == [-1 / 8, -2 / 8, -3 / 8]
    assert second["old_log_probs"] == [-4 / 8, -5 / 8, -6 / 8]
    assert second["ref_log_probs"] == [-8 / 8, -9 / 8, -10 / 8]
    assert first["rollout_log_probs"] is None
    assert [row["raw_reward"] for row in (first, second)] == [1.0, 0.0]
    assert [row["truncated"] for row in (first, second)] == [False, True]
    assert [row["group_id"] for row in (first, second, *others)] == ["g-0"] * 2 + ["g-1"] * 2
    assert [row["sample_id"] for row in others] == ["s-2", "s-3"]


def test_only_the_kl_can_be_recomputed_and_only_under_stated_settings(tmp_path: Path) -> None:
    path = saved(experience(), tmp_path / "exp.pt")
    found = {}
    for name in (None, "openrlhf"):
        with Lake.of_files(path, options=ImportOptions(profile=name)) as lake:
            (cohort,) = lake.replay().cohorts
        found[name] = {one.stage: one.verdict for one in cohort.stages}
        found[name]["cohort"] = cohort.verdict
    assert (found[None]["cohort"], found[None]["advantage.kl"]) == ("unverified", "inspect-only")
    assert (found["openrlhf"]["cohort"], found["openrlhf"]["advantage.kl"]) == ("pass", "pass")
    assert found["openrlhf"]["advantage.estimate"] == "inspect-only"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"action_mask": torch.ones(2, 3)}, "expected (2, 4), all tokens but the first"),
        ({"advantages": torch.ones(1, 4)}, "advantages is of shape (1, 4)"),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask is of shape (2, 4)"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]] * 2)}, "padding on the right only"),
        ({"rewards": torch.ones(1)}, "expected one for each sample"),
        ({"sequences": [1, 2]}, "expected a tensor of one or two dimensions"),
        ({"action_mask": torch.full((2, 4), 257)}, "expected a tensor of 0 and 1"),
        ({"attention_mask": torch.full((2, 5), 2)}, "expected a tensor of 0 and 1"),
        ({"truncated": torch.tensor([0, 2])}, "expected a tensor of 0 and 1"),
        ({"prompts": ["a"]}, "prompts are 1, expected 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = saved(experience(**changes), tmp_path / "exp_1.pt")
    with Lake.of_files(path) as lake:
        assert lake.imported is not None
        (one,) = lake.imported.refused
    assert problem in one.problem


def test_a_damaged_file_among_experiences_is_refused_wherever_it_is_damaged(tmp_path: Path) -> None:
    whole = saved(experience(), tmp_path / "exp_1.pt").read_bytes()
    saved({"weights": torch.zeros(3)}, tmp_path / "model_1.pt")  # of another family
    names = ("sequences", "action_mask")
    contents = [
        *(b"", whole[:10], b"\0" * 40, whole[: len(whole) // 2], b"x" + whole[1:]),
        *(whole.replace(name.encode(), name.upper().encode()) for name in names),
    ]
    for number, content in enumerate(contents, 2):
        (tmp_path / f"exp_{number}.pt").write_bytes(content)
    with Lake.of_files(tmp_path) as lake:
        assert lake.imported is not None
        assert [Path(one.path).name for one in lake.imported.refused] == [
            f"exp_{number}.pt" for number in range(2, 2 + len(contents))
        ]
        assert lake.imported.exit_code == 3
        assert [one.samples for one in lake.imported.sources if one.samples] == [2]
