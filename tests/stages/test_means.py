"""G14: one number of the losses of tokens, in every way, as a replay takes it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cohorts import Expected, capture
from tests.helpers.scenes import WAY, the_cohort, the_stage
from tests.helpers.trainer import Sample
from trajreplay import Lake, Settings, with_changes

LOSSES = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 7.0, 8.0], [5.0, 6.0, 0.0, 0.0]]
MASKS = [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
POLICY = "loss.policy"
MEAN = {"loss.batch_reduction": "mean", "loss.surrogate": "reinforce"}
TOKENS = {"loss.aggregation": "token-mean"}
TRAINED = {"loss.denominator_rows": "with-tokens"}
SUMS = {"loss.aggregation": "seq-mean-token-sum"}
NORM = {"loss.aggregation": "constant-norm", "loss.constant_norm": 4.0}
BATCHES = {"loss.mean_over": "micro-batch"}
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "tokens": (TOKENS, 40.0 / 6.0),
    "tokens, an empty sample is one": ({**TOKENS, "loss.token_count": "at-least-one"}, 40.0 / 7.0),
    "samples with tokens (verl, OpenRLHF)": (TRAINED, 8.75),
    "all samples (slime, TRL, NeMo-RL)": ({}, 17.5 / 3.0),
    "sums of tokens over samples with tokens": ({**SUMS, **TRAINED}, 20.0),
    "sums of tokens over all samples": (SUMS, 40.0 / 3.0),
    "sums over a constant": (NORM, 10.0),
    "sums over a constant and samples (TRL's dr_grpo)": (
        {**NORM, "loss.constant_norm_by_rows": True},
        10.0 / 3.0,
    ),
    # Two micro-batches: the first sample, and the other two.
    "tokens by micro-batch": ({**TOKENS, **BATCHES}, (2.5 + 15.0) / 2.0),
    "tokens by micro-batch and their tokens": (
        {**TOKENS, **BATCHES, "loss.micro_batch_weight": "tokens"},
        40.0 / 6.0,
    ),
    "tokens by micro-batch and their rows": (
        {**TOKENS, **BATCHES, "loss.micro_batch_weight": "rows"},
        (2.5 + 2.0 * 15.0) / 3.0,
    ),
    "samples by micro-batch": (BATCHES, (2.5 + 15.0 / 2.0) / 2.0),
}


def _recorded(lake: Lake, settings: Settings, value: float) -> None:
    samples = []
    for row, (losses, mask) in enumerate(zip(LOSSES, MASKS, strict=True)):
        one = Sample(f"s-{row}", "g-0", mask, 0.0)
        one.micro_batch_id = f"mb-{min(row, 1)}"
        one.columns["log_probs"] = torch.full((4,), -1.0)
        one.columns["advantages"] = torch.tensor(losses)  # -A log pi is the loss
        samples.append(one)
    capture(
        lake,
        {0: samples},
        WAY,
        step_id=0,
        stages=("sample", POLICY),
        columns=("log_probs", "advantages"),
        settings=settings,
        expected={
            0: [
                Expected(
                    dict.fromkeys(("loss", "pg_loss"), value),
                    {"scope": "global", "reduction": "mean"},
                )
            ]
        },
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_mean_is_what_the_frameworks_have(lake: Lake, way: str) -> None:
    changes, value = WAYS[way]
    _recorded(lake, with_changes(Settings(), {**MEAN, **changes}), value)
    found = the_stage(the_cohort(lake.replay()), POLICY)
    assert (found.verdict, found.compared) == ("pass", 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_mean_that_is_another_diverges(tmp_path: Path, way: str) -> None:
    changes, value = WAYS[way]
    settings = with_changes(Settings(), {**MEAN, **changes})
    others = [other for _, other in WAYS.values() if abs(other - value) > 1e-3]
    nearest = min(others, key=lambda other: abs(other - value))
    lake = Lake.create(tmp_path / "lake")
    _recorded(lake, settings, nearest)
    assert the_stage(the_cohort(lake.replay()), POLICY).verdict == "diverged"
