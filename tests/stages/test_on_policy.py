"""Losses that divide the policy by itself, and what weighs them against the sampler meanwhile."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trajreplay.schema.settings import LossSettings
from trajreplay.stages.compose import LossInputs, policy_terms

# G30: the last token of the second sample is masked.
OFFSETS = torch.tensor([0, 3, 6])
MASK = torch.tensor([1, 1, 1, 1, 1, 0]).bool()
COLUMNS = {
    "old_log_probs": torch.tensor([-1.0, -0.5, -2.0, -0.2, -3.0, 0.0]),
    "rollout_log_probs": torch.tensor([-1.1, -0.45, -2.3, -0.25, -2.6, 0.0]),
    "log_probs": torch.tensor([-0.9, -0.6, -1.5, -0.3, -3.2, 0.0]),
    "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
}
PLAIN = LossSettings(eps_clip=0.2, eps_clip_high=0.28)
CLAMPED = replace(PLAIN, correction="tis", correction_bounds=(0.0, 1.2))


def _terms(settings: LossSettings, log_probs: Tensor) -> Tensor:
    columns = {name: one.double() for name, one in COLUMNS.items()} | {"log_probs": log_probs}
    if settings.proximal == "current":  # as a replay reads them
        columns["old_log_probs"] = log_probs.detach()
    return policy_terms(settings, LossInputs(columns, MASK, OFFSETS)).terms["pg_loss"]


@pytest.mark.parametrize("way", [{"ratio": "one"}, {"proximal": "current"}])
def test_golden_force_on_policy_ratio(way: dict[str, str]) -> None:
    """G30: -0.2 over the five trained tokens."""
    found = _terms(replace(PLAIN, **way), COLUMNS["log_probs"].double())  # type: ignore[arg-type]
    assert float(found[MASK].mean()) == pytest.approx(-0.2, rel=1e-7)


@pytest.mark.parametrize(
    ("way", "trainer"),
    [({"ratio": "one"}, "old_log_probs"), ({"proximal": "current"}, "log_probs")],
)
def test_weights_against_the_sampler_are_of_whose_log_probs_the_framework_takes(
    way: dict[str, str], trainer: str
) -> None:
    """Verl weighs with what the trainer computed before, NeMo-RL with what it computes now."""
    log_probs = COLUMNS["log_probs"].double().requires_grad_()
    found = _terms(replace(CLAMPED, **way), log_probs)  # type: ignore[arg-type]
    gap = (COLUMNS[trainer] - COLUMNS["rollout_log_probs"]).double()
    expected = -COLUMNS["advantages"].double() * gap.exp().clamp(max=1.2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    (gradient,) = torch.autograd.grad(found.sum(), log_probs)
    # The ratio is 1 and has the gradient of the policy; the weight has none.
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0.0)
