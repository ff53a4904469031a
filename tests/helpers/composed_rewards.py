"""The rewards of the trainer for every setting: plain loops over samples and components."""

import math

from tests.helpers.composed_corrections import clamped, float32
from tests.helpers.composed_losses import LossTrainer, estimated_kl
from tests.helpers.reference_advantages import (
    decoupled_rewards,
    gpg_rewards,
    normalise_rewards,
    pass_at_k_rewards,
    summed_rewards,
)
from tests.helpers.trainer import Sample


class RewardTrainer(LossTrainer):
    """Scores its samples as its settings say; arguments as of `LossTrainer`."""

    def score(self) -> None:
        """Give every sample its processed reward, and one of components its raw one."""
        settings = self.settings.reward
        rewards = self._normalised() if self._by_parts else self._scored(self._raw())
        for one, reward in zip(self.samples, rewards, strict=True):
            one.reward = float(float32([clamped(reward, settings.clip_after)])[0])

    @property
    def _by_parts(self) -> bool:
        return self.settings.reward.combination == "normalise-then-sum"

    @property
    def _parts(self) -> list[list[float]]:
        names = sorted(self.settings.reward.weights)
        return [
            [self.number((one.components or {}).get(name, math.nan)) for name in names]
            for one in self.samples
        ]

    @property
    def _given_weights(self) -> list[float]:
        weights = self.settings.reward.weights
        return [weights[name] for name in sorted(weights)]

    def _raw(self) -> list[float]:
        settings = self.settings.reward
        if settings.weights:
            sums = summed_rewards(self._parts, self._given_weights, missing=settings.missing)
            for one, total in zip(self.samples, sums, strict=True):
                one.raw_reward = float(float32([total])[0])
        if settings.source == "token":
            for one in self.samples:
                total = math.fsum(one.columns["token_rewards"].double().tolist())
                one.raw_reward = float(float32([total])[0])
        raw = [clamped(self._shaped(one), settings.clip_before) for one in self.samples]
        if settings.less_kl:
            raw = [one - self._paid(row) for row, one in enumerate(raw)]
        if settings.unit != "step":
            return raw
        returns = []
        for one in self.samples:
            place, total = int(one.fragment_index or 0), 0.0
            for other, reward in zip(self.samples, raw, strict=True):
                ahead = int(other.fragment_index or 0) - place
                if other.trajectory_id == one.trajectory_id and ahead >= 0:
                    total += settings.step_gamma**ahead * reward
            returns.append(total)
        return returns

    def _paid(self, row: int) -> float:
        """What the KL of its trained tokens costs a sample."""
        kl, own = self.settings.kl, self.samples[row]
        policy, reference = (
            self.column(name)[row] for name in (f"{kl.policy_source}_log_probs", "ref_log_probs")
        )
        tokens = [
            estimated_kl(kl, p, r) for p, r, m in zip(policy, reference, own.mask, strict=True) if m
        ]
        return kl.coef * math.fsum(tokens)

    def _less_costs(self, raw: list[float]) -> list[float]:
        groups, weights = self.groups(), self.settings.reward.costs
        spent = [
            {
                "output": sum(one.mask),
                "input": one.prompt_length + one.length - sum(one.mask),
                "turns": one.turns or 0,
            }
            for one in self.samples
        ]
        found = []
        for row, group in enumerate(groups):
            peers = [other for other, number in enumerate(groups) if number == group]
            mean = math.fsum(raw[other] for other in peers) / len(peers)
            share = 0.0
            for name, weight in weights.items():
                share += weight * spent[row][name] / max(1, *(spent[one][name] for one in peers))
            found.append(raw[row] - mean * share)
        return found

    def _scored(self, raw: list[float]) -> list[float]:
        settings = self.settings.reward
        if settings.costs:
            raw = self._less_costs(raw)
        if settings.baseline == "kept":
            pairs = zip(raw, self.samples, strict=True)
            return [reward - (one.kept_baseline or 0.0) for reward, one in pairs]
        if settings.grouping == "none":
            return raw
        groups, batch = self.groups(), [0] * len(raw)
        if settings.rule == "gpg":
            return self.gpg(raw, groups, batch)
        if settings.rule == "pass@k":
            return self.pass_at_k(raw, groups)
        scored = self.normalise(
            raw,
            groups,
            baseline=settings.baseline,
            divisor=settings.divisor if settings.divide_by_std else "none",
            divisor_index={"batch": batch, "group": self.prompts()}.get(settings.std_grouping),
            ddof=settings.ddof,
            epsilon=settings.epsilon,
            epsilon_place=settings.epsilon_place,
            lone=settings.lone,
            missing=settings.missing,
            lengths=self._weighed_by(settings.baseline_counts),
            greedy_rewards=[one.greedy_reward or 0.0 for one in self.samples],
        )
        return scored if settings.rescale == "none" else self._rescaled(raw, scored)

    def _weighed_by(self, counts: str) -> list[float]:
        if counts == "response":
            return [one.length for one in self.samples]
        return [sum(row) for row in (self.summed if counts == "kept" else self.masks)]

    normalise = staticmethod(normalise_rewards)
    decouple = staticmethod(decoupled_rewards)

    def gpg(self, raw: list[float], groups: list[int], batch: list[int]) -> list[float]:
        """Rewards by the rule gpg."""
        return gpg_rewards(raw, groups, batch, self.settings.reward.gpg_norm)

    def pass_at_k(self, raw: list[float], groups: list[int]) -> list[float]:
        """Rewards by the rule pass@k."""
        own = self.settings.reward
        return pass_at_k_rewards(raw, groups, divide_by_std=own.divide_by_std, epsilon=own.epsilon)

    def _rescaled(self, raw: list[float], scored: list[float]) -> list[float]:
        settings = self.settings.reward
        excluded = settings.missing == "exclude"
        there = [
            one
            for one, reward in zip(scored, raw, strict=True)
            if not excluded or not (math.isnan(reward) or math.isnan(one))
        ]
        mean = math.fsum(there) / max(len(there), 1)
        squares = math.fsum((one - mean) ** 2 for one in there)
        free = len(there) - settings.ddof
        std = math.sqrt(squares / free) if free > 0 else math.nan
        found = []
        for one, reward in zip(scored, raw, strict=True):
            left_out = excluded and (math.isnan(reward) or math.isnan(one))
            score = (one - mean) / (std + (settings.batch_epsilon or 0.0))
            found.append(0.0 if left_out or free <= 0 else score)
        return found

    def _normalised(self) -> list[float]:
        settings = self.settings.reward
        return self.decouple(
            self._parts,
            self._given_weights,
            self.groups(),
            batch_index=[0] * len(self.samples),
            batch_epsilon=settings.batch_epsilon,
            missing=settings.missing,
            baseline=settings.baseline,
            divisor=settings.divisor if settings.divide_by_std else "none",
            ddof=settings.ddof,
            epsilon=settings.epsilon,
            lone=settings.lone,
        )

    def _shaped(self, sample: Sample) -> float:
        settings, reward = self.settings.reward, self.number(sample.raw_reward)
        if settings.scale_from is not None and settings.scale_to is not None:
            (low, high), (least, most) = settings.scale_from, settings.scale_to
            share = (min(max(reward, low), high) - low) / (high - low)
            reward = least + share * (most - least)
        if settings.overlong_max_length is not None:
            start = settings.overlong_max_length - settings.overlong_buffer
            counts = {
                "response": sample.length,
                "trained": sum(sample.mask),
                "first-message": sample.first_message_length or 0,
            }
            over = counts[settings.overlong_counts] - start
            if settings.overlong_floored:
                over = min(over, settings.overlong_buffer)
            reward += min(-over / settings.overlong_buffer * settings.overlong_penalty, 0.0)
        if settings.stop_properly_coef is not None and sample.truncated:
            kept = reward if settings.stop_properly_rule == "multiply" else 1.0
            reward = kept * settings.stop_properly_coef
        return (reward + settings.bias) * settings.factor

    def groups(self) -> list[int]:
        """The group that each sample is scored in."""
        settings = self.settings.reward
        if settings.grouping == "batch":
            return [0] * len(self.samples)
        if settings.grouping == "stride":
            places = [row for own in self.shares.values() for row in range(len(own))]
            size = settings.n_samples_per_prompt or 1
            keys = [(rank, row // size) for rank, row in zip(self.ranks, places, strict=True)]
        elif settings.grouping == "agent":
            names = [
                (prompt, str(one.agent_id), str(one.episode_id) * alone)
                for prompt, one in zip(self.prompts(), self.samples, strict=True)
                for alone in [str(one.agent_id) in settings.episode_agents]
            ]
            return [sorted(set(names)).index(one) for one in names]
        else:
            steps = [int(one.fragment_index or 0) for one in self.samples]
            if settings.unit != "step":
                steps = [0] * len(steps)
            keys = list(zip(steps, self.prompts(), strict=True))
        return [sorted(set(keys)).index(one) for one in keys]

    def prompts(self) -> list[int]:
        """The prompt of each sample."""
        return [int(str(one.group).removeprefix("g-")) for one in self.samples]
