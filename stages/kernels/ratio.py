"""Ratios of probabilities: of tokens and of samples, clamped, and 1 where a trainer says so."""

from torch import Tensor

from trajreplay.stages.kernels.masked import sample_values
from trajreplay.stages.kernels.options import check_option
from trajreplay.stages.kernels.segments import check_shapes

FORMS = ("mean", "sum")


def log_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    *,
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    """Compare the log-probabilities of tokens under two policies.

        l_t = clamp(log pi_t - log old_t)

    Args:
        log_probs: (N,) float. Log-probability of each token under one policy. Nat.
        old_log_probs: (N,) float. The same under the other; None where the trainer divides the
            policy by itself. Nat.
        clamp: Lowest and highest value, infinite for none. Nat.

    Returns:
        (N,) in the dtype of the inputs. Nat.

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        Policy loss: verl vanilla, SAPO and CISPO and OpenRLHF clamp to -20 and 20; slime, Relax,
        TRL, NeMo-RL and AReaL do not. Without old log-probs the value is 0, so that the ratio is
        1 and its gradient that of the policy: NeMo-RL `force_on_policy_ratio`, Relax
        `true_on_policy`, verl with one mini-batch and one epoch, TRL with aligned steps, and slime
        where none are recorded ignore recorded ones.
        AReaL makes train/rollout log-ratios that are not finite 0. A clamp turns an infinity into
        its bound and leaves NaN.

    Source:
        Schulman et al. 2017, PPO, section 3, arXiv:1707.06347.

    >>> import torch
    >>> log_ratio(torch.tensor([-1.0, -0.5]), torch.tensor([-31.0, -1.0]), clamp=(-20.0, 20.0))
    tensor([20.0000,  0.5000])
    """
    other = log_probs.detach() if old_log_probs is None else old_log_probs
    check_shapes("log_ratio", log_probs=(log_probs, "N"), old_log_probs=(other, "N"))
    difference = log_probs - other
    return difference if clamp is None else difference.clamp(*clamp)


def sequence_log_ratio(
    log_ratio: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    form: str = "mean",
    epsilon: float = 0.0,
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    """Give each token the log-ratio of its sample.

        mean: l_s = sum_t m_t l_t / max(sum_t m_t, 1)      sum: l_s = sum_t m_t l_t

    Args:
        log_ratio: (N,) float. As `log_ratio` gives it. Nat.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        form: `mean` or `sum`.
        epsilon: What is added to the count of a mean; 0 divides by at least 1. Token.
        clamp: Lowest and highest value of a sample, infinite for none. Nat.

    Returns:
        (N,) in the dtype of `log_ratio`, masked tokens too. Nat.

    Raises:
        StageError: The inputs differ in length, `offsets` do not cover them, or the form is
            neither.

    Conventions:
        GSPO is the mean, in slime, Relax, TRL and AReaL over at least 1, in NeMo-RL over the count
        plus 1e-8; verl clamps it to at most 10. verl's form with a stopped gradient has the same
        value. TRL RLOO is the sum: no division by the length. OpenRLHF puts the rollout in the
        place of the old log-probs when it corrects for the rollout. Sums run in float64. A sample
        without trained tokens has 0, so a ratio of 1 (AReaL then masks its ratio to 0).

    Source:
        Zheng et al. 2025, GSPO, equation 7, arXiv:2507.18071; the sum: Ahmadian et al. 2024, Back
        to basics, arXiv:2402.14740.

    >>> import torch
    >>> tokens, offsets = torch.tensor([0.5, -0.25, 0.75]), torch.tensor([0, 2, 3])
    >>> sequence_log_ratio(tokens, torch.ones(3), offsets)
    tensor([0.1250, 0.1250, 0.7500])
    """
    check_option("sequence_log_ratio", "form", form, FORMS)
    values = sample_values(log_ratio, mask, offsets, statistic=form, epsilon=epsilon)
    return values if clamp is None else values.clamp(*clamp)
