"""Rewards of tokens, and the returns that are summed from them."""

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.options import check_option, in_dtype_of
from trajreplay.stages.kernels.scans import linear_scan, per_token, sample_of
from trajreplay.stages.kernels.segments import check_segments, check_shapes

REWARDED_TOKENS = ("last", "last-unmasked", "after-last-unmasked")
RETURN_RULES = ("through", "reset", "carry", "multiply")


def token_rewards(
    rewards: Tensor,
    loss_mask: Tensor,
    offsets: Tensor,
    *,
    reward_at: str = "last-unmasked",
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_masked: bool = True,
) -> Tensor:
    """Put the reward of each sample on one of its tokens, and take the KL penalty off all.

        x_t = R_s [t is the rewarded token of s] - kl_coef m_t KL_t

    Args:
        rewards: (S,) float, R. One reward per sample.
        loss_mask: (N,) bool, integer or float, m. 1 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        reward_at: `last` (token of the response), `last-unmasked` or `after-last-unmasked` (the
            token behind that, if the response has one).
        kl: (N,) float. An estimate of the KL divergence at each token. Nat.
        kl_coef: What it costs. Unit of the reward per nat.
        kl_masked: Whether m is in it; otherwise masked tokens pay too.

    Returns:
        (N,) in the dtype of `rewards` if that is floating, else float64. Unit of `rewards`.

    Raises:
        StageError: The inputs differ in length, an option has no such value, or a coefficient
            is given without a KL.

    Conventions:
        Runs in float64. A sample without such a token drops its reward, as in Relax. slime's
        REINFORCE++ rewards the last unmasked token and refuses a sample without one. GAE in slime,
        verl and AReaL rewards the last token of the response; OpenRLHF the last unmasked; TRL's PPO
        the first token of padding, if there is any: capture that token, too, masked. slime's GAE
        does not mask the KL. A
        masked KL may be NaN. A coefficient of 0 leaves the KL out, whatever it is.

    Source:
        Ouyang et al. 2022, InstructGPT, section 3.5, arXiv:2203.02155.

    >>> mask, offsets = torch.tensor([1, 1, 0, 1]), torch.tensor([0, 3, 4])
    >>> token_rewards(torch.tensor([1.0, 2.0]), mask, offsets)
    tensor([0., 1., 0., 2.])
    >>> kl = torch.full((4,), 0.5)
    >>> token_rewards(torch.tensor([1.0, 2.0]), mask, offsets, kl=kl, kl_coef=0.5)
    tensor([-0.2500,  0.7500,  0.0000,  1.7500])
    """
    kernel = "token_rewards"
    check_segments(kernel, loss_mask, offsets)
    lengths = offsets.diff()
    check_shapes(kernel, samples=(lengths, "S"), rewards=(rewards, "S"))
    check_option(kernel, "reward_at", reward_at, REWARDED_TOKENS)
    unmasked = loss_mask != 0
    result = torch.zeros(loss_mask.shape, dtype=torch.float64, device=rewards.device)
    if kl_coef:
        if kl is None:
            raise StageError(
                f"{kernel}: kl_coef is {kl_coef} without a kl, expected one a token",
                hint="Pass kl, or a coefficient of 0.",
            )
        check_shapes(kernel, loss_mask=(loss_mask, "N"), kl=(kl, "N"))
        penalty = -kl_coef * kl.double()
        result = torch.where(unmasked, penalty, 0.0) if kl_masked else penalty
    if reward_at == "last":
        rewarded = torch.where(lengths > 0, offsets[1:] - 1, -1)
    else:
        token = torch.arange(loss_mask.numel(), device=offsets.device)
        rewarded = torch.full_like(lengths, -1).scatter_reduce_(
            0, sample_of(offsets), torch.where(unmasked, token, -1), "amax"
        )
    found = rewarded >= 0
    if reward_at == "after-last-unmasked":
        rewarded = torch.where(found, torch.minimum(rewarded + 1, offsets[1:] - 1), -1)
    result = result.index_add(0, rewarded[found], rewards.double()[found])
    return in_dtype_of(rewards, result)


