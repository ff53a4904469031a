"""The toy task: write `count` digits in rising order that sum to `target`, with partial credit."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Tokens 0 to 9 are the digits themselves.
ASK, TOOL, EOS = 10, 11, 12
VOCABULARY_SIZE = 13
MAX_RESPONSE_LENGTH = 10


@dataclass(frozen=True)
class Prompt:
    """One question to the policy.

    >>> Prompt(target=7, count=3).text
    'write 3 digits in rising order that sum to 7'
    """

    target: int
    count: int

    @property
    def tokens(self) -> list[int]:
        """What the policy reads of it."""
        return [self.target, self.count, ASK]

    @property
    def text(self) -> str:
        """What a person reads of it."""
        return f"write {self.count} digits in rising order that sum to {self.target}"


def draw_prompts(number: int, *, seed: int, rollout_id: int) -> list[Prompt]:
    """Draw the prompts of a rollout; every rank draws the same ones."""
    source = random.Random(f"{seed}/{rollout_id}")
    return [Prompt(source.randint(4, 9), source.randint(2, 4)) for _ in range(number)]


def dictated_token(prompt: Prompt, response: Sequence[int]) -> int | None:
    """Tell what the environment writes next, if it is the environment's turn.

    A tool answers the first digit with how much of the sum is still missing. The policy reads
    these tokens but did not choose them, so they do not count in the loss.

    >>> dictated_token(Prompt(target=7, count=3), [2]) == TOOL
    True
    >>> dictated_token(Prompt(target=7, count=3), [2, TOOL])
    5
    """
    match list(response):
        case [digit] if digit <= 9:
            return TOOL
        case [digit, token] if digit <= 9 and token == TOOL:
            return max(prompt.target - digit, 0)
    return None


def raw_reward(prompt: Prompt, written: Sequence[int]) -> float:
    """Score the tokens that the policy wrote itself, from 0 to 1 in sixteenths.

    A quarter for the right number of digits, a quarter for their order, half for the sum. Being
    near earns a part, so that the samples of one prompt rarely all score the same.

    >>> raw_reward(Prompt(target=7, count=3), [1, 2, 4, EOS])
    1.0
    >>> raw_reward(Prompt(target=7, count=3), [4, 2, EOS])
    0.5625
    """
    digits = [token for token in written if token <= 9]
    if not digits:
        return 0.0
    clean = list(written[:-1]) == digits and written[-1] == EOS
    rising = len(digits) > 1 and digits == sorted(digits)
    count_credit = max(0.0, 1.0 - 0.5 * abs(len(digits) - prompt.count))
    order_credit = float(clean and rising)
    sum_credit = max(0.0, 1.0 - 0.125 * abs(sum(digits) - prompt.target))
    return 0.25 * count_credit + 0.25 * order_credit + 0.5 * sum_credit
