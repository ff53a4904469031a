"""What the V2 matrix says of rejection: what contradicts itself, and who goes by what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, isnan

from trajreplay.schema.settings import CRITERIA, LossSettings, Settings


def rejects(loss: LossSettings) -> bool:
    """Whether tokens drop out for how far trainer and sampler disagree about them."""
    return bool(loss.rejection) or loss.veto is not None or loss.m2_threshold is not None


def rejection_contradictions(loss: LossSettings) -> Iterator[str]:
    """Why a loss cannot reject as stated."""
    for name, bounds in loss.rejection.items():
        if any(map(isnan, bounds)) or not any(map(isfinite, bounds)):
            yield f"loss.rejection bounds {name} by {bounds}, expected at least one end"
    if not loss.rejection and (loss.rejection_reverse or loss.rejection_log_clamp is not None):
        yield "loss.rejection_reverse or loss.rejection_log_clamp is stated and loss.rejection not"
    for name in ("veto", "m2_threshold"):
        found = getattr(loss, name)
        if found is not None and found <= 0:
            yield f"loss.{name} is {found:g}, expected more than 0"
    if loss.rejection_denominator == "kept" and not rejects(loss):
        yield "loss.rejection_denominator is 'kept' and nothing rejects"
    if loss.denominator_rows == "kept" and loss.rejection_denominator != "kept":
        yield "loss.denominator_rows are 'kept' and loss.rejection_denominator is 'original'"


def rejected(what: str, settings: Settings) -> Iterator[str]:
    """Why something cannot be of the tokens that a loss keeps.

    Args:
        what: The setting that says so.
        settings: The arithmetic in force.
    """
    loss = settings.loss
    if not rejects(loss):
        yield f"{what} are 'kept' and the loss rejects nothing"
    elif loss.rejection_denominator != "kept":
        yield f"{what} are 'kept' and loss.rejection_denominator is 'original'"
    if loss.proximal != "recorded":
        yield f"{what} are 'kept' and loss.proximal is not 'recorded'"
    unknown = [one for one in loss.rejection if one not in CRITERIA]
    yield from (f"{what} are 'kept' and loss.rejection names {one!r}" for one in unknown)
    yield from rejection_contradictions(loss)
