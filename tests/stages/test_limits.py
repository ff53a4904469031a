"""The printed matrix says where a setting is less than recomputed, and nowhere else."""

from typing import Any

import pytest

from trajreplay import ParallelCoordinates, Settings, with_changes
from trajreplay.cli.verbs.capability import matrix_rows
from trajreplay.schema.tables import STEPS
from trajreplay.stages.capability import ability, limits

HELD = {*STEPS.names} - {"context_rank", "context_size"}
MEAN = {"loss.batch_reduction": "mean"}
TERMS = {**MEAN, "loss.kl_loss_coef": 0.1}
# A setting whose value is not recomputed somewhere, beside what, and what the matrix prints of it.
LIMITED: list[tuple[str, str, Any, dict[str, Any], str]] = [
    ("loss.policy", "loss.surrogate", "m2po", {}, "inspect-only"),
    ("loss.policy", "loss.surrogate", "kl-cov", {}, "inspect-only"),
    ("loss.policy", "loss.surrogate", "clip-cov", {}, "inspect-only"),
    (
        "loss.policy",
        "loss.kl_loss_source",
        "unfiltered",
        {"loss.kl_loss_coef": 0.1},
        "inspect-only",
    ),
    ("loss.policy", "loss.mean_over", "micro-batch", MEAN, "inspect-only"),
    ("loss.value", "value.counts", "unshifted", {}, "inspect-only"),
    ("loss.policy", "loss.kl_loss_mean_over", "micro-batch", TERMS, "inspect-only"),
    ("loss.policy", "loss.m2_threshold", 0.5, {}, "inspect-only"),
    ("loss.policy", "loss.nll_coef", 0.5, {}, "inspect-only"),
    ("loss.value", "value.mean_over", "micro-batch", MEAN, "inspect-only"),
]


@pytest.mark.parametrize(("stage", "label", "value", "beside", "capability"), LIMITED)
def test_what_a_capture_answers_is_printed(
    stage: str, label: str, value: Any, beside: dict[str, Any], capability: str
) -> None:
    settings = with_changes(Settings(), {**beside, label: value})
    found = ability(stage, settings, ParallelCoordinates(), HELD - {"micro_batch_id"})
    assert found.capability == capability
    (row,) = (one for one in matrix_rows() if (one["stage"], one["setting"]) == (stage, label))
    assert f"{capability}: {found.reason}" in row["otherwise"].split("; ")


@pytest.mark.parametrize(
    ("stage", "label", "names"),
    [
        (
            "reward.post_process",
            "reward.grouping",
            ["'stride', and rows say", "'batch', and a step"],
        ),
        ("reward.post_process", "reward.combination", ["'normalise-then-sum', and a step"]),
        (
            "advantage.estimate",
            "advantage.whiten",
            ["'rank', and rows say", "'cohort', and a step"],
        ),
        (
            "loss.policy",
            "loss.correction_norm_over",
            ["'cohort', and a step", "'micro-batch', and"],
        ),
        ("loss.policy", "loss.fragments", ["'shared', and a step holds a part of a rollout"]),
        ("sample", "layout.context", ["layout.context is not stated"]),
    ],
)
def test_ranks_rows_and_steps_are_limits(stage: str, label: str, names: list[str]) -> None:
    found = "; ".join(limits(stage, label))
    assert all(one in found for one in names), found


@pytest.mark.parametrize(
    ("stage", "label"),
    [
        ("reward.post_process", "reward.epsilon"),
        ("advantage.kl", "kl.estimator"),
        ("advantage.estimate", "advantage.masking"),
        ("loss.policy", "loss.aggregation"),
        ("loss.policy", "loss.eps_clip"),
        ("loss.value", "value.counted"),
    ],
)
def test_what_is_recomputed_everywhere_has_no_limit(stage: str, label: str) -> None:
    assert limits(stage, label) == ()


def test_every_setting_of_a_layout_is_printed() -> None:
    rows = {one["setting"]: one for one in matrix_rows()}
    assert rows["layout.context"]["recomputed"].startswith("unstated, whole, zigzag")
    assert rows["layout.batch"]["recomputed"] == "unstated, step, rollout"
