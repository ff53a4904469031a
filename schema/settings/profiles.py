"""Profiles: the settings that a framework has where its user sets nothing, by name and version.

Facts of mid 2026 (verl: January 2026), read in the public sources of each. A profile only fills the
tree: what is stored with a capture is the resolved tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trajreplay.schema.errors import SchemaError
from trajreplay.schema.settings.advantage import AdvantageSettings, KlSettings, own_clamp
from trajreplay.schema.settings.knobs import kinds
from trajreplay.schema.settings.layout import LayoutSettings
from trajreplay.schema.settings.loss import LossSettings, ValueSettings
from trajreplay.schema.settings.reward import RewardSettings
from trajreplay.schema.settings.tree import SECTIONS, Settings


@dataclass(frozen=True)
class Profile:
    """What a framework does by default.

    Args:
        name: The framework.
        version: Of the profile: it changes when the framework's defaults, or what we know of them,
            do.
        doc: What is peculiar about it, in a sentence.
        settings: Its settings; `n_samples_per_prompt` and coefficients are the user's to give.
    """

    name: str
    version: str
    doc: str
    settings: Settings

    @property
    def label(self) -> str:
        """Name and version, as `name@version`."""
        return f"{self.name}@{self.version}"


_BOTH_TEN, _BOTH_TWENTY = (-10.0, 10.0), (-20.0, 20.0)
# How advantages are whitened once they are: E[x^2] - E[x]^2, and a lone token over n.
_ONE_PASS = AdvantageSettings(whiten_one_pass=True, whiten_short="biased")
# Rewards and advantages are made of everything that was sampled before it is cut into steps: by a
# driver, by the trainer's workers before their steps, or (TRL) with each generation batch. AReaL
# and Relax may be handed their batches in parts, and prime-rl takes no statistics over a batch.
_BEFORE_STEPS = LayoutSettings(batch="rollout")
_EQUAL = 1e-6  # the deviation up to which a filter of groups, once it is on, takes rewards as equal
_HALF_SQUARE = ValueSettings(clip=0.5, factor=0.5, counted="loss")

_ALL = (
    Profile(
        "relax",
        "1",
        "Groups by group_index and refuses incomplete ones; sums of sample means per rank.",
        Settings(
            reward=RewardSettings(constant_within=_EQUAL),
            advantage=_ONE_PASS,
            loss=LossSettings(batch_reduction="mean", cispo_bounds="by-sign"),
        ),
    ),
    Profile(
        "slime",
        "1",
        "Groups by position; the deviation is that of the centred rewards, in float32.",
        Settings(
            reward=RewardSettings(grouping="stride", constant_within=_EQUAL),
            advantage=_ONE_PASS,
            loss=LossSettings(batch_reduction="mean"),
            layout=_BEFORE_STEPS,
        ),
    ),
    Profile(
        "verl",
        "1",
        "Dual clip at 3 is on; a lone sample keeps its reward; a mean over all tokens.",
        Settings(
            reward=RewardSettings(lone="keep", baseline_counts="trained"),
            kl=KlSettings(value_clamp=_BOTH_TEN, clamped="k3"),
            advantage=AdvantageSettings(masking="carry", returns="whitened"),
            loss=LossSettings(
                aggregation="token-mean",
                batch_reduction="mean",
                dual_clip=3.0,
                log_ratio_clamp=_BOTH_TWENTY,
                kl_loss_estimator="low_var_kl",
                kl_loss_clamped="k3",
                sapo_clipped="nothing",
                kl_cov_ppo_kl="absolute",
                metrics_aggregation="token-mean",
                denominator_rows="with-tokens",
                count_epsilon=1e-8,
            ),
            value=_HALF_SQUARE,
            layout=_BEFORE_STEPS,
        ),
    ),
    Profile(
        "trl",
        "1",
        "Groups by position, epsilon 1e-4; with vLLM (else loss.correction=none) samples beyond a "
        "ratio of 3 to the sampler are dropped.",
        Settings(
            reward=RewardSettings(
                grouping="stride", epsilon=1e-4, missing="exclude", batch_epsilon=1e-4
            ),
            loss=LossSettings(
                aggregation="token-mean",
                batch_reduction="mean",
                correction="sequence-mask",
                correction_bounds=(0.0, 3.0),
                entropy_aggregation="token-mean",
                entropy_mean_over="micro-batch",
                cispo_bounds="upper-absolute",
                kl_loss_estimator="k3",
                kl_loss_weighted=True,
                kl_loss_weight="ratio",
            ),
            value=ValueSettings(clip=0.2, factor=0.5, counted="loss"),
            layout=_BEFORE_STEPS,
        ),
    ),
    Profile(
        "nemo-rl",
        "1",
        "Leave-one-out baseline and leave-one-out deviation; KL in the loss, clamped twice.",
        Settings(
            reward=RewardSettings(
                baseline="leave-one-out",
                divisor="leave-one-out-std",
                batch_epsilon=0.0,
                overlong_counts="first-message",
            ),
            kl=KlSettings(estimator="k3", value_clamp=_BOTH_TEN, log_ratio_clamp=_BOTH_TWENTY),
            advantage=AdvantageSettings(masking="carry"),
            loss=LossSettings(
                aggregation="token-mean",
                batch_reduction="mean",
                kl_loss_coef=0.01,
                kl_loss_estimator="k3",
                kl_loss_clamp=_BOTH_TEN,
                kl_loss_log_ratio_clamp=_BOTH_TWENTY,
                undefined_weight=0.0,
                count_epsilon=1e-8,
            ),
            value=ValueSettings(clip=None, factor=0.5, counted="loss", counts="unshifted"),
            layout=_BEFORE_STEPS,
        ),
    ),
    Profile(
        "openrlhf",
        "1",
        "Epsilon 1e-9, rewards clipped after normalisation, KL inside the reward of each token.",
        Settings(
            reward=RewardSettings(
                grouping="stride",
                epsilon=1e-9,
                lone="nan",
                clip_after=_BOTH_TEN,
                overlong_floored=True,
            ),
            kl=KlSettings(coef=0.01, value_clamp=_BOTH_TEN),
            advantage=AdvantageSettings(
                estimator="reinforce++",
                masking="multiply",
                reward_at="last-unmasked",
                kl_in_reward=True,
                whiten_ddof=0,
                whiten_form="floored",
            ),
            loss=LossSettings(
                aggregation="token-mean",
                batch_reduction="mean",
                entropy_aggregation="token-mean",
                kl_loss_aggregation="token-mean",
                metrics_aggregation="token-mean",
                log_ratio_clamp=_BOTH_TWENTY,
                kl_loss_clamp=_BOTH_TEN,
                denominator_rows="with-tokens",
            ),
            value=_HALF_SQUARE,
            layout=_BEFORE_STEPS,
        ),
    ),
    Profile(
        "areal",
        "1",
        "Rewards clipped and not normalised; returns pass over masked tokens; KL in the reward.",
        Settings(
            reward=RewardSettings(
                grouping="none",
                clip_before=_BOTH_TWENTY,
                divisor="std-around-baseline",
                epsilon=1e-5,
                overlong_counts="trained",
            ),
            kl=KlSettings(coef=0.1, policy_source="rollout", value_clamp=_BOTH_TEN),
            advantage=AdvantageSettings(
                estimator="reinforce++",
                masking="carry",
                kl_in_reward=True,
                whiten_form="std",
                whiten_epsilon=1e-5,
                whiten_short="keep",
            ),
            loss=LossSettings(
                aggregation="token-mean", batch_reduction="mean", sapo_clipped="nothing"
            ),
            value=_HALF_SQUARE,
        ),
    ),
    Profile(
        "prime-rl",
        "1",
        "Rewards centred, never divided; tokens whose probability moved too far are masked.",
        Settings(
            reward=RewardSettings(divide_by_std=False),
            loss=LossSettings(
                aggregation="token-mean",
                batch_reduction="mean",
                surrogate="dppo",
                old_source="rollout",
                eps_clip=0.2,
            ),
        ),
    ),
)
PROFILES: Mapping[str, Profile] = {one.name: one for one in _ALL}


def profile(name: str) -> Profile:
    """Look a profile up by `name` or `name@version`.

    Raises:
        SchemaError: There is none.
    """
    plain, _, version = name.partition("@")
    found = PROFILES.get(plain)
    if found is None or version not in ("", found.version):
        known = ", ".join(one.label for one in _ALL)
        raise SchemaError(
            f"no profile {name!r}, expected one of {known}",
            hint="To list them: trajreplay profiles",
        )
    return found


def with_changes(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Settings with some fields changed, each named `section.field`.

    A field that is what another one made of it, such as an `eps_clip_high` that equals `eps_clip`,
    follows that where it is changed and the field itself is not named.

    Raises:
        SchemaError: There is no such section or field, or the value is of another kind.

    >>> with_changes(Settings(), {"reward.epsilon": 1e-4}).reward.epsilon
    0.0001
    """
    by_section: dict[str, dict[str, Any]] = {}
    for label, value in changes.items():
        section, _, name = label.partition(".")
        if section not in SECTIONS or name not in kinds(SECTIONS[section]):
            known = [f"{one}.{field}" for one, kind in SECTIONS.items() for field in kinds(kind)]
            raise SchemaError(f"no setting {label!r}, expected one of {', '.join(known)}")
        by_section.setdefault(section, {})[name] = value
    for section, values in by_section.items():
        held = getattr(settings, section)
        made = _MADE.get(section, {}).items()
        follows = (one for one, (source, of) in made if source in values and _is(held, one, of))
        by_section[section] = dict.fromkeys(follows) | values
    changed = {
        section: replace(getattr(settings, section), **values)
        for section, values in by_section.items()
    }
    return replace(settings, **changed)


# Fields that are made of another one where they are not stated: its name, and what of it.
_MADE: dict[str, dict[str, tuple[str, Callable[[Any], object]]]] = {
    "kl": {
        "value_clamp": (
            "estimator",
            lambda one: own_clamp(one.estimator) if one.clamped == "every" else one,
        )
    },
    "loss": {
        "eps_clip_high": ("eps_clip", lambda one: one.eps_clip),
        "kl_loss_clamp": (
            "kl_loss_estimator",
            lambda one: own_clamp(one.kl_loss_estimator) if one.kl_loss_clamped == "every" else one,
        ),
    },
}


def _is(section: Any, name: str, made: Callable[[Any], object]) -> bool:
    return bool(getattr(section, name) == made(section))


def differences(left: Settings, right: Settings) -> dict[str, tuple[Any, Any]]:
    """The fields in which two settings differ, each named `section.field`, with both values."""
    return {
        f"{section}.{name}": (mine, theirs)
        for section, kind in SECTIONS.items()
        for name in kinds(kind)
        if (mine := getattr(getattr(left, section), name))
        != (theirs := getattr(getattr(right, section), name))
    }
