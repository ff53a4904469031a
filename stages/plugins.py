"""Functions of users: kernels and reward functions, found by entry point or by module."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from trajreplay.schema.errors import StageError

KERNELS, REWARDS = "trajreplay.kernels", "trajreplay.rewards"


class RewardFunction(Protocol):
    """Scores one sample: the same number for the same sample, every time.

    Its argument maps `sample_id`, `prompt`, `response`, `label`, `tool_output`, `tokens`,
    `response_length` and `loss_mask` to what was captured of one sample. Reading what was not
    captured raises a KeyError and leaves the stage unverified.
    """

    def __call__(self, sample: Mapping[str, Any], /) -> float:
        """Score a sample."""
        ...


@dataclass(frozen=True)
class Plugin:
    """A function of a user.

    Args:
        name: How it was asked for.
        origin: Where it is from: `module:function`, and for an entry point its distribution.
        function: The function.
    """

    name: str
    origin: str
    function: Callable[..., Any]


def find_plugin(group: str, name: str) -> Plugin:
    """Load the function of an entry point.

    Raises:
        StageError: There is none of that name, or several, or it is no function.
    """
    found = sorted(entry_points(group=group, name=name), key=_origin)
    where = f"entry point {name!r} of the group {group}"
    distinct = {one.value for one in found}
    if not found:
        others = ", ".join(sorted(set(entry_points(group=group).names))) or "none"
        message = f"the {where} is not installed; installed are: {others}"
        raise StageError(message, hint="Install the package that has it.")
    if len(distinct) > 1:
        several = " and ".join(map(_origin, found))
        message = f"the {where} is there {len(found)} times: {several}"
        raise StageError(message, hint="Uninstall all but one of the packages.")
    with _loading(f"the {where}, {_origin(found[0])},"):
        function = found[0].load()
    return Plugin(name, _origin(found[0]), _callable(function, f"the {where}"))


def load_reward(name: str) -> Plugin:
    """Load a reward function.

    Args:
        name: `module:function`, or an entry point of the group `trajreplay.rewards`.

    Raises:
        StageError: There is no such function, or its module cannot be imported.

    >>> load_reward("math:sqrt").function(4.0)
    2.0
    """
    module_name, colon, dotted = name.partition(":")
    if not colon:
        return find_plugin(REWARDS, name)
    if not module_name or not dotted:
        raise StageError(f"the reward function is {name!r}, expected module:function")
    with _loading(f"the module {module_name!r}"):
        module = importlib.import_module(module_name)
    try:
        function = reduce(getattr, dotted.split("."), module)
    except AttributeError as error:
        public = [one for one, value in vars(module).items() if inspect.isfunction(value)]
        message = f"the module {module_name!r} has no {dotted!r}; its functions are: "
        raise StageError(message + (", ".join(public) or "none")) from error
    return Plugin(name, name, _callable(function, f"{name!r}"))


def as_reward(reward: RewardFunction | str | None) -> Plugin | None:
    """A reward function however it was given.

    Raises:
        StageError: It is a name, and there is no such function; or it cannot be called.
    """
    if reward is None:
        return None
    if isinstance(reward, str):
        return load_reward(reward)
    name = getattr(reward, "__qualname__", type(reward).__qualname__)
    origin = f"{getattr(reward, '__module__', None) or '?'}:{name}"
    return Plugin(name, origin, _callable(reward, f"the reward function {reward!r}"))


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Run a user's code: what it raises becomes a StageError, what it prints goes to stderr.

    The stdout of a replay is its result and nothing else.

    Raises:
        StageError: It raised, or wanted the program to end.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raised = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise StageError(f"{what} raised {raised}") from error


@contextmanager
def _loading(what: str) -> Iterator[None]:
    try:
        with guarded(what):
            yield
    except StageError as error:
        _, _, raised = error.message.rpartition(f"{what} raised ")
        message = f"{what} cannot be imported: {raised}"
        raise StageError(message, hint="Is the package installed in this environment?") from error


def _origin(point: EntryPoint) -> str:
    dist = point.dist
    return point.value if dist is None else f"{point.value} of {dist.name} {dist.version}"


def _callable(function: object, what: str) -> Callable[..., Any]:
    if not callable(function):
        raise StageError(f"{what} is a {type(function).__name__}, expected a function")
    return function
