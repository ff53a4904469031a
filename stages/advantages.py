"""The stages advantage.kl and advantage.estimate of a block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.stages.block import Block
from trajreplay.stages.capability import LOG_PROB_SOURCES, is_plain, message_faults
from trajreplay.stages.compare import Compared, compare_elements
from trajreplay.stages.compose import (
    AdvantageInputs,
    Estimate,
    LossInputs,
    estimate_advantages,
    evaluation_slack,
    kl_tokens,
    rollout_weights,
)
from trajreplay.stages.kernels import approx_kl_error, half_ulp
from trajreplay.stages.rewards import warn_of_batch_rewards

LAST_FAULT = 2  # the largest number that message_faults has a meaning for


def replay_advantage_kl(block: Block) -> None:
    """Recompute the KL of policy against reference token by token."""
    inputs, recomputed, compared = compare_kl(block)
    if compared.disagree is not None:
        recorded = block.packed.tokens("kl")
        block.chained["kl"] = torch.where(compared.disagree, recomputed, recorded)
    block.record("advantage.kl", compared.looks, inputs=inputs, outputs=("kl",), noun="tokens")


def compare_kl(block: Block) -> tuple[tuple[str, ...], Tensor, Compared]:
    """The columns that the KL is made of, the KL of each token, and how the recorded ones compare.

    Returns:
        Names, (N,) float64, and the comparison.
    """
    settings, kernel = block.settings.kl, block.kernel("advantage.kl")
    dtype = block.dtypes.get("kl", "float32")
    if settings.coef == 0 and kernel is None:
        inputs: tuple[str, ...] = ()
        recomputed = torch.zeros_like(block.packed.tokens("kl"))

        def slack(tokens: Tensor) -> Tensor:
            return torch.zeros(len(tokens)).double()

        def in_float32() -> Tensor:
            return recomputed
    else:
        inputs = (LOG_PROB_SOURCES[settings.policy_source], "ref_log_probs")
        policy, reference = (block.packed.tokens(name) for name in inputs)
        if kernel is None:
            recomputed = kl_tokens(settings, policy, reference)
        else:
            recomputed = kernel.kl(block.settings, policy, reference)

        def in_float32() -> Tensor:
            if kernel is not None:
                return kernel.kl(block.settings, policy.float(), reference.float())
            return kl_tokens(settings, policy.float(), reference.float())

        def slack(tokens: Tensor) -> Tensor:
            mine, theirs = policy[tokens], reference[tokens]
            rounding = half_ulp(recomputed[tokens], dtype)
            if kernel is not None:
                return rounding + evaluation_slack(recomputed, in_float32())[tokens]
            if is_plain("advantage.kl", block.settings):
                estimator = "k3" if settings.estimator == "low_var_kl" else settings.estimator
                return rounding + approx_kl_error(
                    mine, theirs, estimator=estimator, value_clamp=settings.value_clamp
                )
            rounded = kl_tokens(settings, mine.float(), theirs.float())
            return rounding + evaluation_slack(recomputed[tokens], rounded)

    compared = compare_elements(
        block.packed.tokens("kl"),
        recomputed,
        block.packed.token_bounds,
        block.tolerance("advantage.kl", "kl"),
        slack=slack,
        describe=lambda one, old, new: block.token_divergence("kl", one, old, new),
        active=block.active,
        exact=block.as_recorded("kl", in_float32()) if block.exact else None,
    )
    return inputs, recomputed, compared


def replay_advantage_estimate(block: Block) -> None:
    """Recompute advantages and returns from processed rewards, KL and values, and compare."""
    if "reward.post_process" not in block.stages:
        warn_of_batch_rewards(block)
    names = [one for one in ("advantages", "returns") if one in block.packed.table.column_names]
    reads = block.cohorts[0].abilities["advantage.estimate"].reads
    isolated = estimated(block, {})
    looks = [compare_estimates(block, name, isolated[name], {}) for name in names]
    replaced = {name: block.chained[name] for name in reads if name in block.chained}
    chained = None
    final = isolated
    if replaced:
        final = estimated(block, replaced)
        chained = [compare_estimates(block, name, final[name], replaced) for name in names]
    for name, result in zip(names, chained or looks, strict=True):
        if result.disagree is not None:
            recorded = block.packed.tokens(name)
            block.chained[name] = torch.where(result.disagree, final[name], recorded)
    block.record(
        "advantage.estimate",
        _merged(looks),
        None if chained is None else _merged(chained),
        inputs=tuple(name for name in reads if name != "group_id"),
        outputs=tuple(names),
        after="reward.post_process",
        replaced=tuple(replaced),
        noun="tokens",
    )


def estimated(
    block: Block, replaced: dict[str, Tensor], dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Advantages and returns, some inputs replaced, in the arithmetic of a dtype."""
    settings, packed = block.settings.advantage, block.packed
    reads = block.cohorts[0].abilities["advantage.estimate"].reads

    def column(name: str) -> Tensor:
        return (replaced[name] if name in replaced else block.column(name)).to(dtype)

    def asked(name: str) -> Tensor | None:
        return column(name) if name in reads else None

    critic = next((name for name in reads if name in ("old_values", "values")), "values")
    faults = asked("message_faults")
    if faults is not None and bool((faults > LAST_FAULT).any()):
        raise StageError(
            f"message_faults holds {int(faults.max())}, expected 0 to {LAST_FAULT}: no setting "
            "says what tokens of such a message get",
            hint="Number a message with an invalid tool call 1, one with malformed thinking 2.",
        )
    if (kernel := block.kernel("advantage.estimate")) is not None:
        kl, values = asked("kl"), asked(critic)
        reward, mask = column("reward"), packed.mask
        pair = kernel.advantages(block.settings, reward, mask, packed.offsets, kl, values)
        return Estimate(*pair)._asdict()
    found = estimate_advantages(
        settings,
        AdvantageInputs(
            packed.mask,
            packed.offsets,
            reward=asked("reward"),
            whitened_with=_shared(block),
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
            faults=faults,
            overrides=message_faults(block.settings),
        ),
    )
    return found._asdict()


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
    given = LossInputs(columns, packed.mask, packed.offsets, cohorts=packed.cohorts)
    return rollout_weights(block.settings.loss, given)


