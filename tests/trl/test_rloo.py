"""Real trainings of TRL's RLOO on the CPU: the settings give its advantages and its losses."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.trl_training import PLAIN, PROMPTS, early_letters, length
from trajreplay.schema import KlSettings, LossSettings, RewardSettings
from trajreplay.stages.compose import (
    LossInputs,
    RewardInputs,
    kl_tokens,
    policy_terms,
    processed_rewards,
)
from trajreplay.stages.kernels import kl_penalised_rewards, seq_mean_token_mean

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore")]
WEIGHTS = {"early": 1.0, "length": 0.5}  # in order of their names, as the trainer has them
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as by default": ({}, {}),
    "without a reference": ({"beta": 0.0}, {"less_kl": False}),
    "normalised": (
        {"normalize_advantages": True, "beta": 0.4},
        {"rescale": "batch", "batch_epsilon": 1e-4, "lone": "nan"},
    ),
    "clipped": ({"reward_clip_range": (0.2, 7.0)}, {"clip_before": (0.2, 7.0)}),
}


def rewards_alone(completions: list[str], **_: Any) -> list[float | None]:
    """A reward for few completions only, so that some are the only ones of their group."""
    return [float(len(one)) if "m" in one else None for one in completions]


def trained(folder: Path, model: Path, fields: dict[str, Any], *, sparse: bool) -> dict[str, Any]:
    """What a training used in its last generation, and the loss of its last micro-batch."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    functions = [rewards_alone, rewards_alone] if sparse else [early_letters, length]
    torch.manual_seed(0)
    trainer = RLOOTrainer(
        model=str(model),
        reward_funcs=functions,
        args=RLOOConfig(
            output_dir=str(folder), **{"reward_weights": [*WEIGHTS.values()], **PLAIN, **fields}
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    held: dict[str, Any] = {"log_probs": []}
    scored, made = trainer._calculate_rewards, trainer._generate_and_score_completions
    logps, loss = trainer._get_per_token_logps_and_entropies, trainer._compute_loss

    def keep_rewards(*args: Any, **options: Any) -> Any:
        held["rewards"] = scored(*args, **options)
        return held["rewards"]

    def keep_log_probs(*args: Any, **options: Any) -> Any:
        found = logps(*args, **options)
        held["log_probs"].append(found[0].detach())
        return found

    def keep_inputs(*args: Any, **options: Any) -> Any:
        held["log_probs"].clear()
        found = made(*args, **options)
        held["made"] = {**held, **found, "log_probs": [*held["log_probs"]]}
        return found

    def keep_loss(model: Any, inputs: dict[str, Any]) -> Any:
        found = loss(model, inputs)
        held["loss"] = (inputs, held["log_probs"][-1], found.detach())
        return found

    trainer._calculate_rewards = keep_rewards
    trainer._get_per_token_logps_and_entropies = keep_log_probs
    trainer._generate_and_score_completions = keep_inputs
    trainer._compute_loss = keep_loss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return held


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_settings_give_what_trl_computes(
    tmp_path: Path, model: Path, name: str, sparse: bool
) -> None:
    torch.set_num_threads(1)
    fields, changes = CASES[name]
    held = trained(tmp_path, model, {**fields, "num_iterations": 2}, sparse=sparse)
    made = held["made"]
    mask = made["completion_mask"].double()
    offsets = torch.arange(len(mask) + 1) * mask.shape[1]
    groups, batch = torch.arange(len(mask)) // PLAIN["num_generations"], torch.zeros(len(mask))
    penalty = None
    beta = fields.get("beta", 0.05)
    if beta:
        policy, reference = (one.double().flatten() for one in made["log_probs"][-2:])
        assert sparse or not torch.equal(policy, reference)
        kl = kl_tokens(KlSettings(coef=beta), policy, reference)
        free = torch.zeros(len(mask)).double()
        penalty = -kl_penalised_rewards(free, kl, mask.flatten(), offsets, kl_coef=beta)
    settings = RewardSettings(
        **{
            "weights": WEIGHTS,
            "baseline": "leave-one-out",
            "divide_by_std": False,
            "missing": "exclude",
            "less_kl": True,
            **changes,
        }
    )
    lengths = mask.sum(1)
    given = RewardInputs(groups, batch.long(), lengths, lengths, penalty=penalty)
    found = processed_rewards(settings, made["rewards"].double(), given)
    scorable = (~made["rewards"].isnan().all(1)).view(-1, PLAIN["num_generations"]).sum(1)
    assert not sparse or 1 in scorable  # one of its group alone has a score
    torch.testing.assert_close(
        found, made["advantages"].double(), rtol=1e-5, atol=1e-5, check_dtype=False
    )
    assert bool(found.any())


def test_settings_give_the_loss_of_trl(tmp_path: Path, model: Path) -> None:
    torch.set_num_threads(1)
    held = trained(tmp_path, model, {"num_iterations": 2, "learning_rate": 0.1}, sparse=False)
    inputs, log_probs, loss = held["loss"]
    mask = inputs["completion_mask"].bool()
    old = torch.zeros_like(log_probs)
    # The trainer keeps the sum alone: where it is in the sample changes nothing.
    old[:, 0] = inputs["old_logps"]
    spread = inputs["advantages"][:, None].expand_as(log_probs)
    columns = {
        "log_probs": log_probs.double().flatten(),
        "old_log_probs": old.double().flatten(),
        "advantages": spread.double().flatten(),
    }
    offsets = torch.arange(len(mask) + 1) * mask.shape[1]
    settings = LossSettings(ratio="sequence-sum", batch_reduction="mean")
    terms = policy_terms(settings, LossInputs(columns, mask.flatten(), offsets)).terms
    means = seq_mean_token_mean(terms["pg_loss"], mask.flatten().double(), offsets)
    assert float(means.mean.mean()) == pytest.approx(float(loss), rel=1e-5, abs=1e-6)
    assert float(loss)
