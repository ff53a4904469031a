"""Both sides of the benchmark hold the same, and both find it right."""

import pytest
import torch

from benchmarks import baseline
from benchmarks.lakes import Twins, capture_step
from benchmarks.workload import make_step
from trajreplay import Lake
from trajreplay.schema import TABLES

STEPS = [make_step(seed, 16, 32) for seed in range(3)]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    root = tmp_path_factory.mktemp("twins")
    lake = Lake.create(root / "lake")
    for rollout_id, step in enumerate(STEPS):
        capture_step(lake, rollout_id, step)
        baseline.write_step(root / "tree", rollout_id, step)
    return Twins(root / "lake", root / "tree")


def test_the_lake_validates_and_every_stage_passes(twins: Twins) -> None:
    lake = Lake.open(twins.lake)
    assert lake.validate().ok
    report = lake.replay(require_stages=True)
    assert report.verdict == "pass"
    assert len(report.cohorts) == len(STEPS)


def test_the_baseline_agrees(twins: Twins) -> None:
    assert baseline.replay(twins.tree) == []


@pytest.mark.parametrize("column", sorted(STEPS[0].token_columns()))
def test_both_hold_the_same_tensors(twins: Twins, column: str) -> None:
    assert column in TABLES["steps"]
    query = f"SELECT {column} FROM steps WHERE rollout_id = 1 ORDER BY row"
    ours = Lake.open(twins.lake).sql(query).arrow()[column].to_pylist()
    (bundle,) = baseline.find(twins.tree, 1)
    theirs = torch.cat(bundle["tensors"][column])
    assert torch.equal(torch.tensor(ours).reshape(-1), theirs)
