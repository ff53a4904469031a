"""A worked example: what the settings of a stage make of a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trajreplay.schema import Settings, TrajReplayError, with_changes
from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.stages.capability import LOG_PROB_SOURCES, ability, message_faults
from trajreplay.stages.compose.advantage_inputs import AdvantageInputs
from trajreplay.stages.compose.advantages import estimate_advantages, kl_tokens
from trajreplay.stages.compose.aggregates import aggregation_of
from trajreplay.stages.compose.corrections import kept_tokens, rollout_weights
from trajreplay.stages.compose.losses import (
    PolicyTerms,
    policy_terms,
    value_terms,
    value_tokens,
)
from trajreplay.stages.compose.reward_inputs import RewardInputs
from trajreplay.stages.compose.rewards import processed_rewards, summed_tokens
from trajreplay.stages.compose.surrogates import LossInputs
from trajreplay.stages.kernels import (
    kl_penalised_rewards,
    proximal_log_probs,
    segment_sum,
    seq_mean_token_mean,
)

# Five samples: a group of four and, among them, a lone one whose reward is large; the third is
# truncated, and all are of one micro-batch.
_REWARDS = [1.0, 12.0, 0.0, 0.0, 0.5]
_LENGTHS = [3, 1, 2, 1, 2]
_GROUPS = [0, 1, 0, 0, 0]
_COLUMNS = {
    "log_probs": [-0.9, -1.5, -0.3, -2.2, -0.7, -1.0, -0.4, -6.0, -0.2],
    "old_log_probs": [-1.2, -1.0, -0.4, -2.0, -2.2, -1.0, -0.5, -6.1, -0.2],
    "rollout_log_probs": [-1.3, -0.6, -0.5, -2.1, -2.0, -1.4, -0.5, -4.0, -0.2],
    "ref_log_probs": [-1.1, -1.2, -0.4, -2.4, -0.9, -1.1, -0.4, -0.5, -0.3],
    "teacher_log_probs": [-0.8, -1.4, -0.3, -1.9, -0.6, -1.2, -0.3, -1.0, -0.2],
    "sum_pi_squared": [0.5, 0.3, 0.8, 0.2, 0.6, 0.4, 0.7, 0.1, 0.9],
    "token_rewards": [0.0, 1.0, 0.25, 0.0, -0.25, 0.0, 0.0, 0.5, 12.0],
    "entropy": [1.0, 1.5, 0.5, 2.0, 0.8, 1.2, 0.6, 2.5, 0.4],
    "advantages": [1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 0.5, 0.5, 0.0],
    "values": [0.9, 1.5, -0.2, 0.1, 0.3, 0.2, 0.9, 0.4, 0.1],
    "old_values": [0.4, 0.9, 0.3, 0.1, 0.2, 0.2, 0.2, 0.4, 0.1],
    "returns": [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 12.0],
}
_HELD = (*_COLUMNS, "micro_batch_id")
_TRUNCATED = [False, False, True, False, False]
_GREEDY = [0.5, 10.0, 0.5, 0.5, 0.5]
_KEPT = [0.25, 8.0, 0.25, 0.75, 0.75]
_TURNS = [1, 1, 3, 2, 2]
_FIRST_MESSAGE = [2, 1, 1, 1, 1]
_TOTALS = [5, 3, 5, 4, 6]
_AGENTS = [0, 2, 0, 1, 1]  # of the group of four, two each
_FAULTS = [0, 0, 0, 0, 1, 0, 0, 2, 0]
_VERSIONS, _CURRENT = [3, 3, 5, 5, 2, 2, 4, 3, 5], 6
_LAST = [0.6, 9.0, 0.2, 0.1, 0.5]
_MASK = [1, 1, 1, 1, 1, 0, 1, 1, 1]
N_SAMPLES_PER_PROMPT = 4


def worked_number(settings: Settings, section: str) -> float | None:
    """One number that a section of the settings decides, on the example.

    Args:
        settings: The arithmetic; `n_samples_per_prompt` is the example's where it is not stated.
        section: reward, kl, advantage, loss or value; layout and sampling are no arithmetic.

    Returns:
        reward: the sum of |processed reward|; kl: the mean KL of a token; advantage: the sum of
        |advantage| over trained tokens; loss, value: the loss. None of other sections, where the
        settings contradict each other, or where a term takes more than the example has.
    """
    if section not in _NUMBERS:
        return None
    if settings.reward.n_samples_per_prompt is None:
        changes = {"reward.n_samples_per_prompt": N_SAMPLES_PER_PROMPT}
        settings = with_changes(settings, changes)
    stage, number = _NUMBERS[section]
    if ability(stage, settings, ParallelCoordinates(), _HELD).capability != "recompute":
        return None
    try:
        return float(number(settings))
    except TrajReplayError:
        return None


def _reward(settings: Settings) -> Tensor:
    stride = torch.arange(len(_REWARDS)) // (settings.reward.n_samples_per_prompt or 1)
    one = torch.zeros(len(_REWARDS), dtype=torch.int64)
    groups = {
        "group": torch.tensor(_GROUPS),
        "stride": stride,
        "agent": torch.tensor(_AGENTS),
    }
    # As many components of each as are weighed, that make it up together.
    raw = torch.tensor(_REWARDS).double()
    if settings.reward.source == "token":
        raw = summed_tokens(_columns()["token_rewards"], _offsets())
    count = len(settings.reward.weights)
    parts = torch.arange(count).double() - (count - 1) / 2
    components = raw[:, None] / max(count, 1) + parts
    given = RewardInputs(
        groups.get(settings.reward.grouping, one),
        one,
        torch.tensor(_LENGTHS),
        segment_sum(torch.tensor(_MASK).double(), _offsets()),
        trajectory=torch.arange(len(_REWARDS)),
        step=torch.zeros(len(_REWARDS), dtype=torch.int64),
        truncated=torch.tensor(_TRUNCATED),
        greedy=torch.tensor(_GREEDY).double(),
        kept=torch.tensor(_KEPT).double(),
        prompt=torch.tensor(_GROUPS),
        totals=torch.tensor(_TOTALS).double(),
        turns=torch.tensor(_TURNS).double(),
        remaining=segment_sum(_kept(settings).double(), _offsets()),
        first_message=torch.tensor(_FIRST_MESSAGE).double(),
        penalty=_penalty(settings),
    )
    return processed_rewards(settings.reward, components if count else raw, given).abs().sum()


def _penalty(settings: Settings) -> Tensor:
    free, mask = torch.zeros(len(_REWARDS)).double(), torch.tensor(_MASK)
    coef = settings.kl.coef
    return -kl_penalised_rewards(free, _kl_tokens(settings), mask, _offsets(), kl_coef=coef)


def _kept(settings: Settings) -> Tensor:
    mask = torch.tensor(_MASK) != 0
    kept = kept_tokens(settings.loss, LossInputs(_columns(), mask, _offsets()))
    return mask if kept is None else kept


def _kl_tokens(settings: Settings) -> Tensor:
    kl, columns = settings.kl, _columns()
    if kl.coef == 0:
        return torch.zeros(len(_MASK)).double()
    source = LOG_PROB_SOURCES[kl.policy_source]
    return kl_tokens(kl, columns[source], columns["ref_log_probs"])


def _advantage(settings: Settings) -> Tensor:
    mask = torch.tensor(_MASK) != 0
    columns, last = _columns(), torch.tensor(_LAST).double()
    weights = None
    if settings.advantage.otb_weights == "correction":
        weights = rollout_weights(settings.loss, LossInputs(columns, mask, _offsets()))
    given = AdvantageInputs(
        _kept(settings) if settings.advantage.counts == "kept" else mask,
        _offsets(),
        reward=torch.tensor(_REWARDS).double(),
        whitened_with=torch.zeros(len(_MASK), dtype=torch.int64),
        centred_with=_centred_with(settings),
        kl=_kl_tokens(settings),
        kl_coef=settings.kl.coef,
        values=columns["old_values"],
        token_rewards=columns["token_rewards"],
        greedy=torch.tensor(_GREEDY).double(),
        group=torch.tensor(_GROUPS),
        policy=columns[LOG_PROB_SOURCES[settings.kl.policy_source]],
        teacher=columns["teacher_log_probs"],
        sum_pi_squared=columns["sum_pi_squared"],
        weights=weights,
        bootstrap={"last": last, "truncated": last * torch.tensor(_TRUNCATED)}.get(
            settings.advantage.bootstrap
        ),
        faults=torch.tensor(_FAULTS),
        overrides=message_faults(settings),
        trained=mask,
    )
    return estimate_advantages(settings.advantage, given).advantages[mask].abs().sum()


def _centred_with(settings: Settings) -> Tensor:
    """Of one rank and one batch, in which samples and groups are told apart."""
    lengths, one = torch.tensor(_LENGTHS), torch.zeros(len(_LENGTHS), dtype=torch.int64)
    sets = {"group": torch.tensor(_GROUPS), "sample": torch.arange(len(_LENGTHS))}
    return sets.get(settings.advantage.whiten_centre, one).repeat_interleave(lengths)


def _loss(settings: Settings) -> Tensor:
    loss, mask = settings.loss, torch.tensor(_MASK) != 0
    columns = _columns()
    if loss.proximal == "interpolated":
        columns["old_log_probs"] = proximal_log_probs(
            columns["log_probs"],
            columns["rollout_log_probs"],
            torch.tensor(_VERSIONS),
            _CURRENT,
        )
    if loss.proximal == "current":
        columns["old_log_probs"] = columns["log_probs"]
    found = policy_terms(loss, LossInputs(columns, mask, _offsets()))
    terms = found.terms
    coefs = {"pg_loss": 1.0, "kl_loss": loss.kl_loss_coef, "entropy_loss": -loss.entropy_coef}
    parts = [
        coef * _aggregated(settings, "loss.policy", name, found)
        for name, coef in coefs.items()
        if name in terms
    ]
    return torch.stack(parts).sum() + loss.nll_coef * _nll(found.summed)


def _nll(summed: Tensor) -> Tensor:
    good = summed & (torch.tensor(_REWARDS) > 0).repeat_interleave(torch.tensor(_LENGTHS))
    return -_columns()["log_probs"][good].sum() / good.sum().clamp(min=1)


def _value(settings: Settings) -> Tensor:
    terms, mask = value_terms(settings.value, _columns()), torch.tensor(_MASK) != 0
    counted = value_tokens(settings, LossInputs(_columns(), mask, _offsets()))
    found = PolicyTerms(terms, counted, counted)
    return _aggregated(settings, "loss.value", "value_loss", found)


def _aggregated(settings: Settings, stage: str, name: str, found: PolicyTerms) -> Tensor:
    loss = aggregation_of(settings, stage, name)
    counts, epsilon = segment_sum(found.counted.double(), _offsets()), loss.count_epsilon
    means = seq_mean_token_mean(
        found.terms[name],
        found.summed.double(),
        _offsets(),
        denominator=counts + epsilon if epsilon else counts.clamp(min=1.0),
    )
    if loss.aggregation == "constant-norm":
        rows = len(_LENGTHS) if loss.constant_norm_by_rows else 1
        return means.numerator.sum() / (float(loss.constant_norm or 1.0) * rows)
    by_mean = loss.aggregation == "seq-mean-token-mean"
    total = (means.mean if by_mean else means.numerator).sum()
    if loss.batch_reduction == "sum":
        return total
    divided = counts.sum() if loss.aggregation == "token-mean" else len(_LENGTHS)
    return total / (divided + epsilon)


def _columns() -> dict[str, Tensor]:
    return {name: torch.tensor(values).double() for name, values in _COLUMNS.items()}


def _offsets() -> Tensor:
    return torch.tensor([0, *_LENGTHS]).cumsum(0)


_NUMBERS: dict[str, tuple[str, Callable[[Settings], Any]]] = {
    "reward": ("reward.post_process", _reward),
    "kl": ("advantage.kl", lambda settings: _kl_tokens(settings).mean()),
    "advantage": ("advantage.estimate", _advantage),
    "loss": ("loss.policy", _loss),
    "value": ("loss.value", _value),
}
