"""What a trainer of TRL holds when it computes its loss, without a model or a device."""

from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.oracles.frameworks import Trl
from tests.oracles.padded import Batch

PROMPT = 1


def loss_of(
    trl: Trl, trainer: Any, batch: Batch, inputs: dict[str, Any], **settings: Any
) -> tuple[Tensor, dict[str, list[float]]]:
    """Run the loss of a trainer on the tokens of a batch.

    Args:
        trl: The framework.
        trainer: The class of the trainer.
        batch: Whose tokens they are; the advantages are given in `inputs`.
        inputs: What the trainer prepared besides the tokens.
        settings: Fields of the GRPO settings or of the trainer, where not the default.

    Returns:
        The loss, and what the trainer would log.
    """
    defaults = {field.name: field.default for field in fields(trl.config)}
    metrics: dict[str, list[float]] = defaultdict(list)
    trainer_holds = {
        "epsilon_low": defaults["epsilon"],
        "epsilon_high": defaults["epsilon"],
        "vllm_importance_sampling_correction": True,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": metrics},
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(
            num_processes=1,
            gather=lambda one: one,
            gather_for_metrics=lambda one: one,
            reduce=lambda one, reduction: one,
        ),
        "get_off_policy_mask": trl.grpo.get_off_policy_mask,
        "get_gamma_weights": trl.grpo.get_gamma_weights,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (
            batch.log_probs,
            torch.zeros_like(batch.log_probs),
            None,
        ),
    }
    holder = SimpleNamespace(
        **{**defaults, **trainer_holds, **settings, "args": SimpleNamespace(**defaults | settings)}
    )
    completion = torch.zeros_like(batch.mask).long()
    prompt = completion[:, :PROMPT]
    prepared = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": completion,
        "completion_mask": batch.mask,
        **inputs,
    }
    return trainer._compute_loss(holder, None, prepared), metrics
