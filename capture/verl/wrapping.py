"""verl's registered functions, each with a recorder beside it; what they return is unchanged."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from trajreplay.capture.background import warn
from trajreplay.capture.reasons import reason_of
from trajreplay.capture.switches import Switches
from trajreplay.capture.verl.advantages import Driver
from trajreplay.capture.verl.losses import Actor

_Function = Callable[..., Any]
# Estimators that verl's trainer calls by their own names, and not by that in the registry.
_BY_NAME = {"gae": "compute_gae_advantage_return", "grpo": "compute_grpo_outcome_advantage"}
_ORIGINAL = "_trajreplay_original"


def install(switches: Switches) -> None:
    """Wrap what verl has registered: its policy losses and its advantage estimators.

    Nothing is recorded before they are called: the process that computes losses then is an actor,
    the one that estimates advantages the driver.

    Args:
        switches: What to capture.

    Raises:
        ImportError: verl is not there.
    """
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    actor, driver = Actor(switches), Driver(switches)
    for name, function in list(core.POLICY_LOSS_REGISTRY.items()):
        core.POLICY_LOSS_REGISTRY[name] = _beside(function, name, actor)
    for name, function in list(core.ADV_ESTIMATOR_REGISTRY.items()):
        core.ADV_ESTIMATOR_REGISTRY[name] = _beside(function, name, driver)
    for name, attribute in _BY_NAME.items():
        setattr(core, attribute, _beside(getattr(core, attribute), name, driver))


def uninstall() -> None:
    """Give verl its own functions back, and end what was recorded of them."""
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    observers = []
    for registry in (core.POLICY_LOSS_REGISTRY, core.ADV_ESTIMATOR_REGISTRY):
        for name, function in registry.items():
            if found := getattr(function, _ORIGINAL, None):
                registry[name], observer = found
                observers.append(observer)
    for attribute in _BY_NAME.values():
        if found := getattr(getattr(core, attribute), _ORIGINAL, None):
            setattr(core, attribute, found[0])
    for observer in dict.fromkeys(observers):
        observer.close()


def _beside(function: _Function, name: str, observer: Actor | Driver) -> _Function:
    """The function, seen by an observer that can neither change what it returns nor fail it."""
    if hasattr(function, _ORIGINAL):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        seen = _quietly(observer, observer.before, name, function, args, kwargs)
        result = function(*args, **kwargs)
        if seen is not None:
            _quietly(observer, observer.after, name, seen, result)
        return result

    setattr(call, _ORIGINAL, (function, observer))
    return call


def _quietly(observer: Actor | Driver, work: _Function, *args: Any) -> Any:
    try:
        return work(*args)
    except Exception as error:  # a training never fails for what looks at it
        if observer.switches.strict:
            raise
        key = (work.__qualname__, type(error))
        if key not in _warned:
            _warned.add(key)
            warn(f"verl: {work.__qualname__}: {reason_of(error)}")
        return None


_warned: set[Any] = set()
