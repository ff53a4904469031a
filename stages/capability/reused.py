"""What a stage needs that a kernel of the user recomputes, and the settings that still hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from trajreplay.schema.contracts import REUSABLE, StageContract
from trajreplay.schema.errors import StageError
from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import SECTIONS, Settings
from trajreplay.schema.settings.knobs import kinds
from trajreplay.stages.capability import advantages, means, rewards, v2
from trajreplay.stages.capability.ability import LOG_PROB_SOURCES, Ability
from trajreplay.stages.reuse import find_kernel

_MEANS = ("aggregation", "batch_reduction", "denominator_rows", "token_count")
# Settings that are not the kernel's: what it is given, and how its terms are summed up.
_AROUND: dict[str, dict[str, tuple[str, ...]]] = {
    "reward.post_process": {"reward": ("grouping",)},
    "advantage.kl": {"kl": ("policy_source",)},
    "advantage.estimate": {},
    "loss.policy": {"loss": (*_MEANS, "old_source")},
    "loss.value": {"loss": _MEANS},
}
_READ = {
    "loss.policy": (
        "log_probs",
        "advantages",
        "old_log_probs",
        "rollout_log_probs",
        "ref_log_probs",
        "entropy",
    ),
    "loss.value": ("values", "returns", "old_values"),
}


def reused_ability(
    contract: StageContract,
    settings: Settings,
    parallel: ParallelCoordinates,
    columns: Collection[str] = (),
) -> Ability:
    """Whether a stage can be recomputed by the kernel that its contract names.

    Args:
        contract: The contract, with a kernel.
        settings: The arithmetic in force.
        parallel: Where a capturing rank stands.
        columns: Columns that the capture holds.
    """
    stage, name = contract.stage, contract.kernel
    assert name is not None, "the contract names no kernel"
    if stage not in REUSABLE:
        return Ability("unsupported", f"{contract.implementation}: {stage} takes no kernel")
    layout = v2.ability("sample", settings, parallel, columns).reason
    reason = layout or next(_contradictions(stage, settings), "")
    if reason:
        return Ability("unsupported", reason)
    try:
        kernel = find_kernel(stage, name)
    except StageError as error:
        hint = error.hint[:1].lower() + error.hint[1:].rstrip(".?")
        return Ability("unsupported", f"{error.message}; {hint}" if hint else error.message)
    reads, writes = _needs(stage, settings, columns)
    # A kernel may take any sample of the cohort into account; a KL is one token's own.
    return Ability("recompute", "", reads, writes, stage != "advantage.kl", kernel)


def _contradictions(stage: str, settings: Settings) -> Iterator[str]:
    for section, names in _AROUND[stage].items():
        known = kinds(SECTIONS[section])
        for name in names:
            found = getattr(getattr(settings, section), name)
            if known[name].known and found not in known[name].known:
                expected = ", ".join(map(repr, known[name].known))
                yield f"{section}.{name} is {found!r}; a kernel is given or summed up as {expected}"
    reward = settings.reward
    by_stride = stage == "reward.post_process" and reward.grouping == "stride"
    if by_stride and not reward.n_samples_per_prompt:
        yield "reward.grouping is 'stride' and reward.n_samples_per_prompt is not stated"
    if stage == "reward.post_process" and reward.unit != "sample":
        yield f"reward.unit is {reward.unit!r}; a kernel is given the rewards of samples"
    if stage == "reward.post_process" and reward.weights:
        yield "reward.weights has components; a kernel is given one raw reward a sample"
    if stage.startswith("loss."):
        yield from _of_losses(stage, settings)


def _of_losses(stage: str, settings: Settings) -> Iterator[str]:
    """How what a kernel gives of a loss cannot be summed up."""
    loss = settings.loss
    if stage == "loss.policy" and loss.proximal != "recorded":
        yield f"loss.proximal is {loss.proximal!r}; a kernel is given log-probs as recorded"
    if stage == "loss.policy" and loss.nll_coef:
        yield "loss.nll_coef is stated; a kernel gives a policy loss without a likelihood"
    if loss.fragments == "shared":
        yield "loss.fragments are 'shared'; what a kernel gives is averaged sample by sample"
    names = ("mean_over", *(f"{term}_mean_over" for term in means.own_terms(loss)))
    over = {f"loss.{name}": getattr(loss, name) for name in names}
    over["value.mean_over"] = settings.value.mean_over
    for name, value in over.items():
        if value not in ("scope", "same"):
            yield f"{name} is {value!r}; what a kernel gives is averaged over its whole scope"
    yield from means.mean_contradictions(loss)


def _needs(
    stage: str, settings: Settings, columns: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Columns to read: those that the settings ask for, and what else a kernel may take is held."""
    loss = settings.loss
    if stage == "reward.post_process":
        by: dict[str, tuple[str, ...]] = {
            "group": ("group_id",),
            "consumer-batch": ("consumer_batch_id",),
            "agent": (
                *("group_id", "agent_id"),
                *(("episode_id",) if settings.reward.episode_agents else ()),
            ),
        }
        counted = ("group_id",) if rewards.counts_groups(settings) else ()
        raw = rewards.raw_column(settings)
        return (raw, *by.get(settings.reward.grouping, ()), *counted), ("reward",)
    if stage == "advantage.kl":
        return (LOG_PROB_SOURCES[settings.kl.policy_source], "ref_log_probs"), ("kl",)
    if stage == "advantage.estimate":
        kl = ("kl",) if "kl" in columns or settings.advantage.kl_in_reward else ()
        critic = advantages.critic_column(columns)
        values = (critic,) if critic in columns or settings.advantage.estimator == "gae" else ()
        returns = ("returns",) if "returns" in columns else ()
        return ("reward", *kl, *values), ("advantages", *returns)
    asked = {"values", "returns"} | ({"old_values"} if settings.value.clip is not None else set())
    if stage == "loss.policy":
        asked = {"log_probs", "advantages"}
        if loss.ratio != "one" and loss.surrogate != "reinforce":
            asked.add(LOG_PROB_SOURCES[loss.old_source])
        asked |= {"old_log_probs", "rollout_log_probs"} if loss.correction != "none" else set()
        asked |= {"ref_log_probs"} if loss.kl_loss_coef else set()
        asked |= {"entropy"} if loss.entropy_coef else set()
    reads = tuple(name for name in _READ[stage] if name in asked or name in columns)
    return reads, ("loss", "pg_loss") if stage == "loss.policy" else ("value_loss",)
