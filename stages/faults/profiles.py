"""The arithmetic of each framework, where another one is stated: tried after everything else."""

from __future__ import annotations

from collections.abc import Iterable

from trajreplay.schema.settings import PROFILES
from trajreplay.schema.settings.knobs import kinds
from trajreplay.schema.settings.tree import SECTIONS
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import Fault, Told, Tries, setting

# What a profile leaves to the user, or a capture states by itself.
_OWN = {
    "reward.n_samples_per_prompt",
    "kl.coef",
    "loss.entropy_coef",
    "loss.use_kl_loss",
    "loss.tis",
    "loss.opsm",
    "loss.opd",
    "loss.per_token",
    "loss.constant_norm",
}


def _section(section: str) -> Tries:
    def tries(block: Block) -> Iterable[Told]:
        for one in PROFILES.values():
            changes = {
                f"{section}.{name}": getattr(getattr(one.settings, section), name)
                for name in kinds(SECTIONS[section])
                if f"{section}.{name}" not in _OWN
            }
            sized = setting(block, "reward.n_samples_per_prompt")
            if changes.get("reward.grouping") == "stride" and not sized:
                changes["reward.grouping"] = "group"
            yield Told(Variant(changes), one.label)

    return tries


def _fault(section: str, stage: str, what: str) -> Fault:
    return Fault(
        f"{section}.as-profile",
        "the arithmetic of another framework",
        stage,
        f"what the profile {{}} makes of these {what}",
        "trajreplay profiles diff",
        tries=_section(section),
        alone=True,
    )


FAULTS = (
    _fault("reward", "reward.post_process", "rewards"),
    _fault("kl", "advantage.kl", "log-probs"),
    _fault("advantage", "advantage.estimate", "rewards"),
    _fault("loss", "loss.policy", "tokens"),
    _fault("value", "loss.value", "values"),
)
