"""The sampler: grows responses token by token, under weights that may change in mid-response."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trajreplay.cli.demo.policy import Policy
from trajreplay.cli.demo.schedule import Request
from trajreplay.cli.demo.task import EOS, MAX_RESPONSE_LENGTH, dictated_token, raw_reward


@dataclass
class Sample:
    """A request and all that becomes known of it: sampled, then scored, then evaluated."""

    request: Request
    response: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)

    consumer_batch_index: int = -1
    reward: float = 0.0
    old_log_probs: Tensor = field(default_factory=lambda: torch.empty(0))
    ref_log_probs: Tensor = field(default_factory=lambda: torch.empty(0))
    kl: Tensor = field(default_factory=lambda: torch.empty(0))
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def tokens(self) -> Tensor:
        """All its tokens, the prompt's first."""
        return torch.tensor([*self.request.prompt.tokens, *self.response])

    @property
    def response_length(self) -> int:
        """How many tokens the response has so far, the tool's included."""
        return len(self.response)

    @property
    def total_length(self) -> int:
        """How many tokens prompt and response have together."""
        return len(self.request.prompt.tokens) + len(self.response)

    @property
    def truncated(self) -> bool:
        """Whether the response was cut at the length limit."""
        return len(self.response) >= MAX_RESPONSE_LENGTH and self.response[-1] != EOS

    @property
    def finished(self) -> bool:
        """Whether the response takes no further token."""
        return self.truncated or self.response[-1:] == [EOS]

    @property
    def raw_reward(self) -> float:
        """The score of what the policy wrote itself."""
        written = [t for t, counts in zip(self.response, self.loss_mask, strict=True) if counts]
        return raw_reward(self.request.prompt, written)

    @property
    def weight_versions(self) -> list[tuple[int, int, int]]:
        """Spans of response tokens with the version of the weights that wrote them.

        >>> from trajreplay.cli.demo.task import Prompt
        >>> request = Request("s-0", 0, Prompt(7, 3), rollout_id=0, partition_index=0, rank=0)
        >>> Sample(request, token_versions=[4, 4, 4, 6]).weight_versions
        [(0, 3, 4), (3, 4, 6)]
        """
        versions = self.token_versions
        edges = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1]]
        starts, stops = [0, *edges], [*edges, len(versions)]
        return [(a, b, versions[a]) for a, b in zip(starts, stops, strict=True) if a < b]

    def write(self, token: int, log_prob: float, version: int, *, counts: bool) -> None:
        """Append one response token."""
        self.response.append(token)
        self.loss_mask.append(int(counts))
        self.rollout_log_probs.append(log_prob)
        self.token_versions.append(version)


class Sampler:
    """One rank's inference engine: its own copy of the weights, and the responses in flight.

    The engine of a real training runs beside the trainer. Here the two take turns, which gives the
    same stale weights and the same run every time.
    """

    def __init__(self, policy: Policy, *, temperature: float, seed: int) -> None:
        self._policy = copy.deepcopy(policy)
        self._version = 0
        self._temperature = temperature
        self._random = torch.Generator().manual_seed(seed)
        self._in_flight: list[Sample] = []
        self._state: Tensor | None = None
        self._last_tokens = torch.empty(0)

    def load_weights(self, policy: Policy, version: int) -> None:
        """Take over the trainer's weights; open responses go on under them from where they are."""
        self._policy.load_state_dict(policy.state_dict())
        self._version = version

    def start(self, requests: Sequence[Request]) -> None:
        """Put requests in flight; none may be in flight already."""
        self._in_flight = [Sample(request) for request in requests]
        self._last_tokens = torch.tensor([request.prompt.tokens for request in requests])
        self._state = None

    def finish(self) -> list[Sample]:
        """Sample to the end and hand the finished samples over."""
        self.advance(MAX_RESPONSE_LENGTH)
        finished, self._in_flight = self._in_flight, []
        return finished

    @torch.no_grad()
    def advance(self, tokens: int) -> None:
        """Add up to so many tokens to every response that is still open."""
        for _ in range(tokens):
            if all(sample.finished for sample in self._in_flight):
                return
            logits, self._state = self._policy(self._last_tokens, self._state)
            log_distribution = torch.log_softmax(logits[:, -1] / self._temperature, dim=-1)
            choices = torch.multinomial(log_distribution.exp(), 1, generator=self._random)
            log_probs = log_distribution.gather(-1, choices)
            self._last_tokens = torch.tensor(
                [
                    [self._write_next(sample, int(choice), float(log_prob))]
                    for sample, choice, log_prob in zip(
                        self._in_flight, choices, log_probs, strict=True
                    )
                ]
            )

    def _write_next(self, sample: Sample, choice: int, log_prob: float) -> int:
        """Append what comes next, chosen or dictated by the tool; give the token to read on."""
        if sample.finished:
            return EOS
        dictated = dictated_token(sample.request.prompt, sample.response)
        if dictated is None:
            sample.write(choice, log_prob, self._version, counts=True)
        else:
            # Not drawn from the policy, so the engine has no probability to report.
            sample.write(dictated, 0.0, self._version, counts=False)
        return sample.response[-1]
