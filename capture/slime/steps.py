"""slime's optimizer steps, by its option --custom-megatron-before-train-step-hook-path."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from trajreplay.capture.slime.identity import NAMED, place, sample_id, started
from trajreplay.capture.slime.settings import loss_contract, loss_settings, scalars_of
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.records import SampleRecord

_LOSSES = "slime.backends.megatron_utils.loss"
_POLICY, _LOG_PROBS = "policy_loss_function", "get_log_probs_and_entropy"
_MARK = "trajreplay_micro_batch"  # in slime's own dictionary of a micro-batch


def record_steps(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any
) -> None:
    """Record an optimizer step of the actor, which begins now.

    `--custom-megatron-before-train-step-hook-path trajreplay.capture.slime.record_steps`, with
    capture switched on in the environment. With `record_rollout` beside it, the samples of a step
    are those of the rollout.

    Args:
        args: slime's arguments; the settings are read from them.
        rollout_id: The rollout.
        step_id: The step within it.
        model: The parts of the model; their `role` says whether it is the actor's.
        optimizer: Its methods `step` and `zero_grad` tell when the step ends.
        scheduler: Not looked at.

    Raises:
        SchemaError: At the first call, a switch is malformed.
    """
    if getattr(model[0], "role", "actor") != "actor":
        return
    pen = started(args)
    if not pen.enabled:
        return
    with pen.guard("slime step"):
        _STEPS.begin(args, rollout_id, step_id, optimizer)


class _Steps:
    """The step that is open, and what wraps the functions of slime that show it."""

    def __init__(self) -> None:
        self._args: Any = None
        self._place = (-1, -1)  # the rollout and step
        self._micro_batches = self._rows = 0
        self._of, self._trained = -1, 0  # samples of a rollout that steps of it consumed
        self._begun = False
        self._grad_norm: Any = None
        self._watched = False  # whether log-probs that are computed now are those of the loss
        self._log_probs: Mapping[str, Any] | None = None

    def begin(self, args: Any, rollout_id: int, step_id: int, optimizer: Any) -> None:
        """Be ready for the losses of a step."""
        self.end()
        self._args, self._place = args, (rollout_id, step_id)
        module = sys.modules.get(_LOSSES)
        if module is None or not all(hasattr(module, one) for one in (_POLICY, _LOG_PROBS)):
            raise CaptureError(
                f"{_LOSSES} has no {_POLICY} that computes its log-probs by {_LOG_PROBS}",
                hint="This version of slime is another than is known: its steps are not captured.",
            )
        _wrap(module, _POLICY, self._loss_of)
        _wrap(module, _LOG_PROBS, self._log_probs_of)
        _wrap(optimizer, "step", self._stepped)
        _wrap(optimizer, "zero_grad", self._zeroed)

    def end(self) -> None:
        """End the step, if a loss of it was seen, and recording with the last one of a training."""
        if self._begun:
            known = {} if self._grad_norm is None else {"grad_norm": self._grad_norm}
            started(self._args).end_step(**known)
            if self._is_last():
                started(self._args).close()
        self._begun, self._grad_norm = False, None
        self._micro_batches = self._rows = 0

    def _is_last(self) -> bool:
        """Whether all samples of the last rollout are trained on, as far as that is known."""
        rollout_id, step_id = self._place
        self._trained = (self._trained if self._of == rollout_id else 0) + self._rows
        self._of = rollout_id
        count = NAMED.count(rollout_id)
        steps = getattr(self._args, "num_steps_per_rollout", None) or step_id + 1
        done = count is not None and self._trained >= count and step_id + 1 == steps
        return done and rollout_id + 1 == getattr(self._args, "num_rollout", None)

    def _stepped(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        with started(self._args).guard("slime step"):
            self._grad_norm = result[1]
        return result

    def _zeroed(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        with started(self._args).guard("slime step"):
            self.end()
        return result

    def _log_probs_of(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        if self._watched:
            self._log_probs = result[1]
        return result

    def _loss_of(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._watched, self._log_probs = True, None
        try:
            result = original(*given, **named)
        finally:
            self._watched = False
        with started(self._args).guard("slime loss"):
            batch = named["batch"] if "batch" in named else given[1]
            self._record(batch, result[1])
        return result

    def _record(self, batch: Any, told: Mapping[str, Any]) -> None:
        """Record a micro-batch; its forward pass may be repeated, with the same dictionary."""
        if self._log_probs is None:
            raise CaptureError(f"{_POLICY} did not compute its log-probs by {_LOG_PROBS}")
        args, found, pen = self._args, self._log_probs, started(self._args)
        if not pen.enabled:
            return
        old = batch.get("rollout_log_probs" if args.use_rollout_logprobs else "log_probs")
        if _MARK not in batch:
            batch[_MARK] = self._micro_batches, self._rows
            self._micro_batches += 1
            self._rows += len(batch["unconcat_tokens"])
        index, first = batch[_MARK]
        if not self._begun:
            self._begun = True
            stage = loss_contract(args, alone=NAMED.alone(self._place[0]))
            pen.begin_step(
                *self._place,
                settings=loss_settings(args, on_policy=not old),
                stages=[StageContract("sample"), stage],
            )
        origins = {"log_probs": {"source": "trainer"}}
        if old and not args.use_rollout_logprobs:
            origins["old_log_probs"] = {"source": "trainer"}
        pen.record_policy_loss(
            index,
            self._samples(batch, first),
            {name: told[name] for name in scalars_of(args) if name in told},
            log_probs=found["log_probs"],
            old_log_probs=None if args.use_rollout_logprobs else old or None,
            advantages=batch["advantages"],
            ref_log_probs=batch.get("ref_log_probs") or None,
            reduction="sum",
            origins=origins,
            columns={
                "entropy": found.get("entropy"),
                "rollout_log_probs": batch.get("rollout_log_probs") or None,
            },
        )

    def _samples(self, batch: Any, first: int) -> list[SampleRecord]:
        rollout_id, group = self._place[0], int(self._args.n_samples_per_prompt)
        padded = batch.get("max_seq_lens")
        records = []
        for row, tokens in enumerate(batch["unconcat_tokens"]):
            index = NAMED.index_of(rollout_id, tokens)
            name = f"r-{place().data_rank}-{first + row}" if index is None else sample_id(index)
            records.append(
                SampleRecord(
                    name,
                    response_length=int(batch["response_lengths"][row]),
                    total_length=int(batch["total_lengths"][row]),
                    padded_length=None if padded is None else int(padded[row]),
                    loss_mask=batch["loss_masks"][row],
                    group_index=None if index is None else index // group,
                    group_size=None if index is None else group,
                    source_rollout_id=rollout_id,
                )
            )
        return records


_STEPS = _Steps()


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Call `around` with a function and what it is given, once however often this is asked for."""
    original = getattr(owner, name)
    if getattr(original, "__wrapped_by__", None) is not None:
        return

    @functools.wraps(original)
    def call(*given: Any, **named: Any) -> Any:
        return around(original, *given, **named)

    call.__wrapped_by__ = "trajreplay"  # type: ignore[attr-defined]
    setattr(owner, name, call)