def discounted_returns(
    rewards: Tensor,
    loss_mask: Tensor,
    offsets: Tensor,
    *,
    gamma: Tensor | float = 1.0,
    masking: str = "through",
) -> Tensor:
    """Sum the rewards from each token to the end of its sample.

        G_t = x_t + gamma C_{t+1}, with C past the last token 0, and
        through: C_t = G_t
        reset: G_t = 0 at a masked token, and C_t = G_t
        carry: C_t = C_{t+1} at a masked token, else G_t
        multiply: x_t = 0 at a masked token, and C_t = G_t

    Args:
        rewards: (N,) float, x. The reward of each token.
        loss_mask: (N,) bool, integer or float. 1 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        gamma: What one token discounts; a number or (S,) float. Dimensionless.
        masking: `through`, `reset`, `carry` or `multiply`.

    Returns:
        (N,) in the dtype of `rewards` if that is floating, else float64. Unit of `rewards`.

    Raises:
        StageError: The inputs differ in length, or there is no such rule.

    Conventions:
        Runs in float64. Masked tokens get 0 in the end with `reset` and `carry`. REINFORCE++ goes
        `through` masked tokens in slime, and in Relax, which makes them 0 afterwards; verl resets,
        so that tokens before a tool's output get no later reward, and carries since 0.9; OpenRLHF
        multiplies. ReMax and OTB multiply with a gamma of 1. What a masked token holds has no
        effect but with `through`, NaN included. NaN and infinity reach every token before them.

    Source:
        Hu 2025, REINFORCE++, arXiv:2501.03262.

    >>> rewards, mask = torch.tensor([0.0, 0, 0, 0, 1]), torch.tensor([1, 1, 0, 1, 1])
    >>> discounted_returns(rewards, mask, torch.tensor([0, 5]), gamma=0.9)
    tensor([0.6561, 0.7290, 0.8100, 0.9000, 1.0000])
    >>> discounted_returns(rewards, mask, torch.tensor([0, 5]), masking="reset")
    tensor([0., 0., 0., 1., 1.])
    """
    kernel = "discounted_returns"
    check_segments(kernel, rewards, offsets)
    check_shapes(kernel, rewards=(rewards, "N"), loss_mask=(loss_mask, "N"))
    check_option(kernel, "masking rule", masking, RETURN_RULES)
    unmasked = loss_mask != 0
    counted, decay = return_decay(loss_mask, offsets, gamma=gamma, masking=masking)
    result = linear_scan(torch.where(counted, rewards.double(), 0.0), decay, offsets)
    if masking in ("reset", "carry"):
        result = torch.where(unmasked, result, 0.0)
    return in_dtype_of(rewards, result)


def return_decay(
    loss_mask: Tensor, offsets: Tensor, *, gamma: Tensor | float, masking: str
) -> tuple[Tensor, Tensor]:
    """The tokens whose rewards count, (N,) bool, and what each discounts, (N,) float64.

    Args:
        loss_mask: As of `discounted_returns`, and so are the others.
        offsets: As there.
        gamma: As there.
        masking: As there.
    """
    unmasked = loss_mask != 0
    decay = per_token("discounted_returns", "gamma", gamma, offsets)
    if masking in ("reset", "carry"):
        decay = torch.where(unmasked, decay, 0.0 if masking == "reset" else 1.0)
    return unmasked | (masking == "through"), decay


def remax_advantages(
    rewards: Tensor, greedy_rewards: Tensor, loss_mask: Tensor, offsets: Tensor
) -> Tensor:
    """Take the reward of the greedy response off every return.

        A_t = sum_{u >= t} m_u x_u - m_t b_s      with s the sample of t

    Args:
        rewards: (N,) float, x. The reward of each token.
        greedy_rewards: (S,) float, b. The reward of the greedy response to the same prompt.
        loss_mask: (N,) bool, integer or float, m. 1 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.

    Returns:
        (N,) in the dtype of `rewards` if that is floating, else float64. Unit of `rewards`.

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        Runs in float64. As in verl the baseline is masked and the return is not: a masked token
        has the return of the next unmasked one. What it holds itself has no effect.

    Source:
        Li et al. 2023, ReMax, arXiv:2310.10505.

    >>> rewards, mask = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1, 0, 1])
    >>> remax_advantages(rewards, torch.tensor([0.25]), mask, torch.tensor([0, 3]))
    tensor([0.7500, 1.0000, 0.7500])
    """
    kernel = "remax_advantages"
    check_segments(kernel, rewards, offsets)
    check_shapes(kernel, samples=(offsets.diff(), "S"), greedy_rewards=(greedy_rewards, "S"))
    returns = discounted_returns(rewards.double(), loss_mask, offsets, masking="multiply")
    baseline = per_token(kernel, "greedy_rewards", greedy_rewards, offsets)
    result = returns - torch.where(loss_mask != 0, baseline, 0.0)
    return in_dtype_of(rewards, result)


def kl_penalised_advantages(
    rewards: Tensor, kl: Tensor, offsets: Tensor, *, kl_coef: float
) -> Tensor:
    """Give every token the reward of its sample less its own KL penalty.

        A_t = R_s - kl_coef KL_t      with s the sample of t

    Args:
        rewards: (S,) float, R. The processed reward of each sample.
        kl: (N,) float. An estimate of the KL divergence at each token. Nat.
        offsets: (S+1,) int64. Where each sample begins, and N.
        kl_coef: What it costs. Unit of the reward per nat.

    Returns:
        (N,) in the dtype of `rewards` if that is floating, else float64. Unit of `rewards`.

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        Runs in float64. Not a return: no token pays for a later one. REINFORCE++ in NeMo-RL, and
        REINFORCE++-baseline, with rewards less their group's mean, in slime; both whiten it.
        Masked tokens get it too. Relax leaves the KL out.

    Source:
        NeMo-RL, reinforce_plus_plus; slime, reinforce_plus_plus_baseline.

    >>> kl = torch.tensor([0.5, 0.0, 1.0])
    >>> kl_penalised_advantages(torch.tensor([1.0, 2.0]), kl, torch.tensor([0, 2, 3]), kl_coef=0.1)
    tensor([0.9500, 1.0000, 1.9000])
    """
    kernel = "kl_penalised_advantages"
    check_segments(kernel, kl, offsets)
    check_shapes(kernel, samples=(offsets.diff(), "S"), rewards=(rewards, "S"))
    result = per_token(kernel, "rewards", rewards, offsets) - kl_coef * kl.double()
    return in_dtype_of(rewards, result)
