"""The policy: an embedding, a GRU and a linear head, about five thousand parameters."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trajreplay.cli.demo.task import VOCABULARY_SIZE

EMBEDDING_SIZE = 16
HIDDEN_SIZE = 32


class Policy(nn.Module):
    """A next-token model small enough to learn the task in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, EMBEDDING_SIZE)
        self.recurrent = nn.GRU(EMBEDDING_SIZE, HIDDEN_SIZE, batch_first=True)
        self.head = nn.Linear(HIDDEN_SIZE, VOCABULARY_SIZE)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Read (S, T) tokens on from `state`; give (S, T, V) logits and the state after them."""
        hidden, state = self.recurrent(self.embedding(tokens), state)
        return self.head(hidden), cast(Tensor, state)


def response_statistics(
    policy: Policy,
    tokens: Sequence[Tensor],
    response_lengths: Sequence[int],
    *,
    temperature: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Evaluate whole samples in one padded pass.

    Args:
        policy: The weights to evaluate.
        tokens: One (T,) int64 tensor a sample, prompt and response.
        response_lengths: How many of the last tokens are the response.
        temperature: What the sampler divided its logits by; the trainer has to do the same.

    Returns:
        For each sample the log-probability of each response token and the entropy of the
        distribution that it was drawn from, both in nat.
    """
    padded = pad_sequence(list(tokens), batch_first=True)
    logits, _ = policy(padded[:, :-1])
    log_distribution = torch.log_softmax(logits / temperature, dim=-1)
    chosen = log_distribution.gather(-1, padded[:, 1:, None]).squeeze(-1)
    entropy = -(log_distribution.exp() * log_distribution).sum(dim=-1)
    # Position i of the output speaks of token i + 1.
    responses = [
        slice(len(sample) - length - 1, len(sample) - 1)
        for sample, length in zip(tokens, response_lengths, strict=True)
    ]
    return (
        [chosen[row, span] for row, span in enumerate(responses)],
        [entropy[row, span] for row, span in enumerate(responses)],
    )
