"""What a recorder takes of the losses of a micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trajreplay.capture.declared import whole
from trajreplay.capture.guarded import Guarded, Level, guarded
from trajreplay.capture.taking.heartbeat import Beat
from trajreplay.capture.taking.pending import Pending
from trajreplay.schema.errors import CaptureError, bare, listed

if TYPE_CHECKING:
    from trajreplay.schema import SampleRecord


class Losses(Guarded):
    """The losses of a recorder that records; see `Recorder`."""

    _beat: Beat | None
    _gradients: bool

    def _recording(self, level: Level) -> Pending | None:
        """The open capture; None where it is not selected, or is given up already."""
        raise NotImplementedError

    @guarded
    def record_policy_loss(
        self,
        micro_batch: int | None,
        samples: Sequence[SampleRecord],
        scalars: Mapping[str, Any] | None = None,
        log_probs: Any = None,
        old_log_probs: Any = None,
        advantages: Any = None,
        ref_log_probs: Any = None,
        reduction: str = "mean",
        scale: float = 1.0,
        denominator: float | None = None,
        origins: Mapping[str, Mapping[str, Any]] | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """As of `Recorder`."""
        given: dict[str, Any] = {}
        if log_probs is not None:
            given["log_probs"] = log_probs
        if old_log_probs is not None:
            given["old_log_probs"] = old_log_probs
        if advantages is not None:
            given["advantages"] = advantages
        if ref_log_probs is not None:
            given["ref_log_probs"] = ref_log_probs
        meaning = _meaning(reduction, scale, denominator)
        given = _together(given, columns)
        self._micro_batch("loss.policy", micro_batch, samples, scalars, meaning, given, origins)

    @guarded
    def record_value_loss(
        self,
        micro_batch: int | None,
        samples: Sequence[SampleRecord],
        scalars: Mapping[str, Any] | None = None,
        values: Any = None,
        returns: Any = None,
        old_values: Any = None,
        reduction: str = "mean",
        scale: float = 1.0,
        denominator: float | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """As of `Recorder`."""
        named = {"values": values, "returns": returns, "old_values": old_values}
        meaning = _meaning(reduction, scale, denominator)
        given = _together({name: one for name, one in named.items() if one is not None}, columns)
        self._micro_batch("loss.value", micro_batch, samples, scalars, meaning, given, None)

    def _micro_batch(
        self,
        stage: str,
        micro_batch: int | None,
        samples: Sequence[SampleRecord],
        scalars: Mapping[str, Any] | None,
        meaning: Mapping[str, Any],
        columns: Mapping[str, Any],
        origins: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        if type(micro_batch) is not int and micro_batch is not None:
            micro_batch = self._number(micro_batch, stage, samples)
        if self._beat is not None and stage == "loss.policy":
            self._beat.micro_batch(micro_batch, samples, scalars or {})
        if (pending := self._recording("step")) is not None:
            pending.micro_batch(micro_batch, stage, samples, columns, origins, scalars, meaning)
            if self._gradients and stage == "loss.policy" and micro_batch is not None:
                failed = functools.partial(self.failed, "gradients")
                pending.watch(micro_batch, columns.get("log_probs"), failed)

    def _number(self, micro_batch: Any, stage: str, samples: Sequence[SampleRecord]) -> int:
        """The number of a micro-batch, which may be one of numpy or torch."""
        try:
            return whole("micro_batch", micro_batch)
        except CaptureError:
            if self._beat is not None and stage == "loss.policy":
                self._beat.micro_batch(None, samples, {})  # so that the step has no loss
            raise


def _meaning(reduction: str, scale: float, denominator: float | None) -> dict[str, Any]:
    return {
        "scope": "micro_batch",
        "reduction": reduction,
        "scale": scale,
        "denominator": denominator,
    }


def _together(named: dict[str, Any], columns: Mapping[str, Any] | None) -> dict[str, Any]:
    """The columns of a loss, each told once."""
    if not columns:
        return named
    if not named.keys().isdisjoint(columns):
        twice = [name for name in columns if name in named]
        raise CaptureError(
            f"{listed(map(bare, twice), 3)} is given by name and among the columns, expected once",
            hint="Leave it out of columns.",
        )
    return {**named, **columns}
