"""verl's registered functions, each with a recorder beside it; what they return is unchanged."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from trajreplay.capture.reasons import reason_of, warn
from trajreplay.capture.switching.switches import Switches
from trajreplay.capture.verl.advantages import Driver
from trajreplay.capture.verl.critic import Critic
from trajreplay.capture.verl.losses import Actor

_Function = Callable[..., Any]
_Observer = Actor | Critic | Driver
_CORE = "verl.trainer.ppo.core_algos"
_LOSSES = "verl.workers.utils.losses"  # which looks up what it calls, by these names, in itself
_WHOLE, _VALUE, _PENALTY, _AGGREGATE = "ppo_loss", "compute_value_loss", "kl_penalty", "agg_loss"
_WORKERS = "verl.workers.engine_workers"  # which may have taken the whole loss by its name
# Estimators that verl's trainer calls by their own names, and not by that in the registry.
_BY_NAME = {"gae": "compute_gae_advantage_return", "grpo": "compute_grpo_outcome_advantage"}
_ORIGINAL = "_trajreplay_original"


def install(switches: Switches) -> None:
    """Wrap what verl has registered, and what it adds to a policy loss, and its value loss.

    Nothing is recorded before they are called: the process that computes losses then is an actor
    or a critic, the one that estimates advantages the driver.

    Args:
        switches: What to capture.

    Raises:
        ImportError: verl is not there.
    """
    core = importlib.import_module(_CORE)
    actor, driver = Actor(switches), Driver(switches)
    for name, function in list(core.POLICY_LOSS_REGISTRY.items()):
        core.POLICY_LOSS_REGISTRY[name] = _beside(function, name, actor)
    for name, function in list(core.ADV_ESTIMATOR_REGISTRY.items()):
        core.ADV_ESTIMATOR_REGISTRY[name] = _beside(function, name, driver)
    for name, attribute in _BY_NAME.items():
        setattr(core, attribute, _beside(getattr(core, attribute), name, driver))
    losses = importlib.import_module(_LOSSES)
    for name, made in (
        (_WHOLE, _whole(getattr(losses, _WHOLE), actor)),
        (_PENALTY, _then(getattr(losses, _PENALTY), actor, _penalised)),
        (_AGGREGATE, _then(getattr(losses, _AGGREGATE), actor, _aggregated)),
        (_VALUE, _beside(getattr(losses, _VALUE), _VALUE, Critic(switches))),
    ):
        for module in _holding(name):
            setattr(module, name, made)


def _holding(name: str) -> list[Any]:
    """The modules whose attribute of this name verl calls."""
    found = [sys.modules.get(_LOSSES), sys.modules.get(_WORKERS) if name == _WHOLE else None]
    return [one for one in found if hasattr(one, name)]


def uninstall() -> None:
    """Give verl its own functions back, and end what was recorded of them."""
    core = importlib.import_module(_CORE)
    observers = []
    for name in (_WHOLE, _PENALTY, _AGGREGATE, _VALUE):
        for module in _holding(name):
            if found := getattr(getattr(module, name), _ORIGINAL, None):
                setattr(module, name, found[0])
                observers.append(found[1])
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


def _whole(function: _Function, actor: Actor) -> _Function:
    """The whole loss of a micro-batch, whose parts the actor puts together."""
    if hasattr(function, _ORIGINAL):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        actor.enter()
        result = None
        try:
            result = function(*args, **kwargs)
        finally:
            _quietly(actor, actor.leave, result)
        return result

    setattr(call, _ORIGINAL, (function, actor))
    return call


def _then(
    function: _Function, actor: Actor, tell: Callable[[Actor, Mapping[str, Any], Any], None]
) -> _Function:
    """A function that an actor is told of once it returned."""
    if hasattr(function, _ORIGINAL):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        _quietly(actor, lambda: tell(actor, signature.bind(*args, **kwargs).arguments, result))
        return result

    signature = inspect.signature(function)
    setattr(call, _ORIGINAL, (function, actor))
    return call


def _penalised(actor: Actor, given: Mapping[str, Any], result: Any) -> None:
    actor.penalised(given["ref_logprob"], given["kl_penalty"], result)


def _aggregated(actor: Actor, given: Mapping[str, Any], result: Any) -> None:
    actor.aggregated(given["loss_mat"], result)


def _beside(function: _Function, name: str, observer: _Observer) -> _Function:
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


def _quietly(observer: _Observer, work: _Function, *args: Any) -> Any:
    try:
        return work(*args)
    except Exception as error:  # a training never fails for what looks at it
        observer.failed(error)
        if observer.switches.strict:
            raise
        key = (work.__qualname__, type(error))
        if key not in _warned:
            _warned.add(key)
            warn(f"verl: {work.__qualname__}: {reason_of(error)}")
        return None


_warned: set[Any] = set()
