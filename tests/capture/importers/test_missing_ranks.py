"""Train dumps with a file a rank: missing ranks are refused, or keep a step from passing."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.slime_dumps import by_rank, of_rank, relaxed, rollout, saved
from trajreplay import Lake
from trajreplay.capture.importers import ImportOptions
from trajreplay.stages.report import CohortReport


def of_step(path: Path, options: ImportOptions) -> tuple[CohortReport, str]:
    """The only step at a path as replayed, and what is said of whether it is all there."""
    with Lake.of_files(path, options=options) as lake:
        (step,) = (one for one in lake.replay().cohorts if one.step_id is not None)
    return step, "; ".join(one.message for one in step.findings if one.check == "completeness")


def refusal(path: Path) -> tuple[str, str]:
    with Lake.of_files(path) as lake:
        assert lake.imported is not None
        (one,) = lake.imported.refused
    return one.problem, one.hint


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("make", [by_rank, relaxed])
def test_a_rank_that_is_missing_before_another_is_refused(
    make: Any, missing: int, tmp_path: Path
) -> None:
    folder = make(tmp_path / "run", copies=2) if make is by_rank else make(tmp_path / "run")
    train = folder / "train_data"
    if make is relaxed:  # two more, of an earlier stage of a pipeline, which hold no log-probs
        for rank in (2, 3):
            dump = torch.load(train / "0_0.pt", weights_only=True) | {"rank": rank}
            for row in dump["samples"]:
                row.pop("log_probs")
            saved(dump, train / f"0_{rank}.pt")
    (train / f"0_{missing}.pt").unlink()
    for path in (folder, train / "0_3.pt"):
        problem, hint = refusal(path)
        assert f"and none of rank {missing}" in problem
        assert hint


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("make", [partial(by_rank, layout=False), relaxed])
def test_a_last_rank_that_is_missing_is_no_pass(make: Any, beside: bool, tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    kind = "slime" if isinstance(make, partial) else "relax"
    options = ImportOptions(profile=kind)
    rolled = rollout()
    if kind == "relax":
        for sample in rolled["samples"]:
            sample["decoded_tokens"] = ["x"] * len(sample["tokens"])
    if beside:
        saved(rolled, folder / "rollout_data" / "0.pt")
    whole, _ = of_step(folder, options)
    (folder / "train_data" / "0_1.pt").unlink()
    part, said = of_step(folder, options)
    # slime's own files give the rewards of the whole rollout, Relax's say nothing of it.
    assert whole.unproven is (kind == "relax" and not beside)
    assert any(one.verdict == "pass" for one in whole.stages)
    assert (part.unproven, part.verdict) == (True, "unverified")
    assert ("do not record how many ranks" in said) is (kind == "relax" and not beside)
    assert ("the ranks took 4 samples of 8" in said) is (kind == "slime" or beside)


def test_samples_that_no_rank_took_are_no_pass_where_no_schedule_leaves_them_out(
    tmp_path: Path,
) -> None:
    rolled = rollout()
    more = copy.deepcopy(rolled["samples"])
    for number, sample in enumerate(more):
        sample.update(index=8 + number, rollout_id=8 + number, group_index=2 + number // 4)
    rolled["samples"] += more
    for layout in (True, False):
        folder = by_rank(tmp_path / str(layout), layout=layout)
        saved(rolled, folder / "rollout_data" / "0.pt")
        step, said = of_step(folder, ImportOptions(profile="slime"))
        assert step.unproven is not layout
        assert ("the ranks took 8 samples of 16" in said) is not layout


def test_a_schedule_of_executions_does_not_show_that_all_ranks_are_there(tmp_path: Path) -> None:
    folder = by_rank(tmp_path / "run")
    for rank in (0, 1):
        data = of_rank(rank) | {"rollout_ids": [0, 1, 2, 3], "global_batch_sizes": [4]}
        saved(
            {"rollout_id": 0, "rank": rank, "rollout_data": data},
            folder / "train_data" / f"0_{rank}.pt",
        )
    assert not of_step(folder, ImportOptions(profile="slime"))[0].unproven
    (folder / "train_data" / "0_1.pt").unlink()
    assert of_step(folder, ImportOptions(profile="slime"))[0].verdict == "unverified"
