"""A trainer for every setting: plain loops over samples and tokens in float64, rounded to float32.

It shares no code with the kernels: each rule is written from what the frameworks publish.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from tests.helpers.cohorts import Expected, Shares
from tests.helpers.reference_advantages import (
    discounted_returns,
    gae,
    normalise_rewards,
    token_rewards,
    whiten,
)
from tests.helpers.trainer import Sample
from trajreplay import Settings

Rows = list[list[float]]


def _clamped(value: float, bounds: tuple[float, float] | None) -> float:
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])


def _float32(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).float()


class ComposedTrainer:
    """Scores, estimates and sums up as its settings say.

    Args:
        settings: The arithmetic.
        shares: The samples of each rank, in row order; changed in place.
    """

    def __init__(self, settings: Settings, shares: Shares) -> None:
        self.settings = settings
        self.shares = shares
        self.samples = [one for own in shares.values() for one in own]
        self.ranks = [rank for rank, own in shares.items() for _ in own]

    def column(self, name: str) -> Rows:
        """A token column of every sample."""
        return [one.columns[name].double().tolist() for one in self.samples]

    @property
    def masks(self) -> Rows:
        """The loss mask of every sample."""
        return [[float(m) for m in one.mask] for one in self.samples]

    def score(self) -> None:
        """Give every sample its processed reward."""
        settings = self.settings.reward
        raw = [self._shaped(one) for one in self.samples]
        if settings.clip_before is not None:
            raw = [_clamped(one, settings.clip_before) for one in raw]
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
            one.reward = float(_float32([_clamped(reward, settings.clip_after)])[0])

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
            one.columns["kl"] = _float32(row)
        advantages, returns = self._estimated(self.column("kl"))
        if settings.advantage.whiten != "none":
            advantages = self._whitened(advantages)
        for one, row, target in zip(self.samples, advantages, returns, strict=True):
            clipped = [_clamped(value, settings.advantage.clip) for value in row]
            one.columns["advantages"] = _float32(clipped)
            one.columns["returns"] = _float32(target)

    def _kl(self, policy: float, reference: float) -> float:
        settings = self.settings.kl
        d = _clamped(policy - reference, settings.log_ratio_clamp)
        return _clamped(_divergence(settings.estimator, d), settings.value_clamp)

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
            lam=[settings.lam] * len(rewards),
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

    def policy_scalars(self) -> dict[int, list[Expected]]:
        """What each rank records of the policy loss."""
        terms = [self.policy_terms(row) for row in range(len(self.samples))]
        return self._recorded("loss.policy", terms)

    def policy_terms(self, row: int) -> dict[str, list[float]]:
        """What is summed up into the scalars of the policy loss, by token of one sample."""
        one, loss = self._policy_terms(row), self.settings.loss
        total = one["pg_loss"]
        for name, coef in (("entropy_loss", -loss.entropy_coef), ("kl_loss", loss.kl_loss_coef)):
            if name in one:
                total = [a + coef * b for a, b in zip(total, one[name], strict=True)]
        return one | {"loss": total}

    def value_scalars(self) -> dict[int, list[Expected]]:
        """What each rank records of the value loss."""
        settings, terms = self.settings.value, []
        for row in range(len(self.samples)):
            losses, clipped = [], []
            columns = (self.column(name)[row] for name in ("values", "old_values", "returns"))
            for v, old, target in zip(*columns, strict=True):
                plain = limited = self._distance(v - target)
                if settings.clip is not None:
                    moved = _clamped(v - old, (-settings.clip, settings.clip))
                    limited = self._distance(old + moved - target)
                losses.append(settings.factor * max(plain, limited))
                by_value = settings.clip is not None and abs(v - old) > settings.clip
                clipped.append(float(by_value if settings.counted == "value" else limited > plain))
            terms.append({"value_loss": losses, "value_clipfrac": clipped})
        return self._recorded("loss.value", terms)

    def _distance(self, error: float) -> float:
        delta = self.settings.value.huber_delta
        if delta is None or abs(error) < delta:
            return error * error
        return delta * (2.0 * abs(error) - delta)

    def _policy_terms(self, row: int) -> dict[str, list[float]]:
        loss, mask = self.settings.loss, self.masks[row]

        def get(name: str) -> list[float]:
            return self.column(name)[row]

        lp, old, roll = get("log_probs"), get("old_log_probs"), get("rollout_log_probs")
        advantages, steps = get("advantages"), range(len(lp))
        behind = old if loss.old_source == "old" else roll
        ratios = [
            0.0 if loss.ratio == "one" else _clamped(lp[t] - behind[t], loss.log_ratio_clamp)
            for t in steps
        ]
        terms: dict[str, list[float]] = {"entropy_loss": get("entropy")}
        if loss.surrogate == "reinforce":
            terms["pg_loss"] = [-advantages[t] * lp[t] for t in steps]
        else:
            terms["ppo_kl"] = [-one for one in ratios]
            counted = sum(m * one for m, one in zip(mask, ratios, strict=True))
            if loss.ratio == "sequence-sum":
                ratios = [counted] * len(ratios)
            elif loss.ratio == "sequence-mean":
                ratios = [counted / max(sum(mask), 1.0)] * len(ratios)
            scored = [self._surrogate(ratios[t], advantages[t], lp[t], behind[t]) for t in steps]
            terms["pg_loss"] = [one[0] for one in scored]
            terms["pg_clipfrac"] = [one[1] for one in scored]
        if loss.opsm_delta is not None:
            drift = sum(m * (o - p) for m, o, p in zip(mask, old, lp, strict=True))
            drift /= max(sum(mask), 1.0)
            for t in steps:
                if advantages[t] < 0 and drift > loss.opsm_delta:
                    terms["pg_loss"][t] = 0.0
        if loss.correction != "none":
            weights = self._weights([o - r for o, r in zip(old, roll, strict=True)], mask)
            terms["pg_loss"] = [w * x for w, x in zip(weights, terms["pg_loss"], strict=True)]
        if loss.kl_loss_coef:
            terms["kl_loss"] = [
                self._kl_loss(lp[t], one, old[t]) for t, one in enumerate(get("ref_log_probs"))
            ]
        return terms

    def _surrogate(
        self, log_ratio: float, a: float, lp: float, behind: float
    ) -> tuple[float, float]:
        loss, r = self.settings.loss, math.exp(log_ratio)
        low, high = 1.0 - loss.eps_clip, 1.0 + float(loss.eps_clip_high or 0.0)
        if loss.surrogate == "sapo":
            tau = loss.sapo_tau_pos if a > 0 else loss.sapo_tau_neg
            gate = 1.0 / (1.0 + math.exp(-tau * (r - 1.0)))
            return -4.0 / tau * gate * a, float(4.0 * gate * (1.0 - gate) < 0.9)
        if loss.surrogate == "cispo":
            bounded = min(max(r, low), high)
            if loss.cispo_bounds == "by-sign":
                bounded = min(r, high) if a >= 0 else max(r, low)
            elif loss.cispo_bounds == "upper-absolute":
                bounded = min(r, high - 1.0)
            counted = a > 0 or loss.cispo_bounds != "upper-absolute"
            return -bounded * a * lp, float(bounded != r and counted)
        if loss.surrogate == "dppo":
            moved, d = math.exp(lp) - math.exp(behind), lp - behind
            out = moved > high - 1.0 if a > 0 else moved < low - 1.0
            return (0.0 if out else -a * math.exp(d)) + loss.dppo_kl_tau * d * d, float(out)
        plain, clipped = -a * r, -a * min(max(r, low), high)
        worst = max(plain, clipped)
        if loss.dual_clip is not None and a < 0:
            worst = min(worst, -loss.dual_clip * a)
        return worst, float(clipped > plain)

    def _weights(self, gaps: Sequence[float], mask: Sequence[float]) -> list[float]:
        loss = self.settings.loss
        assert loss.correction_bounds is not None
        low, high = loss.correction_bounds
        total = sum(m * one for m, one in zip(mask, gaps, strict=True))
        tokens, product = [math.exp(one) for one in gaps], math.exp(total)
        if loss.correction == "tis":
            return [min(max(one, low), high) for one in tokens]
        if loss.correction == "icepop":
            return [one if low <= one <= high else 0.0 for one in tokens]
        if loss.correction == "sequence-tis":
            return [min(max(product, low), high)] * len(tokens)
        if loss.correction == "sequence-mask":
            return [product if low <= product <= high else 0.0] * len(tokens)
        mean = math.exp(total / max(sum(mask), 1.0))
        return [one if low <= mean <= high else 0.0 for one in tokens]

    def _kl_loss(self, lp: float, reference: float, old: float) -> float:
        loss = self.settings.loss
        d = _clamped(lp - reference, loss.kl_loss_log_ratio_clamp)
        kl = _divergence(loss.kl_loss_estimator, d)
        if loss.kl_loss_weighted:
            kl *= math.exp(lp - old)
        return _clamped(kl, loss.kl_loss_clamp)

    def _recorded(
        self, stage: str, terms: Sequence[Mapping[str, list[float]]]
    ) -> dict[int, list[Expected]]:
        loss = self.settings.loss
        rows: dict[int, list[int]] = defaultdict(list)
        for row, rank in enumerate(self.ranks):
            rows[rank].append(row)
        found = {}
        for rank, own in rows.items():
            values = {
                name: float(_float32([self._scalar(name, terms, own)])[0]) for name in terms[0]
            }
            meaning = {"scope": "rank", "reduction": loss.batch_reduction}
            found[rank] = [Expected(values, meaning, stage)]
        return found

    def _scalar(
        self, name: str, terms: Sequence[Mapping[str, list[float]]], rows: Sequence[int]
    ) -> float:
        loss = self.settings.loss
        sums = [
            sum(m * x for m, x in zip(self.masks[r], terms[r][name], strict=True)) for r in rows
        ]
        counts = [sum(self.masks[r]) for r in rows]
        if loss.aggregation == "seq-mean-token-mean":
            sums = [one / max(count, 1.0) for one, count in zip(sums, counts, strict=True)]
        total = math.fsum(sums)
        if loss.aggregation == "constant-norm":
            return total / float(loss.constant_norm or 1.0)
        if loss.batch_reduction == "sum":
            return total
        if loss.aggregation == "token-mean":
            return total / sum(counts)
        with_tokens = loss.denominator_rows == "with-tokens"
        return total / (sum(count > 0 for count in counts) if with_tokens else len(rows))


def _divergence(estimator: str, d: float) -> float:
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2.0
    return abs(d) if estimator == "abs" else math.exp(-d) - 1.0 + d
