"""G30 and G31: kernels composed to what two frameworks' own functions gave on the same tokens."""

import pytest
import torch
from torch import Tensor

from tests.helpers.replayed_means import replayed_mean
from trajreplay.stages.kernels import seq_mean_token_mean
from trajreplay.stages.kernels.clipping import cispo_loss, clip_loss
from trajreplay.stages.kernels.correction import bound_weights, importance_weights
from trajreplay.stages.kernels.kl_loss import weighted_kl
from trajreplay.stages.kernels.ratio import log_ratio, sequence_log_ratio
from trajreplay.stages.kernels.rejection import divergence_keep, veto

# The last token of the second sample is masked and holds what it may.
OFFSETS = torch.tensor([0, 3, 6])
MASK = torch.tensor([1, 1, 1, 1, 1, 0])
OLD = torch.tensor([-1.0, -0.5, -2.0, -0.2, -3.0, torch.nan])
ROLLOUT = torch.tensor([-1.1, -0.45, -2.3, -0.25, -2.6, 0.0])
LOG_PROBS = torch.tensor([-0.9, -0.6, -1.5, -0.3, -3.2, torch.nan])
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
LOG_RATIO = log_ratio(LOG_PROBS, OLD)
LOG_WEIGHTS = log_ratio(OLD, ROLLOUT)
LOW, HIGH = 0.2, 0.28
NEMO = 1e-8


def over_tokens(values: Tensor) -> float:
    return replayed_mean(values, MASK, OFFSETS, count_epsilon=NEMO).item()


def over_samples(values: Tensor) -> float:
    found = replayed_mean(
        values, MASK, OFFSETS, aggregation="seq-mean-token-mean", count_epsilon=NEMO
    )
    return found.item()


def clipped() -> Tensor:
    return clip_loss(LOG_RATIO, ADVANTAGES, eps_clip=LOW, eps_clip_high=HIGH).pg_loss


def test_token_losses() -> None:
    assert over_tokens(clipped()) == pytest.approx(-0.31328806, rel=1e-6)
    cispo = cispo_loss(LOG_PROBS, LOG_RATIO, ADVANTAGES, eps_clip=LOW, eps_clip_high=HIGH).pg_loss
    assert over_tokens(cispo) == pytest.approx(0.11323333, rel=2e-6)
    assert over_tokens(LOG_RATIO.exp()) == pytest.approx(1.07645965, rel=1e-6)
    entropy = -log_ratio(LOG_PROBS, ROLLOUT).exp() * LOG_PROBS
    assert over_tokens(entropy) == pytest.approx(1.39911294, rel=1e-6)


def test_losses_of_samples() -> None:
    assert over_samples(clipped()) == pytest.approx(-0.11744267, rel=1e-6)
    samples = sequence_log_ratio(LOG_RATIO, MASK, OFFSETS, epsilon=NEMO)
    gspo = clip_loss(samples, ADVANTAGES, eps_clip=LOW, eps_clip_high=HIGH).pg_loss
    assert over_samples(gspo) == pytest.approx(-0.16032621, rel=1e-6)


def test_weights_of_tokens_and_samples() -> None:
    """G19."""
    tokens = importance_weights(LOG_WEIGHTS, MASK, OFFSETS)
    assert over_tokens(tokens) == pytest.approx(1.02557003, rel=1e-6)
    samples = importance_weights(LOG_WEIGHTS, MASK, OFFSETS, level="sequence")
    assert over_samples(samples) == pytest.approx(1.06187773, rel=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "action", "level", "loss", "outside", "mean"),
    [
        (0.0, 1.2, "truncate", "token", -0.42361397, 0.2, 0.99559832),
        (0.9, 1.2, "zero", "token", -0.22617631, 0.4, 0.62153423),
        (0.9, 1.2, "zero", "geometric", -0.76198602, 0.5, 0.68125182),
    ],
)
def test_losses_corrected_for_the_rollout(
    low: float, high: float, action: str, level: str, loss: float, outside: float, mean: float
) -> None:
    raw = importance_weights(LOG_WEIGHTS, MASK, OFFSETS, undefined=0.0)
    judged = importance_weights(LOG_WEIGHTS, MASK, OFFSETS, level=level, epsilon=NEMO)
    found = bound_weights(raw, low=low, high=high, action=action, criterion=judged)
    assert over_tokens(found.weight) == pytest.approx(mean, rel=1e-6)
    assert over_tokens(clipped() * found.weight) == pytest.approx(loss, rel=1e-6)
    passed = found.below | found.above
    fraction = over_tokens(passed) if level == "token" else over_samples(passed)
    assert fraction == pytest.approx(outside, rel=1e-6)


def test_a_kl_term() -> None:
    kl = weighted_kl(LOG_PROBS, ROLLOUT, value_clamp=(-10.0, 10.0), log_ratio_clamp=(-20.0, 20.0))
    assert over_tokens(kl) == pytest.approx(0.10065679, rel=2e-6)
    assert over_tokens(clipped()) + 0.1 * over_tokens(kl) == pytest.approx(-0.30322239, rel=1e-6)


def test_a_ratio_forced_to_1() -> None:
    loss = clip_loss(
        log_ratio(LOG_PROBS, None), ADVANTAGES, eps_clip=LOW, eps_clip_high=HIGH
    ).pg_loss
    assert over_tokens(loss) == pytest.approx(-0.2, rel=1e-6)
    error = log_ratio(LOG_PROBS, ROLLOUT).abs().exp()
    assert over_tokens(error) == pytest.approx(1.4964335, rel=1e-6)


def test_weights_that_are_truncated_while_tokens_are_rejected() -> None:
    """G31: slime's MIS."""
    weights = importance_weights(LOG_WEIGHTS, MASK, OFFSETS, clamp=(-20.0, 20.0))
    truncated = bound_weights(weights, low=0.0, high=1.2).weight
    expected = [1.10517097, 0.951229393, 1.2, 1.05127108, 0.670319974]
    assert truncated[:5].tolist() == pytest.approx(expected, rel=3e-7)
    kept = divergence_keep(LOG_WEIGHTS, MASK, OFFSETS, low=0.7, high=1.3).keep
    assert (kept & MASK.bool()).tolist() == [True, True, False, True, False, False]
    assert veto(LOG_WEIGHTS, MASK, OFFSETS, threshold=0.7).tolist() == [True] * 3 + [False] * 3


def test_moments_of_the_weights_of_samples() -> None:
    """G31: chi2 of tokens and of samples, and the ratio of perplexities."""
    tokens = importance_weights(2.0 * LOG_WEIGHTS, MASK, OFFSETS)
    means = seq_mean_token_mean(tokens, MASK.float(), OFFSETS).mean - 1.0
    assert means.tolist() == pytest.approx([0.316119671, -0.222750127], rel=2e-6)
    samples = importance_weights(2.0 * LOG_WEIGHTS, MASK, OFFSETS, level="sequence") - 1.0
    assert samples[::3].tolist() == pytest.approx([1.01375246, -0.50341475], rel=2e-6)
    perplexity = importance_weights(-LOG_WEIGHTS, MASK, OFFSETS, level="geometric")
    assert perplexity[::3].tolist() == pytest.approx([0.88988179, 1.19124627], rel=1e-6)
