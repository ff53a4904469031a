"""The bounds of a loss, moved by what rounding may move them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any

from trajreplay.schema import LossSettings, ValueSettings
from trajreplay.schema.settings.knobs import Interval

# Eight half units in the last place of float32: a difference, its exponential and the bound itself
# are each rounded once or twice.
SHARE = 2.0**-21


def moved_bounds(
    settings: LossSettings, share: float, against: float, *, longest: int = 1
) -> LossSettings:
    """The same loss with each bound a little wider.

        b -> b + share (1 + |b|)      of sums over n tokens b -> b + share sqrt(n) (1 + |b|)

    A trainer compares rounded numbers with rounded bounds, and may find a token inside that is
    outside by less than that. What the loss of its sample then differs by is no small rounding
    error where the bound is a jump: of a weight that becomes 0, or a count of clipped tokens.

    Args:
        settings: The loss.
        share: How far, negative for narrower bounds. Dimensionless.
        against: The same of the bounds of train against rollout, which decide the same tokens.
        longest: The most tokens that a sum in these bounds is over.

    >>> round(moved_bounds(LossSettings(eps_clip=0.25), 0.01, 0.0).eps_clip, 6)
    0.2625
    """
    changes: dict[str, Any] = {}
    for name, move in _MOVES.items():
        found = getattr(settings, name)
        if found is not None:
            summed = settings.correction.startswith("sequence") and name in _OF_WEIGHTS
            summed |= settings.correction_criterion.startswith("sum-") and name in _OF_WEIGHTS
            summed |= settings.ratio == "sequence-sum" and name in _OF_RATIOS
            mine = against if name in _AGAINST else share
            changes[name] = move(found, mine * max(longest, 1) ** 0.5 if summed else mine)
    changes["rejection"] = {
        name: _longer(found, against * (longest**0.5 if name.startswith("sum-") else 1.0))
        for name, found in settings.rejection.items()
    }
    return replace(settings, **changes)


def moved_value_bounds(settings: ValueSettings, share: float) -> ValueSettings:
    """The same value loss with its clip a little wider; arguments as of `moved_bounds`."""
    if settings.clip is None:
        return settings
    return replace(settings, clip=_wider(settings.clip, share))


def _wider(bound: float, share: float) -> float:
    return max(bound + share * (1.0 + abs(bound)), 0.0)


def _larger(bound: float, share: float) -> float:
    return bound * (1.0 + share)


def _dual(bound: float, share: float) -> float:
    return max(_larger(bound, share), 1.0 + SHARE) if bound > 1.0 else bound


def _longer(bounds: Interval, share: float) -> Interval:
    low, high = bounds
    # An infinite end has no last place: it stays, and the other one moves alone.
    low = low - share * (1.0 + abs(low)) if isfinite(low) else low
    high = high + share * (1.0 + abs(high)) if isfinite(high) else high
    return (low, high) if low <= high else bounds


_AGAINST = ("correction_bounds", "veto", "m2_threshold", "opsm_delta")
_OF_WEIGHTS = ("correction_bounds",)
_OF_RATIOS = ("eps_clip", "eps_clip_high", "dual_clip")
_MOVES: dict[str, Callable[[Any, float], Any]] = {
    "eps_clip": _wider,
    "eps_clip_high": _wider,
    "dual_clip": _dual,
    "dppo_ratio_cap": _larger,
    "sapo_tau_pos": _larger,
    "sapo_tau_neg": _larger,
    "m2po_kl2_budget": _larger,
    "m2po_least_low": _wider,
    "m2po_least_high": _wider,
    "correction_bounds": _longer,
    "veto": _larger,
    "m2_threshold": _larger,
    "opsm_delta": _wider,
}
