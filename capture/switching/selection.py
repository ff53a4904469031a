"""Which rollouts and steps are captured: numbers, ranges and every N-th."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from trajreplay.schema.errors import SchemaError, shown

_NUMBER = re.compile(r"\d{1,18}")
_ALL = "all"
_EVERY = "every:"


@dataclass(frozen=True)
class Selection:
    """The rollouts and steps to capture; where one of the two is not named, it follows the other.

    Args:
        steps: `ROLLOUT:STEP` with a number or a range in either place, or as of rollouts. Alone,
            it captures the rollouts too that those steps consume from, whichever they are; a
            process that takes no steps captures those of the same number.
        rollouts: Numbers, ranges such as `5-9`, `every:10`, or `all`; several with commas. Alone,
            it captures all steps of these rollouts.

    Attributes:
        is_everything: Whether it leaves nothing out, since none of the two is named.

    Raises:
        SchemaError: A text has another form.

    >>> chosen = Selection(steps="0:0, 3-5:1")
    >>> [chosen.wants_step(rollout, 1) for rollout in (0, 3, 6)], chosen.by_consumer
    ([False, True, False], True)
    """

    steps: str | None = None
    rollouts: str | None = None
    _steps: tuple[_Item, ...] = field(init=False, repr=False, compare=False)
    _rollouts: tuple[_Item, ...] = field(init=False, repr=False, compare=False)
    is_everything: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rollouts = None if self.rollouts is None else _items("rollouts", self.rollouts)
        if self.steps is not None or rollouts is None:
            steps = _items("steps", self.steps)
        else:
            steps = rollouts
        everything = steps if self.steps is None else ()
        object.__setattr__(self, "is_everything", self.steps is None and self.rollouts is None)
        object.__setattr__(self, "_steps", steps)
        object.__setattr__(self, "_rollouts", everything if rollouts is None else rollouts)

    @property
    def by_consumer(self) -> bool:
        """Whether a rollout is asked for once a chosen step is known to consume from it."""
        return self.steps is not None and self.rollouts is None

    def wants_rollout(self, rollout_id: int) -> bool:
        """Whether the captures of a rollout are asked for by its number."""
        return any(one.rollout(rollout_id) for one in self._rollouts)

    def wants_step_of(self, rollout_id: int) -> bool:
        """Whether any step is asked for that may be taken during this rollout's training."""
        return any(one.rollout(rollout_id) for one in self._steps)

    def wants_step(self, rollout_id: int, step_id: int) -> bool:
        """Whether the captures of an optimizer step are asked for."""
        return any(one.rollout(rollout_id) and one.step(step_id) for one in self._steps)


_Test = Callable[[int], bool]


@dataclass(frozen=True)
class _Item:
    rollout: _Test
    step: _Test


def _any(_: int) -> bool:
    return True


def _items(name: str, text: str | None) -> tuple[_Item, ...]:
    if text is None:
        return (_Item(_any, _any),)
    if not isinstance(text, str):
        raise _malformed(name, shown(text))
    return tuple(_item(name, part.strip()) for part in text.split(","))


def _item(name: str, text: str) -> _Item:
    if text.startswith(_EVERY):
        every = _number(name, text, text.removeprefix(_EVERY))
        if not every:
            raise _malformed(name, text)
        return _Item(lambda number: number % every == 0, _any)
    rollout, colon, step = text.partition(":")
    if colon and name == "rollouts":
        raise _malformed(name, text)
    return _Item(_range(name, text, rollout), _range(name, text, step) if colon else _any)


def _range(name: str, whole: str, text: str) -> _Test:
    if text == _ALL:
        return _any
    first, dash, last = text.partition("-")
    low = _number(name, whole, first)
    high = _number(name, whole, last) if dash else low
    if high < low:
        raise _malformed(name, whole)
    return lambda number: low <= number <= high


def _number(name: str, whole: str, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise _malformed(name, whole)
    return int(text)


def _malformed(name: str, text: str) -> SchemaError:
    forms = "3, 3-5, every:10 or all"
    return SchemaError(
        f"the {name} to capture are {text!r}, expected {forms}"
        + (", or with a step 3:0, 3-5:0" if name == "steps" else ""),
        hint="Separate several with commas.",
        selection=text,
    )
