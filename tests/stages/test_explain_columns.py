"""Whatever column a stage reads may be the wrong one: exchanged, shifted or scaled, it is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.helpers.faulty import block_of, explained, with_columns, with_fault
from tests.helpers.healthy_composed import Draw
from tests.stages.test_composed import STAGES
from trajreplay import Settings
from trajreplay.schema.settings import with_changes
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults import FAULTS, Told
from trajreplay.stages.kernels import whiten

STATED = {
    "reward.n_samples_per_prompt": 4,
    "loss.entropy_coef": 0.01,
    "loss.eps_clip_high": 0.28,
    "kl.coef": 0.1,
}
KL = {"loss.kl_loss_coef": 0.05, "loss.kl_loss_estimator": "k3", "kl.coef": 0.0}
TIS = {"loss.correction": "tis", "loss.correction_bounds": (0.0, 2.0)}
Columns = Callable[[Block], dict[str, torch.Tensor]]


def _put(name: str, make: Callable[[Block], torch.Tensor]) -> Columns:
    return lambda block: {name: make(block)}


def _scaled(name: str, by: float) -> Columns:
    return _put(name, lambda block: block.packed.tokens(name) / by)


def _late(name: str) -> Columns:
    def make(block: Block) -> torch.Tensor:
        values = block.packed.tokens(name)
        moved = values.roll(1)
        first = block.packed.offsets[:-1]
        moved[first] = values[first]
        return moved

    return _put(name, make)


def _other(name: str, other: str) -> Columns:
    return _put(name, lambda block: block.packed.tokens(other))


CASES: dict[str, tuple[str, Mapping[str, Any], Columns, str]] = {
    "reference by the sampler": (
        "loss.policy",
        KL,
        _other("ref_log_probs", "rollout_log_probs"),
        "loss.columns",
    ),
    "reference warmer": ("loss.policy", KL, _scaled("ref_log_probs", 0.8), "loss.temperature"),
    "reference late": ("loss.policy", KL, _late("ref_log_probs"), "loss.shifted"),
    "sampler warmer": ("loss.policy", TIS, _scaled("rollout_log_probs", 0.8), "loss.temperature"),
    "sampler late": ("loss.policy", TIS, _late("rollout_log_probs"), "loss.shifted"),
    "KL of a warmer policy": (
        "advantage.kl",
        {"kl.estimator": "k3"},
        _scaled("old_log_probs", 0.85),
        "kl.temperature",
    ),
    "KL of a warmer reference": (
        "advantage.kl",
        {"kl.estimator": "k1"},
        _scaled("ref_log_probs", 1.07),
        "kl.temperature",
    ),
}


def _block(folder: Any, changes: Mapping[str, Any], seed: int = 1) -> Block:
    settings = with_changes(Settings(), {**STATED, **changes})
    return block_of(folder / "lake", Draw(seed, {}, STAGES), settings, None, (3, 3))


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_wrong_column_of_those_that_a_stage_reads_is_named(tmp_path: Any, case: str) -> None:
    stage, changes, columns, fault = CASES[case]
    block = _block(tmp_path, changes)
    made = with_fault(block, stage, Told(Variant(columns=columns(block))))
    assert made is not None
    found = explained(made, stage, FAULTS)
    assert (fault,) in [one.faults for one in found.hypotheses], found.text


@pytest.mark.parametrize(
    ("stage", "changes", "put", "fault"),
    [
        ("loss.policy", TIS, {"loss.correction_bounds": (0.0, 0.99)}, "loss.correction"),
        (
            "advantage.kl",
            {"kl.estimator": "low_var_kl", "kl.value_clamp": (-10.0, 10.0)},
            {"kl.value_clamp": (-0.05, 0.05)},
            "kl.clamp",
        ),
        (
            "advantage.estimate",
            {"advantage.clip": (-3.0, 3.0)},
            {"advantage.clip": (-0.47, 0.47)},
            "advantage.clip-bounds",
        ),
    ],
)
def test_bounds_that_are_on_no_list_are_solved_for(
    tmp_path: Any, stage: str, changes: Mapping[str, Any], put: Mapping[str, Any], fault: str
) -> None:
    made = with_fault(_block(tmp_path, changes), stage, Told(Variant(put)))
    assert made is not None
    found = explained(made, stage, FAULTS)
    assert (fault,) in [one.faults for one in found.hypotheses], found.text


@pytest.mark.parametrize("which", ["all", "masked", "late"])
def test_whitening_over_other_tokens_is_by_the_settings_of_the_whitening(
    tmp_path: Any, which: str
) -> None:
    """A mean that leaves one out, a divisor n and a clip are kept under a wrong mask, too."""
    stated = {
        "advantage.whiten": "cohort",
        "advantage.whiten_leave_one_out": True,
        "advantage.whiten_ddof": 0,
        "advantage.clip": (-1.1, 1.1),
    }
    block = _block(tmp_path, stated, seed=3)
    packed = block.packed
    late = packed.mask.roll(1)
    late[packed.offsets[:-1]] = packed.mask[packed.offsets[:-1]]
    mask = {"all": torch.ones_like(packed.mask), "masked": ~packed.mask, "late": late}[which]
    own = block.settings.advantage
    plain = packed.scalars("reward").repeat_interleave(packed.lengths)
    white = whiten(
        plain,
        mask,
        centre="leave-one-out",
        ddof=0,
        epsilon=own.whiten_epsilon,
        form=own.whiten_form,
        short=own.whiten_short,
    )
    made = with_columns(block, {"advantages": white.clamp(-1.1, 1.1)})
    found = explained(made, "advantage.estimate", FAULTS)
    assert ("advantage.whitened-masked",) in [one.faults for one in found.hypotheses], found.text
