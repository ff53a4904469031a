"""A trainer for every setting: plain loops over samples and tokens in float64, rounded to float32.

It shares no code with the kernels: each rule is written from what the frameworks publish.
"""

from tests.helpers.composed_corrections import Rows, clamped, float32
from tests.helpers.composed_losses import LossTrainer, divergence
from tests.helpers.reference_advantages import (
    discounted_returns,
    gae,
    normalise_rewards,
    token_rewards,
    whiten,
)
from tests.helpers.trainer import Sample


class ComposedTrainer(LossTrainer):
    """Scores, estimates and sums up as its settings say.

    Args:
        settings: The arithmetic.
        shares: The samples of each rank, in row order; changed in place.
    """

    def score(self) -> None:
        """Give every sample its processed reward."""
        settings = self.settings.reward
        raw = [self._shaped(one) for one in self.samples]
        if settings.clip_before is not None:
            raw = [clamped(one, settings.clip_before) for one in raw]
        rewards = raw
        if settings.grouping != "none":
            rewards = normalise_rewards(
                raw,
                self._groups(),
                baseline=settings.baseline,
                divisor=settings.divisor if settings.divide_by_std else "none",
                divisor_index=[0] * len(raw) if settings.std_grouping == "batch" else None,
                ddof=settings.ddof,
                epsilon=settings.epsilon,
                epsilon_place=settings.epsilon_place,
                lone=settings.lone,
                missing=settings.missing,
                lengths=[one.length for one in self.samples],
            )
        for one, reward in zip(self.samples, rewards, strict=True):
            one.reward = float(float32([clamped(reward, settings.clip_after)])[0])

    def _shaped(self, sample: Sample) -> float:
        settings, reward = self.settings.reward, sample.raw_reward
        if settings.overlong_max_length is not None:
            start = settings.overlong_max_length - settings.overlong_buffer
            over = sample.length - start
            if settings.overlong_floored:
                over = min(over, settings.overlong_buffer)
            reward += min(-over / settings.overlong_buffer * settings.overlong_penalty, 0.0)
        return reward

    def _groups(self) -> list[int]:
        settings = self.settings.reward
        if settings.grouping == "batch":
            return [0] * len(self.samples)
        if settings.grouping == "stride":
            places = [row for own in self.shares.values() for row in range(len(own))]
            size = settings.n_samples_per_prompt or 1
            keys = [(rank, row // size) for rank, row in zip(self.ranks, places, strict=True)]
        else:
            keys = [(0, int(str(one.group).removeprefix("g-"))) for one in self.samples]
        return [sorted(set(keys)).index(one) for one in keys]

    def estimate(self) -> None:
        """Give every sample its KL, advantages and returns."""
        settings = self.settings
        policy = self.column(f"{settings.kl.policy_source}_log_probs")
        kl = [
            [self._kl(p, r) if settings.kl.coef else 0.0 for p, r in zip(ps, rs, strict=True)]
            for ps, rs in zip(policy, self.column("ref_log_probs"), strict=True)
        ]
        for one, row in zip(self.samples, kl, strict=True):
            one.columns["kl"] = float32(row)
        advantages, returns = self._estimated(self.column("kl"))
        if settings.advantage.whiten != "none":
            advantages = self._whitened(advantages)
        for one, row, target in zip(self.samples, advantages, returns, strict=True):
            clipped = [clamped(value, settings.advantage.clip) for value in row]
            one.columns["advantages"] = float32(clipped)
            one.columns["returns"] = float32(target)

    def _kl(self, policy: float, reference: float) -> float:
        settings = self.settings.kl
        d = clamped(policy - reference, settings.log_ratio_clamp)
        return clamped(divergence(settings.estimator, d), settings.value_clamp)

    def _estimated(self, kl: Rows) -> tuple[Rows, Rows]:
        settings, masks = self.settings.advantage, self.masks
        coef = self.settings.kl.coef if settings.kl_in_reward else 0.0
        rewards = [float(one.reward or 0.0) for one in self.samples]
        if settings.estimator in ("grpo", "reinforce++-baseline"):
            paid = coef if settings.estimator != "grpo" else 0.0
            both = [
                [reward - paid * one for one in row]
                for reward, row in zip(rewards, kl, strict=True)
            ]
            return both, both
        tokens = token_rewards(
            rewards, masks, kl, reward_at=settings.reward_at, kl_coef=coef, kl_masked=True
        )
        gamma = [settings.gamma] * len(rewards)
        if settings.estimator == "reinforce++":
            returns = discounted_returns(tokens, masks, gamma=gamma, masking=settings.masking)
            return returns, returns
        return gae(
            tokens,
            self.column("old_values"),
            masks,
            gamma=gamma,
            lam=[
                settings.lam
                if settings.lam_alpha is None
                else 1.0 - 1.0 / max(settings.lam_alpha * one.length, 1.0)
                for one in self.samples
            ],
            masking=settings.masking,
            bootstrap=[0.0] * len(rewards),
        )

    def _whitened(self, advantages: Rows) -> Rows:
        settings, masks = self.settings.advantage, self.masks
        by_rank = settings.whiten == "rank"
        index = [
            rank if by_rank else 0
            for rank, row in zip(self.ranks, advantages, strict=True)
            for _ in row
        ]
        flat = whiten(
            [one for row in advantages for one in row],
            [one for row in masks for one in row],
            index,
            scale=settings.whiten_scale,
            form=settings.whiten_form,
            ddof=settings.whiten_ddof,
            epsilon=settings.whiten_epsilon,
            short=settings.whiten_short,
            zero_masked=False,
        )
        rows, start = [], 0
        for row in advantages:
            rows.append(flat[start : start + len(row)])
            start += len(row)
        return rows
