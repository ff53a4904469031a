"""The stage advantage.estimate of a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trajreplay.schema.columns import has_column
from trajreplay.schema.errors import StageError
from trajreplay.schema.tables import STEPS
from trajreplay.stages.advantages.whitening_sets import tokens_of
from trajreplay.stages.block import Block
from trajreplay.stages.capability import LOG_PROB_SOURCES, message_faults
from trajreplay.stages.compare import Active, Compared, compare_elements
from trajreplay.stages.compose import (
    SHARE,
    AdvantageInputs,
    Estimate,
    LossInputs,
    estimate_advantages,
    estimate_advantages_error,
    evaluation_slack,
    rollout_weights,
)
from trajreplay.stages.kernels import half_ulp
from trajreplay.stages.remaining import remaining_tokens
from trajreplay.stages.rewards.findings import warn_of_batch_rewards, warn_of_negative_variances
from trajreplay.stages.wide import whole_batches

LAST_FAULT = 2  # the largest number that message_faults has a meaning for


def replay_advantage_estimate(block: Block) -> None:
    """Recompute advantages and returns from processed rewards, KL and values, and compare."""
    if "reward.post_process" not in block.stages:
        warn_of_batch_rewards(block)
    names = [one for one in ("advantages", "returns") if has_column(block.packed.table, one)]
    reads = block.cohorts[0].abilities["advantage.estimate"].reads
    isolated = estimated(block, {})
    looks = compare_estimates(block, {name: isolated[name] for name in names}, {})
    if "advantages" in names:
        warn_of_negative_variances(block, isolated["advantages"])
    replaced = {name: block.chained[name] for name in reads if name in block.chained}
    chained = None
    final = isolated
    if replaced:
        final = estimated(block, replaced)
        chained = compare_estimates(block, {name: final[name] for name in names}, replaced)
    for name, result in zip(names, chained or looks, strict=True):
        if result.disagree is not None:
            recorded = block.packed.tokens(name)
            block.chained[name] = torch.where(result.disagree, final[name], recorded)
    block.record(
        "advantage.estimate",
        _merged(looks),
        None if chained is None else _merged(chained),
        inputs=tuple(name for name in reads if not STEPS[name].is_text),
        outputs=tuple(names),
        after="reward.post_process",
        replaced=tuple(replaced),
        noun="tokens",
    )


def estimated(
    block: Block,
    replaced: dict[str, Tensor],
    dtype: torch.dtype = torch.float64,
    against: float = 0.0,
) -> dict[str, Tensor]:
    """Advantages and returns, some inputs replaced, in the arithmetic of a dtype.

    Args:
        block: The cohorts.
        replaced: Columns to read instead of the recorded ones.
        dtype: The dtype.
        against: How far the bounds that reject tokens are moved.
    """
    wide = whole_batches(block, "advantage.estimate")
    if wide is not None:
        every = {name: wide.with_own(name, values) for name, values in replaced.items()}
        found = estimated(wide.block, every, dtype, against)
        return {name: wide.own(values, per_token=True) for name, values in found.items()}
    if (kernel := block.kernel("advantage.estimate")) is not None:
        column, asked, critic = _columns(block, replaced, dtype)
        kl, values = asked("kl"), asked(critic)
        reward, packed = column("reward"), block.packed
        pair = kernel.advantages(block.settings, reward, packed.mask, packed.offsets, kl, values)
        return Estimate(*pair)._asdict()
    given = _inputs(block, replaced, dtype, against)
    return estimate_advantages(block.settings.advantage, given)._asdict()


_Column = Callable[[str], Tensor]
_Asked = Callable[[str], Tensor | None]


def _columns(
    block: Block, replaced: dict[str, Tensor], dtype: torch.dtype
) -> tuple[_Column, _Asked, str]:
    """Columns in a dtype, those of them that the stage reads, and which are the critic's values."""
    reads = block.cohorts[0].abilities["advantage.estimate"].reads

    def column(name: str) -> Tensor:
        return (replaced[name] if name in replaced else block.column(name)).to(dtype)

    def asked(name: str) -> Tensor | None:
        return column(name) if name in reads else None

    faults = asked("message_faults")
    if faults is not None and bool((faults > LAST_FAULT).any()):
        raise StageError(
            f"message_faults holds {int(faults.max())}, expected 0 to {LAST_FAULT}: no setting "
            "says what tokens of such a message get",
            hint="Number a message with an invalid tool call 1, one with malformed thinking 2.",
        )
    return column, asked, next((one for one in reads if one in ("old_values", "values")), "values")


