"""What advantages are estimated from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """What advantages are made of; what no setting asks for is None.

    Args:
        mask: (N,) bool. Tokens that count: the trainable ones, or those of them that are kept.
        offsets: (S+1,) int64. Where the tokens of each sample begin.
        reward: (S,) float. Processed rewards.
        whitened_with: (N,) int64. Which tokens share statistics.
        centred_with: (N,) int64. Which tokens share a mean, where they are others.
        kl: (N,) float. The KL that token rewards pay.
        kl_coef: What it costs.
        values: (N,) float. The critic's.
        token_rewards: (N,) float. The tokens' own rewards.
        greedy: (S,) float. Rewards of the greedy responses.
        group: (S,) int64. The group of each sample.
        policy: (N,) float. Log-probabilities of the policy.
        teacher: (N,) float. Log-probabilities of its teacher.
        sum_pi_squared: (N,) float. Sums of squared probabilities.
        weights: (N,) float. Importance weights of the rollout.
        bootstrap: (S,) float. The critic's value past the last token, 0 where it is not taken.
        faults: (N,) integer. What is wrong with the message of each token.
        overrides: What its tokens get, by the number of the fault.
        trained: (N,) bool. All trainable tokens, where fewer count.
        recorded: (N,) float. The advantages that a trainer has, for bounds that go by them.
    """

    mask: Tensor
    offsets: Tensor
    reward: Tensor | None = None
    whitened_with: Tensor | None = None
    centred_with: Tensor | None = None
    kl: Tensor | None = None
    kl_coef: float = 0.0
    values: Tensor | None = None
    token_rewards: Tensor | None = None
    greedy: Tensor | None = None
    group: Tensor | None = None
    policy: Tensor | None = None
    teacher: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    weights: Tensor | None = None
    bootstrap: Tensor | None = None
    faults: Tensor | None = None
    overrides: Mapping[int, float] = field(default_factory=dict)
    trained: Tensor | None = None
    recorded: Tensor | None = None
