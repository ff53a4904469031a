"""Trying faults: what one raises, of an installed package above all, is said and ends no search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from trajreplay.schema.errors import SchemaError, StageError, TrajReplayError
from trajreplay.schema.tables import STEPS
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.sparing import Hopeless, Values
from trajreplay.stages.counterfactuals.values import recompute
from trajreplay.stages.counterfactuals.variants import Variant, varied
from trajreplay.stages.faults import Fault, Told
from trajreplay.stages.faults.fault import Handed
from trajreplay.stages.plugins import guarded

_Of = TypeVar("_Of")
_HELD = (2, 3)  # values and words, and how many numbers were read off where some were


def told_of(fault: Fault, block: Block, failed: list[str]) -> Iterator[Told]:
    """The ways in which a fault can have happened to a cohort, as far as it can say them.

    Args:
        fault: The fault.
        block: The cohort.
        failed: Gets what it raises, or gives instead.
    """
    assert fault.tries is not None
    for told in _given(fault, fault.tries, block, failed):
        known = isinstance(told, Told) and isinstance(told.variant, Variant)
        if not known or not isinstance(told.detail, str):
            _note(failed, f"{_whose([fault])} gives a {type(told).__name__}, expected Told")
            return
        yield told


def handed_by(fault: Fault, given: Handed, failed: list[str]) -> Iterator[tuple[Tensor, str, int]]:
    """What a fault makes of a column that is handed over, as far as it can say.

    Each with words, and with how many numbers of it were read off what was recorded.

    Args:
        fault: The fault.
        given: Both sides of the column.
        failed: Gets what it raises, or gives instead.
    """
    assert fault.hands is not None
    for made in _given(fault, fault.hands, given, failed):
        held = made if isinstance(made, tuple) and len(made) in _HELD else (None, None)
        values, detail, taken = (*held, 0)[:3]
        known = isinstance(values, Tensor) and isinstance(detail, str) and isinstance(taken, int)
        if not known:
            said = f"{_whose([fault])} gives a {type(made).__name__}, expected values and words"
            _note(failed, said)
            return
        if values.data_ptr() == given.recorded.data_ptr() and len(values):
            _note(failed, f"{_whose([fault])} gives what was recorded, which equals itself")
            return
        yield values, detail, taken


def tried(
    block: Block,
    stage: str,
    told: Sequence[tuple[Fault, Told]],
    failed: list[str],
    hopeless: Hopeless,
) -> list[Values] | None:
    """What a stage would be under some faults at once.

    Args:
        block: The cohort.
        stage: The stage.
        told: The faults, and how each changes it.
        failed: Gets what they raise.
        hopeless: Which fields need no bounds, since these save them not.

    Returns:
        None where these settings do not allow it, where it needs a column that the stage does not
        read, and where a fault fails.
    """
    faults = [fault for fault, _ in told]
    found: list[Values] | None = None
    with _noted(faults, failed):
        try:
            found = recompute(varied(block, joined(told), (stage,)), stage, hopeless=hopeless)
        except (TrajReplayError, KeyError) as error:
            known = error.args[0] in STEPS if isinstance(error, KeyError) else True
            mistaken = isinstance(error, SchemaError) or not known
            if mistaken and any(one.origin for one in faults):
                raise
            return None
    return found


def joined(told: Sequence[tuple[Fault, Told]]) -> Variant:
    """All that some faults change."""
    variant = told[0][1].variant
    for _, second in told[1:]:
        variant = variant.with_(second.variant)
    return variant


def _given(
    fault: Fault, call: Callable[[_Of], Iterable[object]], what: _Of, failed: list[str]
) -> Iterator[Any]:
    """What a fault gives, one after the other, until it ends or fails."""
    found: Iterator[object] = iter(())
    with _noted([fault], failed):
        found = iter(call(what))
    ended = object()
    while True:
        one: object = ended
        with _noted([fault], failed):
            one = next(found, ended)
        if one is ended:
            return
        yield one


@contextmanager
def _noted(faults: list[Fault], failed: list[str]) -> Iterator[None]:
    try:
        with guarded(_whose(faults)):
            yield
    except StageError as error:
        _note(failed, error.message)


def _whose(faults: list[Fault]) -> str:
    """Faults and the packages that they are from."""
    names = [f"{one.id} ({one.origin})" if one.origin else one.id for one in faults]
    return f"the fault {' with '.join(names)}"


def _note(failed: list[str], said: str) -> None:
    if said not in failed:
        failed.append(said)
