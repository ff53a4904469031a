"""Five methods of one trainer, wrapped: what it generates, scores and computes is recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trajreplay.capture.reasons import reason_of
from trajreplay.capture.trl.generation import (
    ROW,
    Generation,
    Scored,
    generation_of,
    record_of,
    rollout_of,
    tokens_of,
)
from trajreplay.capture.trl.settings import Arithmetic
from trajreplay.schema.settings import Settings

if TYPE_CHECKING:
    import torch

    from trajreplay.capture.recorder import Recorder

# Columns of a lake, and the names that TRL has for them.
_COLUMNS = {
    "old_log_probs": "old_per_token_logps",
    "ref_log_probs": "ref_per_token_logps",
    "rollout_log_probs": "sampling_per_token_logps",
}
METHODS = (
    "_generate_and_score_completions",
    "_calculate_rewards",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)
_GRAD_NORM = "_get_grad_norm"  # of transformers >= 5, once all gradients of a step are there
_GENERATIONS_KEPT = 2


class Hooks:
    """The wrapped methods, and what is known between their calls.

    Args:
        trainer: The trainer; its own methods do the work, unchanged.
        recorder: Where to.
        first_rollout: Number of the next generation.
        texts: Whether texts are handed over to the redaction policy.
        ratios: Whether the largest and the smallest ratio of each micro-batch are told.

    Attributes:
        steps: Optimizer steps begun.
    """

    def __init__(
        self,
        trainer: Any,
        recorder: Recorder,
        *,
        first_rollout: int = 0,
        texts: bool = False,
        ratios: bool = False,
    ) -> None:
        self._trainer, self._recorder, self._texts = trainer, recorder, texts
        self._tells_ratios = ratios
        self._ratios: list[torch.Tensor] = []
        self._next_rollout = first_rollout
        self._generations: dict[int, Generation] = {}
        self._versions: dict[int, int] = {}
        self._scored: Scored | None = None
        self._in_loss = False
        self._log_probs: torch.Tensor | None = None
        self._entropy: torch.Tensor | None = None
        self._step: tuple[int, int] | None = None  # of the trainer: global step, micro-batches
        self._arithmetic: Arithmetic | None = None
        self._rollout_of_step = self._step_id = -1
        self.steps = 0
        wrappers = (self.generate, self.calculate, self.get, self.compute)
        self._wrapped = dict(zip(METHODS, wrappers, strict=True))
        if hasattr(trainer, _GRAD_NORM):
            self._wrapped[_GRAD_NORM] = self.norm
        for name, wrapper in self._wrapped.items():
            setattr(trainer, name, self._around(getattr(trainer, name), wrapper))

    def remove(self) -> None:
        """Give the trainer its own methods back."""
        self._end_step()
        for name in self._wrapped:
            vars(self._trainer).pop(name, None)

    def _around(
        self, original: Callable[..., Any], wrapper: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        return call

    def generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A generation, which is a rollout; what serves an evaluation is none."""
        output = original(*args, **kwargs)
        if self._trainer.model.training:
            with self._recorder.guard("generation"):
                self._record_generation(output)
        return output

    def calculate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Rewards of each function."""
        rewards = original(*args, **kwargs)
        with self._recorder.guard("rewards"):
            _, prompts, completions, *rest = args
            lengths = [len(one) for one in rest[0]] if rest else None
            self._scored = Scored(rewards, prompts, completions, lengths)
        return rewards

    def get(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Log-probs; those of a loss are its current ones. The tuple differs between versions."""
        found = original(*args, **kwargs)
        if self._in_loss and self._log_probs is None:
            self._log_probs, self._entropy = found[0], found[1]
        return found

    def compute(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of one micro-batch."""
        self._in_loss, self._log_probs, self._entropy = True, None, None
        try:
            loss = original(*args, **kwargs)
        finally:
            self._in_loss = False
        if self._trainer.model.training:
            with self._recorder.guard("loss"):
                inputs, log_probs = kwargs.get("inputs", args[-1]), self._log_probs
                self._record_loss(inputs, loss)
                if self._tells_ratios:
                    self._ratios += _extremes(log_probs, inputs)
        return loss

    def norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The norm of the gradients, after the last backward pass of a step."""
        norm = original(*args, **kwargs)
        with self._recorder.guard("gradient norm"):
            self.end_step_if_done(**({} if norm is None else {"grad_norm": norm}))
        return norm

    def _record_generation(self, output: dict[str, Any]) -> None:
        self.end_step_if_done()
        rollout_id, self._next_rollout = self._next_rollout, self._next_rollout + 1
        scored, self._scored = self._scored, None
        trainer = self._trainer
        try:
            generation = generation_of(
                rollout_id, output, scored, trainer=trainer, texts=self._texts
            )
        except Exception as error:
            self._recorder.begin_rollout(rollout_id, settings=Settings())
            self._recorder.drop(f"its generation could not be described: {reason_of(error)}")
            raise
        output[ROW] = generation.row_numbers()
        self._generations[rollout_id] = generation
        self._versions[rollout_id] = int(trainer.state.global_step)
        for old in sorted(self._generations)[:-_GENERATIONS_KEPT]:
            del self._generations[old], self._versions[old]
        records = generation.records
        arithmetic = Arithmetic(
            trainer, "old_per_token_logps" not in output, len(records), scored is not None
        )
        self._recorder.begin_rollout(
            rollout_id,
            settings=arithmetic.settings,
            stages=arithmetic.rollout_stages,
            cohort_size=len(records) * trainer.accelerator.num_processes,
        )
        self._recorder.record(
            records,
            origins=self._origins(output, rollout_id),
            tokens=tokens_of(output, records),
            advantages=_by_token(output["advantages"], output["completion_mask"]),
            **{name: output.get(key) for name, key in _COLUMNS.items()},
        )
        self._recorder.end_rollout()

    def _origins(self, inputs: dict[str, Any], rollout_id: int) -> dict[str, dict[str, Any]]:
        """Where the log-probs came from that were made when the samples were."""
        temperature = float(self._trainer.temperature)
        version = self._versions.get(rollout_id)
        made = {"temperature": temperature, "weight_version": version}
        found: dict[str, dict[str, Any]] = {
            "old_log_probs": {"source": "trainer", **made},
            "rollout_log_probs": {"source": "sampler", "temperature": temperature},
        }
        return {name: one for name, one in found.items() if inputs.get(_COLUMNS[name]) is not None}

    def _record_loss(self, inputs: dict[str, Any], loss: torch.Tensor) -> None:
        trainer, numbers = self._trainer, inputs[ROW].tolist() if ROW in inputs else []
        rollout_id = rollout_of(numbers[0]) if numbers else max(0, self._next_rollout - 1)
        at = int(trainer.state.global_step)
        if self._step is None or self._step[0] != at:
            self._begin_step(at, rollout_id, inputs)
        assert self._step is not None
        assert self._arithmetic is not None
        index = self._step[1]
        self._step = at, index + 1
        if not numbers:
            self._recorder.drop("the generation of its samples could not be described")
        if not self._recorder.is_recording("step"):  # of its values only the heartbeat is made
            records = [record_of(self._generations, one) for one in numbers]
            self._recorder.record_policy_loss(index, records, {"loss": loss})
            return
        meaning = self._arithmetic.meaning(self._generations[rollout_id].trained_tokens)
        made = {"temperature": float(trainer.temperature), "weight_version": at}
        columns = {name: inputs.get(key) for name, key in _COLUMNS.items()}
        self._recorder.record_policy_loss(
            index,
            [record_of(self._generations, one) for one in numbers],
            scalars={"loss": loss},
            origins={
                **self._origins(inputs, rollout_id),
                "log_probs": {"source": "trainer", **made},
            },
            log_probs=self._log_probs,
            advantages=_by_token(inputs["advantages"], inputs["completion_mask"]),
            columns={"entropy": self._entropy, **columns},
            **meaning,
        )
        self._log_probs = self._entropy = None

    def _begin_step(self, at: int, rollout_id: int, inputs: dict[str, Any]) -> None:
        """A step is numbered within the rollout whose samples it takes first."""
        self._end_step()
        same = rollout_id == self._rollout_of_step
        self._rollout_of_step, self._step_id = rollout_id, self._step_id + 1 if same else 0
        trainer, rows = self._trainer, len(inputs["completion_mask"])
        self._arithmetic = Arithmetic(trainer, inputs.get("old_per_token_logps") is None, rows)
        micro_batches = rows * int(trainer.current_gradient_accumulation_steps)
        self._recorder.begin_step(
            rollout_id,
            self._step_id,
            settings=self._arithmetic.settings,
            stages=self._arithmetic.step_stages,
            cohort_size=micro_batches * trainer.accelerator.num_processes,
        )
        self._step = at, 0
        self.steps += 1

    def end_step_if_done(self, **told: Any) -> None:
        """End the step whose micro-batches all had their loss."""
        size = int(self._trainer.current_gradient_accumulation_steps)
        if self._step is not None and self._step[1] >= size:
            self._end_step(**told)

    def _end_step(self, **told: Any) -> None:
        if self._step is not None:
            step, self._step = self._step[0] + 1, None
            if self._ratios:
                told["ratio"], self._ratios = tuple(self._ratios), []
            self._recorder.end_step(step=step, **told)


def _extremes(log_probs: torch.Tensor | None, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """The largest and the smallest ratio of a micro-batch's trained tokens; 1 of none."""
    old = inputs.get("old_per_token_logps")
    if log_probs is None:
        return []
    import torch

    now = log_probs.detach()
    moved = now - (now if old is None else old)
    # Whatever a padding holds, infinities and NaN included, tells nothing.
    moved = torch.where(inputs["completion_mask"].bool(), moved, 0.0)
    return [moved.max().exp(), moved.min().exp()]


def _by_token(advantages: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(S, T). One advantage a sample, or a token, as its tokens have it."""
    return advantages.unsqueeze(1).expand(like.shape) if advantages.ndim == 1 else advantages
