"""verl's own losses of a worker, of tensors as its workers hold them, around small parameters."""

import importlib
from typing import Any

import torch
from torch import Tensor

SAMPLES, TOKENS, WORDS = 6, 5, 11
STEPS, MICRO_BATCHES = 2, 2


class Worker:
    """What verl calls an engine: these methods, around a table of logits and one of values.

    Args:
        config: verl's ActorConfig or CriticConfig.
        entropy: Whether the entropy of each token is handed to the loss.
        trained: Batches that it was trained on before.
    """

    def __init__(self, config: Any, *, entropy: bool = False, trained: int = 0) -> None:
        torch.manual_seed(0)
        self.config, self._entropy = config, entropy
        self.table = torch.randn(TOKENS, WORDS, requires_grad=True)
        self._optimizer = torch.optim.SGD([self.table], lr=1.0)
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self._optimizer)
        self.lr_scheduler.last_epoch = trained
        self._losses = importlib.import_module("verl.workers.utils.losses")

    def train(self, loss: str, batches: int = 1) -> list[float]:
        """Train on some batches with a loss of verl's workers; return the losses."""
        told = []
        drawn = torch.Generator().manual_seed(1)
        for _ in range(batches):
            for _ in range(STEPS):
                self._optimizer.zero_grad()
                for _ in range(MICRO_BATCHES):
                    found, _ = getattr(self._losses, loss)(self.config, *self._given(drawn))
                    found.backward()
                    told.append(found.item())
                self.optimizer_step()
            self.lr_scheduler_step()
        return told

    def _given(self, drawn: torch.Generator) -> tuple[dict[str, Tensor], Any]:
        """What a model gave for a micro-batch, and the micro-batch, without padding."""
        lengths = torch.randint(1, TOKENS + 1, (SAMPLES,), generator=drawn).tolist()

        def jagged(make: Any) -> Tensor:
            return torch.nested.nested_tensor([make(one) for one in lengths], layout=torch.jagged)

        def random(length: int) -> Tensor:
            return torch.randn(length, generator=drawn)

        words = [torch.randint(WORDS, (one,), generator=drawn) for one in lengths]
        spread = self.table.log_softmax(-1)
        padding = torch.zeros(1)  # a model has a value at the last token of the prompt, and after
        rows = {
            "log_probs": [spread[: len(one)].gather(1, one[:, None])[:, 0] for one in words],
            "entropy": [-(spread.exp() * spread).sum(-1)[: len(one)] for one in words],
            "values": [self.table[: len(one), 0] for one in words],
        }
        output = {
            name: torch.cat([part for one in several for part in (one, padding)])
            for name, several in rows.items()
            if name != "entropy" or self._entropy
        }
        old = iter([one.detach() for one in rows["log_probs"]])
        batch = importlib.import_module("tensordict").TensorDict(
            {
                "prompts": jagged(lambda _: torch.zeros(1)),
                "responses": jagged(torch.zeros),
                "response_mask": jagged(torch.ones),
                "old_log_probs": jagged(lambda length: next(old) + 0.5 * random(length)),
                "ref_log_prob": jagged(lambda length: -random(length).abs() - 1.0),
                "advantages": jagged(random),
                "values": jagged(random),
                "returns": jagged(random),
            },
            batch_size=[SAMPLES],
        )
        tensors = importlib.import_module("verl.utils.tensordict_utils")
        tensors.assign_non_tensor(batch, dp_size=1, batch_num_tokens=None, global_batch_size=None)
        return output, batch

    def optimizer_step(self) -> float:
        """As an engine of verl."""
        self._optimizer.step()
        return 1.0

    def lr_scheduler_step(self) -> float:
        """As an engine of verl."""
        self.lr_scheduler.step()
        return 1.0

    def get_data_parallel_rank(self) -> int:
        """As an engine of verl."""
        return 0

    def get_data_parallel_size(self) -> int:
        """As an engine of verl."""
        return 1

    def get_data_parallel_group(self) -> None:
        """As an engine of verl."""
        return

    def is_mp_src_rank_with_outputs(self) -> bool:
        """As an engine of verl."""
        return True
