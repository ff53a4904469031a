"""The benchmark workload: GRPO steps of synthetic samples, the same arrays on every machine.

Two sizes are in use: `large_step()`, 32 samples of 2,048 tokens, and `small_step(i)`, 64 samples of
512 tokens, of which the benchmarks write 200. Their digests are in `tests/benchmarks/`.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
ONE = np.float32(1)

SAMPLES_PER_PROMPT = 8
REWARD_EPSILON = np.float32(1e-6)
REWARD_STEP = 0.125
EPS_CLIP = 0.2
EPS_CLIP_HIGH = 0.28
KL_COEF = 0.1
ENTROPY_COEF = 0.01


@dataclass(frozen=True, eq=False)
class Step:
    """What one optimizer step consumed. Token arrays are (S, T), sample arrays (S,).

    What was drawn is stored; what a trainer computes from it, in float32, is a property.
    """

    old_log_probs: Floats
    log_probs: Floats
    ref_log_probs: Floats
    entropy: Floats
    raw_reward: Floats
    prompt_length: NDArray[np.int64]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.entropy)

    @property
    def response_length(self) -> int:
        """Tokens of each response; all are equally long."""
        return len(self.entropy[0])

    @property
    def tokens(self) -> int:
        """Response tokens of all samples."""
        return self.entropy.size

    @property
    def group_index(self) -> NDArray[np.int64]:
        """Prompt of each sample: neighbours share one."""
        return np.arange(self.samples) // SAMPLES_PER_PROMPT

    @cached_property
    def loss_mask(self) -> NDArray[np.uint8]:
        """Every fourth sample loses the last thirty-second of its tokens."""
        mask = np.ones(self.entropy.shape, np.uint8)
        mask[::4, self.response_length - self.response_length // 32 :] = 0
        return mask

    @cached_property
    def reward(self) -> Floats:
        """Each raw reward against those of its prompt, in units of their standard deviation."""
        groups = self.raw_reward.reshape(-1, SAMPLES_PER_PROMPT)
        centred = groups - groups.mean(axis=1, keepdims=True)
        scale = centred.std(axis=1, ddof=1, keepdims=True) + REWARD_EPSILON
        normalised: Floats = centred / scale
        return normalised.reshape(-1)

    @cached_property
    def kl(self) -> Floats:
        """The k1 estimate of old policy against reference."""
        return self.old_log_probs - self.ref_log_probs

    @cached_property
    def advantages(self) -> Floats:
        """The reward of a sample, on each of its tokens."""
        return np.repeat(self.reward, self.response_length).reshape(self.entropy.shape)

    @cached_property
    def scalars(self) -> dict[str, float]:
        """The recorded outputs of `loss.policy`: sums over samples of masked means over tokens."""
        log_ratio = self.old_log_probs - self.log_probs
        ratio = np.exp(-log_ratio)
        clipped = np.clip(ratio, np.float32(1 - EPS_CLIP), np.float32(1 + EPS_CLIP_HIGH))
        unclipped_loss = -ratio * self.advantages
        clipped_loss = -clipped * self.advantages
        pg_loss = self._reduce(np.maximum(unclipped_loss, clipped_loss))
        entropy_loss = self._reduce(self.entropy)
        return {
            "loss": pg_loss - ENTROPY_COEF * entropy_loss,
            "pg_loss": pg_loss,
            "entropy_loss": entropy_loss,
            "pg_clipfrac": self._reduce((clipped_loss > unclipped_loss).astype(np.float32)),
            "ppo_kl": self._reduce(log_ratio),
        }

    def token_columns(self) -> dict[str, Floats]:
        """The six recorded token columns by name, packed: (S * T,) each."""
        columns = {
            "old_log_probs": self.old_log_probs,
            "log_probs": self.log_probs,
            "ref_log_probs": self.ref_log_probs,
            "entropy": self.entropy,
            "kl": self.kl,
            "advantages": self.advantages,
        }
        return {name: column.reshape(-1) for name, column in columns.items()}

    def digest(self) -> str:
        """SHA-256 over the bytes of what was drawn, in the order it was drawn."""
        drawn = (
            self.old_log_probs,
            self.log_probs,
            self.ref_log_probs,
            self.entropy,
            self.raw_reward,
        )
        return hashlib.sha256(b"".join(array.tobytes() for array in drawn)).hexdigest()

    def _reduce(self, values: Floats) -> float:
        mask = self.loss_mask.astype(np.float32)
        means = (values * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), ONE)
        return float(np.add.accumulate(means)[-1])


def make_step(seed: int, samples: int, response_length: int) -> Step:
    """Draw one step. The order of the draws is part of the workload.

    Args:
        seed: Of numpy's default generator.
        samples: A multiple of the samples of a prompt, 8.
        response_length: Tokens of every response.
    """
    draw = np.random.default_rng(seed)
    shape = (samples, response_length)
    old = (-draw.exponential(0.6, shape)).astype(np.float32)
    return Step(
        old_log_probs=old,
        log_probs=(old + draw.normal(0, 0.12, shape)).astype(np.float32),
        ref_log_probs=(old + draw.normal(0, 0.20, shape)).astype(np.float32),
        entropy=draw.uniform(0.0, 2.5, shape).astype(np.float32),
        raw_reward=draw.integers(0, 2, samples).astype(np.float32)
        + (REWARD_STEP * draw.integers(0, 5, samples)).astype(np.float32),
        prompt_length=draw.integers(16, 128, samples),
    )


def large_step() -> Step:
    """The step whose scalar results are known: 32 samples of 2,048 tokens."""
    return make_step(1001, 32, 2048)


def small_step(index: int) -> Step:
    """One of the 200 steps that are replayed: 64 samples of 512 tokens."""
    return make_step(2000 + index, 64, 512)
