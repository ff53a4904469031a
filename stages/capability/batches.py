"""Which statistics are of a whole batch: of more samples than a group or micro-batch has."""

from __future__ import annotations

from trajreplay.schema.settings import RewardSettings, Settings
from trajreplay.stages.capability.ability import Ability


def over_batches(stage: str, settings: Settings, ability: Ability) -> str:
    """The setting by which all samples of a batch enter a stage; empty if none does.

    Args:
        stage: The stage.
        settings: The arithmetic in force.
        ability: What it needs; a kernel of the user may take any sample into account.

    >>> from trajreplay.schema.settings import AdvantageSettings
    >>> white = Settings(advantage=AdvantageSettings(whiten="cohort"))
    >>> over_batches("advantage.estimate", white, Ability("recompute"))
    "advantage.whiten is 'cohort'"
    """
    if ability.kernel is not None:
        scores = stage in ("reward.post_process", "advantage.estimate")
        return f"the {ability.kernel.what} is given all samples" if scores else ""
    if stage == "reward.post_process":
        return _of_rewards(settings.reward)
    if stage == "advantage.estimate":
        return _of_advantages(settings)
    return _of_weights(settings) if stage == "loss.policy" else ""


def _of_rewards(reward: RewardSettings) -> str:
    if reward.grouping == "none":
        return ""
    divides = reward.divide_by_std and reward.rule == "normalise" and reward.divisor != "baseline"
    for name, found, by_batch in (
        ("grouping", reward.grouping, "batch"),
        ("std_grouping", reward.std_grouping if divides else "", "batch"),
        ("rescale", reward.rescale, "batch"),
        ("rule", reward.rule, "gpg"),
    ):
        if found == by_batch:
            return f"reward.{name} is {found!r}"
    if reward.combination == "normalise-then-sum" and reward.batch_epsilon is not None:
        return "reward.combination is 'normalise-then-sum'"
    return ""


def _of_advantages(settings: Settings) -> str:
    advantage = settings.advantage
    for name in ("whiten", "whiten_centre") if advantage.whiten != "none" else ():
        if (found := getattr(advantage, name)) in ("cohort", "rank", "context-rank"):
            return f"advantage.{name} is {found!r}"
    by_weights = advantage.estimator == "otb" and advantage.otb_weights == "correction"
    return _of_weights(settings) if by_weights else ""


def _of_weights(settings: Settings) -> str:
    loss = settings.loss
    normed = loss.correction != "none" and loss.correction_norm != "none"
    over_all = normed and loss.correction_norm_over == "cohort"
    return "loss.correction_norm_over is 'cohort'" if over_all else ""


def over_trajectories(stage: str, settings: Settings) -> str:
    """The setting by which all fragments of a trajectory enter a stage; empty if none does."""
    if stage == "reward.post_process" and settings.reward.unit != "sample":
        return f"reward.unit is {settings.reward.unit!r}"
    if stage.startswith("loss.") and settings.loss.fragments == "shared":
        return "loss.fragments are 'shared'"
    return ""
