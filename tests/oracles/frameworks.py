"""verl and TRL on a CPU: their functions, their settings, and the names that they register."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

HOW_TO_GET = "make install-oracles installs what tests/oracles/requirements.txt names"


@dataclass(frozen=True)
class Verl:
    """verl's algorithms, its correction for the rollout, and two of its configurations."""

    core: Any
    correction: Any
    algorithm: Any
    actor: Any

    def actor_config(self, *, policy_loss: dict[str, Any] | None = None, **settings: Any) -> Any:
        """Configure an actor; what is not given keeps verl's default."""
        losses = importlib.import_module("verl.workers.config").PolicyLossConfig
        return self.actor(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            policy_loss=losses(**(policy_loss or {})),
            **settings,
        )


@dataclass(frozen=True)
class Trl:
    """TRL's trainers, whose losses run on a stand-in for the trainer, and the GRPO settings."""

    grpo: Any
    gmpo: Any
    rloo: Any
    config: Any


def load_verl() -> Verl:
    """Import verl without its start-up code, which loads Ray for the sake of distribution."""
    spec = importlib.util.find_spec("verl") if "verl" not in sys.modules else None
    if spec is not None:
        package = ModuleType("verl")
        package.__path__ = list(spec.submodule_search_locations or ())
        sys.modules["verl"] = package
    if importlib.util.find_spec("ray") is None:
        ray = ModuleType("ray")
        vars(ray)["ObjectRef"] = object  # named in annotations only
        sys.modules["ray"] = ray
    core = imported("verl.trainer.ppo.core_algos")
    return Verl(
        core,
        imported("verl.trainer.ppo.rollout_corr_helper"),
        imported("verl.trainer.config").AlgoConfig,
        imported("verl.workers.config").ActorConfig,
    )


def load_trl() -> Trl:
    """Import the trainers of TRL."""
    return Trl(
        imported("trl.trainer.grpo_trainer").GRPOTrainer,
        imported("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer,
        imported("trl.trainer.rloo_trainer").RLOOTrainer,
        imported("trl.trainer.grpo_config").GRPOConfig,
    )


def compared_strings(function: Callable[..., Any], expression: str) -> set[str]:
    """List the strings that a function compares an expression with: a registry made of branches.

    >>> def demo(mode):
    ...     return mode == "a" or mode in ["b", "c"] or mode != "d"
    >>> sorted(compared_strings(demo, "mode"))
    ['a', 'b', 'c', 'd']
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == expression:
            constants = [one for side in node.comparators for one in ast.walk(side)]
            found |= {
                one.value
                for one in constants
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
    return found


def imported(module: str) -> Any:
    """Import a module of a framework, or skip and say how to get it.

    In CI, which runs these tests only where the frameworks were installed, and wherever it is
    installed, one that cannot be imported is a failure: nothing at all was compared with it.
    """
    root = module.partition(".")[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        if os.environ.get("CI") or _is_installed(root):
            raise
        pytest.skip(f"{root} cannot be imported ({error}): {HOW_TO_GET}")


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
