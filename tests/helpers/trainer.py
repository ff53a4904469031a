"""A trainer of its own: GRPO from reward to loss in float32, sample by sample, no kernel in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trajreplay import RecomputeConfig, Settings
from trajreplay.schema import KlSettings, LossSettings, RewardSettings

Floats = np.ndarray[Any, np.dtype[np.float32]]
METRICS = ("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl")
STYLES = ("torch", "numpy", "loop", "reversed", "padded")


@dataclass
class Sample:
    """One sample as the trainer holds it; token columns in the dtype that it holds them in."""

    sample_id: str
    group: str | None
    mask: list[int]
    raw_reward: float
    columns: dict[str, Tensor] = field(default_factory=dict)
    reward: float | None = None
    rollout_id: int = 0
    attempt: int | None = None
    prompt_length: int = 3
    group_size: int | None = None
    context: tuple[int | None, int | None] = (None, None)  # the shard that it is, of how many
    padded_length: int | None = None
    micro_batch_id: str | None = None
    consumer_batch_id: str | None = None
    components: dict[str, float] | None = None
    greedy_reward: float | None = None
    trajectory_id: str | None = None
    fragment_index: int | None = None
    agent_id: str | None = None
    episode_id: str | None = None
    turns: int | None = None
    first_message_length: int | None = None
    kept_baseline: float | None = None
    last_value: float | None = None
    truncated: bool | None = None
    weight_versions: list[tuple[int, int, int]] | None = None

    @property
    def length(self) -> int:
        """Response tokens."""
        return len(self.mask)

    def copy(self) -> Sample:
        """The same sample, to be changed without changing this one."""
        columns = {name: values.clone() for name, values in self.columns.items()}
        return dataclasses.replace(self, mask=list(self.mask), columns=columns)

    def floats(self, name: str) -> Tensor:
        """A token column in float32, in which the trainer computes."""
        return self.columns[name].float()


@dataclass(frozen=True)
class Arithmetic:
    """What a training computes, in the words of its command line."""

    group_size: int | None = None
    grouped: bool = True
    baseline: str = "mean"
    std: bool = True
    ddof: int = 1
    epsilon: float = 1e-6
    kl: str = "k1"
    kl_coef: float = 0.1
    eps_clip: float = 0.2
    eps_clip_high: float | None = 0.28
    entropy_coef: float = 0.01
    old_source: str = "old"

    @property
    def short(self) -> RecomputeConfig:
        """The short form of the settings."""
        return RecomputeConfig(
            n_samples_per_prompt=self.group_size,
            rewards_normalization=self.grouped,
            grpo_std_normalization=self.std,
            kl_loss_type=self.kl,
            kl_coef=self.kl_coef,
            eps_clip=self.eps_clip,
            eps_clip_high=self.eps_clip_high,
            entropy_coef=self.entropy_coef,
            use_rollout_logprobs=self.old_source == "rollout",
        )

    @property
    def full(self) -> Settings:
        """The full settings, every loss term stated."""
        return Settings(
            reward=RewardSettings(
                grouping="group" if self.grouped else "none",
                n_samples_per_prompt=self.group_size,
                baseline=self.baseline,
                divide_by_std=self.std,
                ddof=self.ddof,
                epsilon=self.epsilon,
            ),
            kl=KlSettings(self.kl, self.kl_coef, self.old_source),
            loss=LossSettings(
                eps_clip=self.eps_clip,
                eps_clip_high=self.eps_clip_high,
                entropy_coef=self.entropy_coef,
                old_source=self.old_source,
                use_kl_loss=False,
                tis=False,
                opsm=False,
                opd=False,
                per_token=False,
            ),
        )

    @property
    def old(self) -> str:
        """The column that the ratio is taken against."""
        return f"{self.old_source}_log_probs"


@dataclass(frozen=True)
class Trainer:
    """A training's arithmetic, evaluated in one of several ways that float32 allows.

    Args:
        arithmetic: What is computed.
        style: How sums are taken: torch, numpy, loop, reversed or padded.
        dtype: dtype in which KL and advantages are kept.
    """

    arithmetic: Arithmetic
    style: str = "torch"
    dtype: torch.dtype = torch.float32

    def score(self, samples: Sequence[Sample]) -> None:
        """Give each sample its processed reward."""
        groups: dict[tuple[int, str | None], list[Sample]] = {}
        for one in samples:
            groups.setdefault((one.rollout_id, one.group), []).append(one)
        for members in groups.values():
            raw = np.array([one.raw_reward for one in members], np.float32)
            rewards = self._scored(raw) if self.arithmetic.grouped else raw
            for one, reward in zip(members, rewards, strict=True):
                one.reward = float(reward)

    def _scored(self, raw: Floats) -> Floats:
        if self.style in ("torch", "padded"):
            return self._scored_by_torch(torch.from_numpy(raw))
        way = self.arithmetic
        if self.style == "numpy":
            mean = raw.mean(dtype=np.float32)
            spread = raw.std(ddof=way.ddof, dtype=np.float32) if len(raw) > way.ddof else None
        else:
            mean = self._sum(raw) / np.float32(len(raw))
            count = np.float32(len(raw) - way.ddof)
            spread = np.sqrt(self._sum((raw - mean) ** 2) / count) if count > 0 else None
        scored = raw - mean if way.baseline == "mean" else raw
        if not way.std or spread is None:
            return scored
        return np.asarray(scored / (spread + np.float32(way.epsilon)), np.float32)

    def _scored_by_torch(self, raw: Tensor) -> Floats:
        way = self.arithmetic
        centred = raw - raw.mean()
        scored = centred if way.baseline == "mean" else raw
        if way.std and len(raw) > way.ddof:
            spread = (centred if self.style == "torch" else raw).std(correction=way.ddof)
            scored = scored / (spread + way.epsilon)
        return np.asarray(scored.numpy(), np.float32)

    def estimate(self, samples: Iterable[Sample]) -> None:
        """Give each sample its KL and its advantages."""
        for one in samples:
            one.columns["kl"] = self._kl(one).to(self.dtype)
            reward = torch.tensor(one.reward, dtype=torch.float32)
            one.columns["advantages"] = reward.expand(one.length).clone().to(self.dtype)
            one.columns["returns"] = one.columns["advantages"].clone()

    def _kl(self, sample: Sample) -> Tensor:
        way = self.arithmetic
        if way.kl_coef == 0:
            return torch.zeros(sample.length)
        d = sample.floats(way.old) - sample.floats("ref_log_probs")
        if way.kl == "k1":
            return d
        if way.kl == "k2":
            return d**2 / 2.0
        estimate = torch.expm1(-d) + d if self.style == "numpy" else torch.exp(-d) - 1.0 + d
        return estimate.clamp(-10.0, 10.0) if way.kl == "low_var_kl" else estimate

    def sample_loss(self, sample: Sample, *, summed: bool = False) -> dict[str, np.float32]:
        """The masked mean, or sum, of every term of one sample's loss, in float32."""
        way = self.arithmetic
        advantages = sample.floats("advantages")
        log_ratio = sample.floats("log_probs") - sample.floats(way.old)
        ratio = torch.exp(log_ratio)
        high = way.eps_clip if way.eps_clip_high is None else way.eps_clip_high
        plain = -advantages * ratio
        bounded = -advantages * ratio.clamp(1.0 - way.eps_clip, 1.0 + high)
        tokens = {
            "pg_loss": torch.maximum(plain, bounded),
            "pg_clipfrac": (bounded > plain).float(),
            "ppo_kl": -log_ratio,
        }
        if "entropy" in sample.columns:
            tokens["entropy_loss"] = sample.floats("entropy")
        mean = {
            name: self._masked(values, sample.mask, summed=summed)
            for name, values in tokens.items()
        }
        bonus = np.float32(way.entropy_coef) * mean.get("entropy_loss", np.float32(0))
        mean["loss"] = np.float32(mean["pg_loss"] - bonus)
        return mean

    def loss(self, samples: Sequence[Sample]) -> dict[str, float]:
        """The sums over samples of their masked means, added up in float32."""
        each = [self.sample_loss(one) for one in samples]
        names = each[0].keys() if each else METRICS
        return {
            name: float(self._sum(np.array([one[name] for one in each], np.float32)))
            for name in names
        }

    def _masked(self, values: Tensor, mask: list[int], *, summed: bool) -> np.float32:
        count = np.float32(1 if summed else max(sum(mask), 1))
        if self.style == "torch":
            weights = torch.tensor(mask, dtype=torch.float32)
            return np.float32(((values * weights).sum() / float(count)).item())
        if self.style == "padded":
            padded = torch.zeros(len(mask) + 5)
            padded[: len(mask)] = values * torch.tensor(mask, dtype=torch.float32)
            return np.float32((padded * (1.0 / float(count))).sum().item())
        kept = values.numpy()[np.array(mask, bool)]
        return np.float32(self._sum(kept) / count)

    def _sum(self, values: Floats) -> np.float32:
        if self.style in ("torch", "padded"):
            return np.float32(torch.from_numpy(values).sum().item())
        if self.style == "numpy":
            return np.float32(values.sum(dtype=np.float32))
        total = np.float32(0)
        for value in values[::-1] if self.style == "reversed" else values:
            total = np.float32(total + value)
        return total
