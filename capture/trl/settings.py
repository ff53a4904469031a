"""The arithmetic of a GRPO trainer of TRL, read from its own attributes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trajreplay.capture.trl.generation import component_names
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.settings import Settings
from trajreplay.schema.settings.profiles import profile, with_changes

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# How each loss type adds up: aggregation of the settings.
_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "dr_grpo": "constant-norm",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "vespo": "token-mean",
}
_SUM = "sum_then_normalize"
_BY_GENERATION = ("dapo", "cispo", "vespo")  # normalised by the tokens of a whole generation
_VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


@dataclass(frozen=True)
class Arithmetic:
    """What a trainer computes, and which of its stages can be recomputed.

    Args:
        trainer: The trainer.
        on_policy: Whether the loss takes its own log-probs for the old ones, as TRL does where
            every generation is used up within one optimizer step.
        rows: Samples of one micro-batch.
        scored: Whether the trainer's own code computed the rewards.
    """

    trainer: Any
    on_policy: bool
    rows: int
    scored: bool = True

    @property
    def settings(self) -> Settings:
        """The settings in force, in full."""
        return with_changes(profile("trl").settings, self._reward() | self._loss())

    def _reward(self) -> dict[str, Any]:
        found = {
            "reward.grouping": "group",
            "reward.n_samples_per_prompt": int(self.trainer.num_generations),
        }
        if self._parts and not self._unequal_parts:  # which nothing else scales
            weights = self.trainer.reward_weights.tolist()
            return {
                **found,
                "reward.combination": "normalise-then-sum",
                "reward.weights": dict(zip(self._parts, weights, strict=True)),
            }
        scale = _scale_rewards(self.trainer)
        return {
            **found,
            "reward.divide_by_std": scale != "none",
            "reward.std_grouping": "batch" if scale == "batch" else "same",
        }

    @property
    def _parts(self) -> tuple[str, ...]:
        return component_names(self.trainer)

    @property
    def _unequal_parts(self) -> str:
        """Why rewards that are normalised one by one cannot be told apart, or nothing."""
        if len(set(self._parts)) < len(self._parts):
            return "two reward functions have one name"
        return "one reward alone is normalised twice" if len(self._parts) == 1 else ""

    def _loss(self) -> dict[str, Any]:
        trainer, args = self.trainer, self.trainer.args
        kind, beta = trainer.loss_type, float(trainer.beta)
        by_sample = trainer.importance_sampling_level == "sequence"
        threshold = getattr(trainer, "off_policy_mask_threshold", None)
        aggregation = _AGGREGATIONS.get(kind, kind)
        weighted = bool(getattr(args, "use_bias_correction_kl", False)) and not self.on_policy
        norm = self.rows * trainer.max_completion_length if kind == "dr_grpo" else None
        return {
            "loss.eps_clip": float(trainer.epsilon_low),
            "loss.eps_clip_high": float(trainer.epsilon_high),
            "loss.surrogate": "ppo-clip" if kind in _CLIPPED else kind,
            "loss.aggregation": aggregation,
            "loss.constant_norm": None if norm is None else float(norm),
            "loss.ratio": "one" if self.on_policy else "sequence-mean" if by_sample else "token",
            "loss.dual_clip": _optional(getattr(args, "delta", None)) if kind in _CLIPPED else None,
            "loss.sapo_tau_pos": float(getattr(args, "sapo_temperature_pos", 1.0)),
            "loss.sapo_tau_neg": float(getattr(args, "sapo_temperature_neg", 1.05)),
            "loss.entropy_coef": float(trainer.entropy_coef) if self._bonus else 0.0,
            "loss.kl_loss_coef": beta,
            "loss.kl_loss_weighted": weighted and beta != 0.0,
            "loss.opsm_delta": None if self.on_policy else _optional(threshold),
            "loss.correction": "none",
            "loss.correction_bounds": None,
            "loss.use_kl_loss": beta != 0.0,
            "loss.tis": False,
            "loss.opsm": threshold is not None and not self.on_policy,
            "loss.opd": False,
            "loss.per_token": aggregation == "token-mean",
        }

    @property
    def rollout_stages(self) -> tuple[StageContract, ...]:
        """What a rollout's capture claims."""
        aggregation = getattr(self.trainer, "multi_objective_aggregation", _SUM)
        reason = self._unequal_parts
        if not self._parts and aggregation != _SUM:
            reason = f"multi_objective_aggregation is {aggregation!r}"
        unscored = "" if self.scored else "rewards are computed by other code than TRL's"
        return (
            StageContract("sample"),
            _contract("reward.raw", unscored),
            _contract("reward.post_process", unscored or reason),
            StageContract("advantage.estimate"),
        )

    @property
    def step_stages(self) -> tuple[StageContract, ...]:
        """What a step's capture claims. TRL computes the loss and no scalar of its parts."""
        return (
            StageContract("sample"),
            _contract("loss.policy", self._shown_only(), scalars=("loss",)),
        )

    @property
    def _bonus(self) -> bool:
        """Whether the loss has an entropy bonus, by the tokens of each micro-batch."""
        return bool(getattr(self.trainer, "_entropy_bonus_enabled", False))

    def _shown_only(self) -> str:
        """Why the loss is recorded and not recomputed, or nothing."""
        trainer, args = self.trainer, self.trainer.args
        kind, delta = trainer.loss_type, getattr(args, "delta", None)
        by_sample = trainer.importance_sampling_level == "sequence" and not self.on_policy
        weighted = bool(getattr(args, "use_bias_correction_kl", False)) and trainer.beta != 0.0
        corrected = getattr(trainer, "vllm_importance_sampling_correction", False)
        vespo = {f"vespo_{name}": value for name, value in _VESPO.items()}
        reasons = {
            f"loss_type is {kind!r}": kind not in _AGGREGATIONS,
            "the ratio of a sequence weighs the KL of its tokens": by_sample and weighted,
            "delta is below 1 + epsilon_high": (
                delta is not None and delta < 1 + trainer.epsilon_high and kind in _CLIPPED
            ),
            "losses are weighted by vLLM's probabilities": trainer.use_vllm and corrected,
            "only tokens of high entropy count": getattr(trainer, "top_entropy_quantile", 1.0) < 1,
            "the entropy bonus is adaptive": self._bonus
            and bool(getattr(trainer, "use_adaptive_entropy", False)),
            "the loss has an entropy bonus of another scale": self._bonus
            and kind in _BY_GENERATION,
            "the loss has that of a router": getattr(trainer, "aux_loss_enabled", False),
            "VESPO has weights of its own": kind == "vespo"
            and any(getattr(args, name, value) != value for name, value in vespo.items()),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def meaning(self, generated: float | None) -> dict[str, Any]:
        """What the loss of a micro-batch is: how it was reduced, scaled and divided.

        Args:
            generated: Trained tokens of the generation that the micro-batch is of, all ranks.
        """
        trainer = self.trainer
        accumulation = int(trainer.current_gradient_accumulation_steps)
        if trainer.loss_type not in _BY_GENERATION or not generated:
            return {"reduction": "mean", "scale": 1.0 / accumulation}
        ranks, per_generation = trainer.accelerator.num_processes, trainer.args.steps_per_generation
        if per_generation == accumulation:  # the step consumes just what was generated
            return {"reduction": "mean", "scale": float(ranks), "denominator": generated}
        return {"reduction": "sum", "scale": ranks * per_generation / (generated * accumulation)}


def _contract(stage: str, reason: str, scalars: tuple[str, ...] = ()) -> StageContract:
    if reason:
        return StageContract(stage, "recorded-only", reason=reason)
    return StageContract(stage, scalars=scalars)


def _optional(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else float(value)


def _scale_rewards(trainer: Any) -> str:
    """group, batch or none; a flag before TRL 0.24."""
    found = trainer.scale_rewards
    if isinstance(found, bool):
        return "group" if found else "none"
    return str(found)