def _shared(block: Block) -> Tensor | None:
    """(N,) int64. Which tokens are whitened together; None where none is."""
    packed = block.packed
    samples = {
        "cohort": lambda: packed.cohorts,
        "rank": lambda: packed.cohort_ranks,
        "group": lambda: packed.groups,
        "sample": lambda: torch.arange(len(packed.lengths)),
    }.get(block.settings.advantage.whiten)
    return None if samples is None else samples().repeat_interleave(packed.lengths)


def compare_estimates(
    block: Block, name: str, recomputed: Tensor, replaced: dict[str, Tensor]
) -> Compared:
    """How recorded advantages or returns compare with those made of some inputs.

    Args:
        block: The cohorts.
        name: The column.
        recomputed: (N,) float64. What `estimated` gives.
        replaced: What that was given.
    """
    dtype = block.dtypes.get(name, "float32")

    def in_float32() -> Tensor:
        return estimated(block, replaced, torch.float32)[name]

    def slack(tokens: Tensor) -> Tensor:
        rounding = half_ulp(recomputed[tokens], dtype)
        plain = is_plain("advantage.estimate", block.settings)
        if plain and block.kernel("advantage.estimate") is None:  # values are copied
            return rounding
        return rounding + evaluation_slack(recomputed, in_float32())[tokens]

    return compare_elements(
        block.packed.tokens(name),
        recomputed,
        block.packed.token_bounds,
        block.tolerance("advantage.estimate", name),
        slack=slack,
        describe=lambda one, old, new: block.token_divergence(name, one, old, new),
        active=block.active,
        exact=block.as_recorded(name, in_float32()) if block.exact else None,
    )


def _merged(columns: list[Compared]) -> list:  # type: ignore[type-arg]
    looks = columns[0].looks
    for other in columns[1:]:
        looks = [one.merged(two) for one, two in zip(looks, other.looks, strict=True)]
    return looks
