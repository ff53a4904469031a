"""Dumps of Relax: a file a rank, its samples counted on each rank from 0."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.slime_dumps import relaxed, rollout, saved, training
from trajreplay import Lake
from trajreplay.capture.importers import ImportOptions, recognise


def test_samples_of_ranks_are_those_of_their_rank(tmp_path: Path) -> None:
    with Lake.of_files(relaxed(tmp_path / "run")) as lake:
        rows = lake.sql("select * from steps order by rank, row").arrow().to_pylist()
        produced = lake.sql("select producer from manifest").arrow().to_pylist()
    assert [row["sample_id"] for row in rows] == [
        f"rank-{rank}/s-{row}" for rank in (0, 1) for row in range(4)
    ]
    source = training()["samples"]
    for row, place in zip(rows, (0, 2, 4, 6, 1, 3, 5, 7), strict=True):
        assert row["advantages"] == source[place]["advantages"].tolist()
        assert row["raw_reward"] == training()["raw_reward"][place]
        assert row["reward"] == source[place]["rewards"]
        assert row["loss_mask"] == source[place]["loss_masks"].tolist()
    assert {row["group_id"] for row in rows} == {None}
    assert {json.loads(row["producer"])["framework"] for row in produced} == {"relax"}


def test_groups_are_stated_by_position_on_each_rank(tmp_path: Path) -> None:
    folder = relaxed(tmp_path / "run")
    stages = {}
    for size in (None, 2):
        options = ImportOptions(profile="relax", group_by_position=size)
        with Lake.of_files(folder, options=options) as lake:
            (step,) = lake.replay().cohorts
            groups = lake.sql("select distinct group_id from steps order by 1").arrow().to_pylist()
        stages[size] = {one.stage: one.verdict for one in step.stages}
        names = [f"rank-{rank}/g-{group}" for rank in (0, 1) for group in (0, 1)]
        assert [row["group_id"] for row in groups] == ([None] if size is None else names)
    assert stages[None]["reward.post_process"] == "inspect-only"
    assert stages[None]["advantage.estimate"] == "pass"
    assert stages[2]["reward.post_process"] == "diverged"  # groups of the sample lie on both ranks


def test_what_reads_the_dumps_of_slime_reads_the_rollouts_of_relax(tmp_path: Path) -> None:
    rolled = rollout()
    for sample in rolled["samples"]:
        sample["decoded_tokens"] = ["x"] * len(sample["tokens"])
    folder = relaxed(tmp_path / "run")
    saved(rolled, folder / "rollout_data" / "0.pt")
    assert recognise([folder]).kind == "relax-dump"
    with Lake.of_files(folder) as lake:
        assert lake.imported is not None
        assert [one.status for one in lake.imported.sources] == ["imported"] * 2
        counts = lake.sql("select count(*) n from manifest").arrow().to_pylist()
    assert counts == [{"n": 3}]


def test_ranks_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    folder = relaxed(tmp_path / "run")
    for path in sorted((folder / "train_data").iterdir()):
        dump = torch.load(path, weights_only=True)
        for row in dump["samples"]:
            del row["tokens"], row["rollout_log_probs"]
        saved(dump, path)
    with Lake.of_files(folder) as lake:
        assert lake.imported is not None
        (one,) = lake.imported.refused
    assert "tokens and rollout_log_probs are missing, expected one of them" in one.problem


@pytest.mark.parametrize("rank", [0, 1])
def test_a_path_to_one_rank_stands_for_all(rank: int, tmp_path: Path) -> None:
    folder = relaxed(tmp_path / "run")
    with Lake.of_files(folder / "train_data" / f"0_{rank}.pt") as lake:
        assert lake.sql("select count(*) n from steps").arrow().to_pylist() == [{"n": 8}]