def _inputs(
    block: Block, replaced: dict[str, Tensor], dtype: torch.dtype, against: float
) -> AdvantageInputs:
    """What advantages of a block are estimated from; arguments as of `estimated`."""
    packed = block.packed
    own = block.settings.advantage
    column, asked, critic = _columns(block, replaced, dtype)
    reads = block.cohorts[0].abilities["advantage.estimate"].reads
    return AdvantageInputs(
        _counted(block, replaced, against),
        packed.offsets,
        reward=asked("reward"),
        whitened_with=tokens_of(block, own.whiten),
        centred_with=tokens_of(block, own.whiten_centre),
        kl=asked("kl"),
        kl_coef=block.settings.kl.coef,
        values=asked(critic),
        token_rewards=asked("token_rewards"),
        greedy=asked("greedy_reward"),
        group=packed.groups if "group_id" in reads else None,
        policy=asked(LOG_PROB_SOURCES.get(block.settings.kl.policy_source, "")),
        teacher=asked("teacher_log_probs"),
        sum_pi_squared=asked("sum_pi_squared"),
        weights=_weights(block, column),
        bootstrap=_bootstrap(block, asked("last_value")),
        faults=asked("message_faults"),
        overrides=message_faults(block.settings),
        trained=packed.mask,
    )


def _counted(block: Block, replaced: dict[str, Tensor], against: float) -> Tensor:
    """(N,) bool. The trained tokens that count: all, or those that the loss does not reject."""
    if block.settings.advantage.counts == "trained":
        return block.packed.mask
    return remaining_tokens(block.packed, block.settings.loss, replaced, against)


def _active(block: Block, replaced: dict[str, Tensor]) -> Active | None:
    """The tokens at which advantages are compared: of some that are rejected nothing is used."""
    if block.settings.advantage.counts == "trained":
        return block.active
    # What is kept under wider and under narrower bounds is kept under those that are stated.
    kept = _counted(block, replaced, SHARE) & _counted(block, replaced, -SHARE)
    trained = [int(kept[start:stop].sum()) for start, stop in block.spans("loss_mask")]
    return Active((~kept).nonzero().squeeze(1), trained)


def _bootstrap(block: Block, last: Tensor | None) -> Tensor | None:
    """(S,) The value past the last token, 0 where the response ended by itself."""
    if last is None or block.settings.advantage.bootstrap == "last":
        return last
    return torch.where(block.packed.scalars("truncated") != 0, last, 0.0)


def _weights(block: Block, column: Callable[[str], Tensor]) -> Tensor | None:
    """(N,) The importance weights that a baseline takes in; None where it takes none."""
    if block.settings.advantage.otb_weights == "none":
        return None
    packed = block.packed
    columns = {name: column(name) for name in ("old_log_probs", "rollout_log_probs")}
    given = LossInputs(
        columns, packed.mask, packed.offsets, cohorts=packed.batches(block.settings.layout)
    )
    return rollout_weights(block.settings.loss, given)


def _errors(block: Block, replaced: dict[str, Tensor]) -> dict[str, Tensor]:
    """(N,) float64 each. How far advantages and returns may be off in float32."""
    wide = whole_batches(block, "advantage.estimate")
    if wide is not None:
        every = {name: wide.with_own(name, values) for name, values in replaced.items()}
        found = _errors(wide.block, every)
        return {name: wide.own(values, per_token=True) for name, values in found.items()}
    given = _inputs(block, replaced, torch.float64, 0.0)
    if has_column(block.packed.table, "advantages"):
        given = replace(given, recorded=block.packed.tokens("advantages"))
    errors: dict[str, Tensor] = estimate_advantages_error(block.settings.advantage, given)._asdict()
    return errors


def compare_estimates(
    block: Block, found: Mapping[str, Tensor], replaced: dict[str, Tensor]
) -> list[Compared]:
    """How recorded advantages and returns compare with those made of some inputs.

    Args:
        block: The cohorts.
        found: (N,) float64 each. By column, what `estimated` gives.
        replaced: What that was given.
    """
    active = _active(block, replaced)
    return [_compared(block, name, one, replaced, active) for name, one in found.items()]


def _compared(
    block: Block,
    name: str,
    recomputed: Tensor,
    replaced: dict[str, Tensor],
    active: Active | None,
) -> Compared:
    dtype = block.dtypes.get(name, "float32")

    def in_float32() -> Tensor:
        return estimated(block, replaced, torch.float32)[name]

    def slack(tokens: Tensor) -> Tensor:
        rounding = half_ulp(recomputed[tokens], dtype)
        if block.kernel("advantage.estimate") is not None:
            return rounding + evaluation_slack(recomputed, in_float32())[tokens]
        slack = _errors(block, replaced)[name]
        if block.settings.advantage.counts == "kept":  # where rounding decides, either is right
            for against in (SHARE, -SHARE):
                moved = estimated(block, replaced, against=against)[name]
                slack = slack + (moved - recomputed).abs()
        return rounding + slack[tokens]

    return compare_elements(
        block.packed.tokens(name),
        recomputed,
        block.packed.token_bounds,
        block.tolerance("advantage.estimate", name),
        slack=slack,
        describe=lambda one, old, new: block.token_divergence(name, one, old, new),
        ranks=block.ranks_of_tokens,
        active=active,
        exact=block.as_recorded(name, in_float32()) if block.exact else None,
    )


def _merged(columns: list[Compared]) -> list:  # type: ignore[type-arg]
    looks = columns[0].looks
    for other in columns[1:]:
        looks = [one.merged(two) for one, two in zip(looks, other.looks, strict=True)]
    return looks
