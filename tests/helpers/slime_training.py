"""A small training in the form of slime's: its loop, and a module with the functions that it calls.

slime cannot be installed here. What it is made of is written after its functions of these names in
slime.backends.megatron_utils (loss.py, model.py, data.py): what is handed to which, and when.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trajreplay.capture import slime

VOCABULARY, GROUPS, GROUP, TOKENS = 7, 2, 4, 5
NAME = "slime.backends.megatron_utils.loss"
ARGS: dict[str, Any] = {
    "advantage_estimator": "grpo",
    "n_samples_per_prompt": GROUP,
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "kl_loss_type": "k3",
    "kl_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "eps_clip_c": None,
    "entropy_coef": 0.01,
    "use_rollout_logprobs": False,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "use_unbiased_kl": False,
    "use_tis": False,
    "use_opsm": False,
    "calculate_per_token_loss": False,
    "recompute_loss_function": False,
    "start_rollout_id": 0,
}


class Optimizer:
    """An optimizer with the methods of Megatron's."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def step(self) -> tuple[bool, float, None]:
        """Descend, and return whether that was done, the norm, and nothing."""
        assert self.weights.grad is not None
        norm = float(self.weights.grad.norm())
        with torch.no_grad():
            self.weights -= 2.0 * self.weights.grad
        return True, norm, None

    def zero_grad(self) -> None:
        """Forget gradients."""
        self.weights.grad = None


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put the module in the place of slime's."""
    module = ModuleType(NAME)
    vars(module).update(
        get_log_probs_and_entropy=get_log_probs_and_entropy,
        policy_loss_function=policy_loss_function,
    )
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


def get_log_probs_and_entropy(
    logits: Tensor, *, unconcat_tokens: list[Tensor], response_lengths: list[int]
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Log-probs and entropies of the response of each sample; logits are (S, V) by sample."""
    log_probs, entropy = [], []
    for row, (tokens, length) in enumerate(zip(unconcat_tokens, response_lengths, strict=True)):
        every = torch.log_softmax(logits[row], -1)
        log_probs.append(every[tokens[-length:]])
        entropy.append((-(every.exp() * every).sum()).expand(length))
    return torch.empty(0), {"log_probs": log_probs, "entropy": entropy}


def policy_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, reduced: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss with entropy and KL."""
    module = sys.modules[NAME]
    _, found = module.get_log_probs_and_entropy(
        logits,
        unconcat_tokens=batch["unconcat_tokens"],
        response_lengths=batch["response_lengths"],
    )
    new = torch.cat(found["log_probs"])
    old = torch.cat(batch["log_probs"]) if batch.get("log_probs") else new.detach()
    advantages = torch.cat(batch["advantages"])
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    worst = torch.maximum(-ratio * advantages, -clipped * advantages)
    if args.eps_clip_c is not None:
        bound = torch.minimum(worst, -args.eps_clip_c * advantages)
        worst = torch.where(advantages < 0, bound, worst)
    pg_loss, entropy = reduced(worst), reduced(torch.cat(found["entropy"]))
    difference = torch.cat(batch["ref_log_probs"]) - new
    kl_loss = reduced(difference.exp() - 1 - difference)
    loss = pg_loss - args.entropy_coef * entropy + args.kl_loss_coef * kl_loss
    told = {
        "loss": loss,
        "pg_loss": pg_loss,
        "entropy_loss": entropy,
        "pg_clipfrac": reduced((-clipped * advantages > -ratio * advantages).float()),
        "ppo_kl": reduced(old - new),
        "kl_loss": kl_loss,
    }
    return loss, {name: value.clone().detach() for name, value in told.items()}


def rollout_data(weights: Tensor, rollout_id: int, **changes: Any) -> dict[str, Any]:
    """What an actor holds of a rollout, once its advantages are computed."""
    seeded = torch.Generator().manual_seed(rollout_id)
    count = GROUPS * GROUP
    tokens = [torch.randint(0, VOCABULARY, (TOKENS + 2,), generator=seeded) for _ in range(count)]
    lengths = [2 + row % 4 for row in range(count)]
    masks = [torch.ones(length, dtype=torch.int64) for length in lengths]
    raw = torch.rand(count, generator=seeded)
    groups = raw.view(GROUPS, GROUP)
    centred = groups - groups.mean(1, keepdim=True)
    rewards = (centred / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    with torch.no_grad():
        _, found = get_log_probs_and_entropy(
            weights[range(count)], unconcat_tokens=tokens, response_lengths=lengths
        )
    return {
        "tokens": tokens,
        "response_lengths": lengths,
        "total_lengths": [len(one) for one in tokens],
        "loss_masks": masks,
        "rewards": rewards.tolist(),
        "raw_reward": raw.tolist(),
        "sample_indices": [count * rollout_id + row for row in range(count)],
        "log_probs": found["log_probs"],
        "ref_log_probs": [one - 0.1 for one in found["log_probs"]],
        "advantages": [
            reward.expand(length) for reward, length in zip(rewards, lengths, strict=True)
        ],
        "rollout_mask_sums": [int(one.sum()) for one in masks],
        **changes,
    }


def train(
    *,
    steps: int = 2,
    hooks: bool = True,
    changes: dict[str, Any] | None = None,
    rollouts: range = range(2),
    checkpoint_of: str = "",
    **args: Any,
) -> str:
    """Rollouts of some steps of two micro-batches each; returns the parameters as text.

    From a checkpoint, which are such parameters, the first rollout is the one to start with.
    """
    given = SimpleNamespace(**ARGS | {"start_rollout_id": rollouts.start} | args)
    torch.manual_seed(0)
    weights = torch.randn(GROUPS * GROUP, VOCABULARY)
    if checkpoint_of:
        kept = bytearray.fromhex(checkpoint_of)
        weights = torch.frombuffer(kept, dtype=torch.float32).reshape(weights.shape).clone()
    optimizer = Optimizer(weights.requires_grad_())
    for rollout_id in rollouts:
        data = rollout_data(weights, rollout_id, **changes or {})
        if hooks:
            slime.record_rollout(given, rollout_id, data)
        for step_id in range(steps):
            optimizer.zero_grad()
            if hooks:
                slime.record_steps(given, rollout_id, step_id, [object()], optimizer, None)
            for rows in (range(0, 8, 2), range(1, 8, 2)):
                torch.autograd.backward(_loss(given, data, rows, weights))
            optimizer.step()
            optimizer.zero_grad()
    return weights.detach().numpy().tobytes().hex()


def _loss(args: Any, data: dict[str, Any], rows: range, weights: Tensor) -> Tensor:
    """As slime's loss_function: the loss of its module, perhaps computed twice."""
    batch = {name: [of[row] for row in rows] for name, of in data.items() if of is not None}
    batch["unconcat_tokens"] = batch["tokens"]
    masks, lengths = torch.cat(batch["loss_masks"]), batch["response_lengths"]
    sums = batch["rollout_mask_sums"]

    def reduced(values: Tensor) -> Tensor:
        if args.calculate_per_token_loss:
            return (values * masks).sum()
        parts = zip(torch.split(values * masks, lengths), sums, strict=True)
        return torch.stack([part.sum() / max(count, 1) for part, count in parts]).sum()

    function = sys.modules[NAME].policy_loss_function
    logits = weights[list(rows)]
    if args.recompute_loss_function:
        loss, _ = checkpoint(function, args, batch, logits, reduced, use_reentrant=False)
    else:
        loss, _ = function(args, batch, logits, reduced)
    assert isinstance(loss, Tensor)
    return loss / 4
