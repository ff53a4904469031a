"""Kernels of users: the function that each stage takes, and one of them called and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.schema.settings import Settings
from trajreplay.stages.plugins import KERNELS, Plugin, find_plugin, guarded


class Kernel(Protocol):
    """What every kernel of a user keeps to; `LossKernel` and the others say what each stage gives.

    A pure function of tensors, registered as the entry point `STAGE` or `STAGE:NAME` of the group
    `trajreplay.kernels`. It gets all samples of one cohort, those of all ranks, in order of rank
    and row, and the whole `Settings` of the capture. S is samples, N their response tokens. It is
    called with float64 tensors for the verdict, and where values lie outside the tolerance with
    float32 ones to see how far rounding may go; its results have the dtype and the device of its
    inputs. Inputs are copies.
    """

    def __call__(self, settings: Settings, /, *inputs: Any) -> Any:
        """Recompute what the stage writes."""
        ...


class LossKernel(Protocol):
    """The terms of loss.policy or loss.value at each token.

    `columns` holds, (N,) each, the captured ones of log_probs, old_log_probs, rollout_log_probs,
    ref_log_probs, entropy and advantages, or of values, old_values and returns; `mask` is (N,)
    bool, `offsets` (S+1,) int64. Each term, (N,), has the name of the scalar that it is summed up
    into. `pg_loss` or `value_loss` has to be there. `loss` is made of pg_loss, entropy_loss and
    kl_loss with their coefficients, unless it is a term of its own.
    """

    def __call__(
        self, settings: Settings, columns: Mapping[str, Tensor], mask: Tensor, offsets: Tensor, /
    ) -> Mapping[str, Tensor]:
        """Recompute the terms."""
        ...


class RewardKernel(Protocol):
    """Processed rewards, (S,), of reward.post_process.

    From raw rewards (S,), the samples' groups as the settings say (S,) int64, and their response
    lengths (S,) int64.
    """

    def __call__(
        self, settings: Settings, raw: Tensor, groups: Tensor, lengths: Tensor, /
    ) -> Tensor:
        """Recompute processed rewards."""
        ...


class KlKernel(Protocol):
    """The KL, (N,), of advantage.kl, from log-probabilities of policy and reference, (N,) each."""

    def __call__(self, settings: Settings, policy: Tensor, reference: Tensor, /) -> Tensor:
        """Recompute the KL."""
        ...


class AdvantageKernel(Protocol):
    """Advantages, (N,), of advantage.estimate, or a pair of advantages and returns.

    One tensor stands for both. From processed rewards (S,), mask (N,) bool, offsets (S+1,) int64,
    and KL and the critic's values, (N,) each, or None where they were not captured.
    """

    def __call__(
        self,
        settings: Settings,
        reward: Tensor,
        mask: Tensor,
        offsets: Tensor,
        kl: Tensor | None,
        values: Tensor | None,
        /,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Recompute advantages, and returns if they are others."""
        ...


_MAIN_TERM = {"loss.policy": "pg_loss", "loss.value": "value_loss"}


class UserKernel:
    """A kernel of a user, called on copies; what it returns is checked.

    Args:
        stage: The stage that it recomputes.
        plugin: The function.
    """

    def __init__(self, stage: str, plugin: Plugin) -> None:
        self.stage = stage
        self.what = f"kernel {plugin.name} ({plugin.origin})"
        self._function = plugin.function

    def losses(
        self, settings: Settings, columns: Mapping[str, Tensor], mask: Tensor, offsets: Tensor
    ) -> dict[str, Tensor]:
        """The terms at each token.

        Raises:
            StageError: The kernel raised, or its terms are not what the stage needs.
        """
        like = next(iter(columns.values()))
        found = self._call(settings, columns, mask, offsets)
        if not isinstance(found, Mapping) or not all(isinstance(one, str) for one in found):
            raise self._wrong(f"gives {_described(found)}", "a mapping from scalars to tensors")
        terms = {name: self._checked(name, one, like) for name, one in found.items()}
        self._check_terms(settings, terms)
        return terms

    def _check_terms(self, settings: Settings, terms: Mapping[str, Tensor]) -> None:
        main = _MAIN_TERM[self.stage]
        given = f"gives {', '.join(terms) or 'no term'}"
        if main not in terms:
            raise self._wrong(given, f"{main} among them")
        if self.stage != "loss.policy" or "loss" in terms:
            return
        for name, field in (("entropy_loss", "entropy_coef"), ("kl_loss", "kl_loss_coef")):
            coef = getattr(settings.loss, field)
            if coef and name not in terms:
                raise self._wrong(given, f"{name} too, or loss itself, since {field} is {coef}")

    def rewards(self, settings: Settings, raw: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        """(S,) Processed rewards.

        Raises:
            StageError: The kernel raised, or gives something else.
        """
        return self._checked("reward", self._call(settings, raw, groups, lengths), raw)

    def kl(self, settings: Settings, policy: Tensor, reference: Tensor) -> Tensor:
        """(N,) The KL at each token.

        Raises:
            StageError: The kernel raised, or gives something else.
        """
        return self._checked("kl", self._call(settings, policy, reference), policy)

    def advantages(
        self,
        settings: Settings,
        reward: Tensor,
        mask: Tensor,
        offsets: Tensor,
        kl: Tensor | None,
        values: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(N,) each. Advantages and returns.

        Raises:
            StageError: The kernel raised, or gives something else.
        """
        found = self._call(settings, reward, mask, offsets, kl, values)
        both = found if isinstance(found, tuple) else (found, found)
        if len(both) != 2:
            raise self._wrong(f"gives {len(both)} values", "advantages, or a pair with returns")
        like = torch.empty(len(mask), dtype=reward.dtype, device=reward.device)
        return self._checked("advantages", both[0], like), self._checked("returns", both[1], like)

    def _call(self, settings: Settings, *inputs: Any) -> Any:
        copies = [_copy(one) for one in inputs]
        with guarded(f"{self.stage}: the {self.what}"):
            return self._function(settings, *copies)

    def _checked(self, name: str, value: object, like: Tensor) -> Tensor:
        """A result, if it is a plain tensor such as `like`."""
        if isinstance(value, Tensor) and value.layout == torch.strided:
            alike = (value.shape, value.dtype, value.device) == (
                like.shape,
                like.dtype,
                like.device,
            )
            if alike:
                return value.detach()
        raise self._wrong(f"gives for {name} {_described(value)}", f"{_described(like)}")

    def _wrong(self, found: str, expected: str) -> StageError:
        message = f"{self.stage}: the {self.what} {found}, expected {expected}"
        return StageError(message, hint="trajreplay.stages.Kernel says what a kernel returns.")


def find_kernel(stage: str, name: str) -> UserKernel:
    """Load the kernel of a stage by its entry point.

    Raises:
        StageError: It is not installed or cannot be loaded.
    """
    return UserKernel(stage, find_plugin(KERNELS, name))


def _copy(value: Any) -> Any:
    """What a kernel may change without changing what others read."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {name: one.clone() for name, one in value.items()}
    return value


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} of shape {tuple(value.shape)} on {value.device}"
