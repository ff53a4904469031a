"""The losses of the trainer for every setting: plain loops over samples and tokens."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from tests.helpers.cohorts import Expected, Shares
from tests.helpers.reference_losses import kl_cov_gates, m2po_bounds
from tests.helpers.trainer import Sample
from trajreplay import Settings

Rows = list[list[float]]


def clamped(value: float, bounds: tuple[float, float] | None) -> float:
    """A value within bounds, where there are some."""
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])


def float32(values: Sequence[float]) -> torch.Tensor:
    """Values as a training in float32 records them."""
    return torch.tensor(values, dtype=torch.float64).float()


def divergence(estimator: str, d: float) -> float:
    """A KL estimate of one log ratio."""
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2.0
    return abs(d) if estimator == "abs" else math.exp(-d) - 1.0 + d


class LossTrainer:
    """Samples on their ranks, and the scalars that each rank records of its losses.

    Args:
        settings: The arithmetic.
        shares: The samples of each rank, in row order.
    """

    def __init__(self, settings: Settings, shares: Shares) -> None:
        self.settings = settings
        self.shares = shares
        self.samples: list[Sample] = [one for own in shares.values() for one in own]
        self.ranks = [rank for rank, own in shares.items() for _ in own]

    def column(self, name: str) -> Rows:
        """A token column of every sample."""
        return [one.columns[name].double().tolist() for one in self.samples]

    @property
    def masks(self) -> Rows:
        """The loss mask of every sample."""
        return [[float(m) for m in one.mask] for one in self.samples]

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
                    moved = clamped(v - old, (-settings.clip, settings.clip))
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
            0.0 if loss.ratio == "one" else clamped(lp[t] - behind[t], loss.log_ratio_clamp)
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
            if loss.surrogate in ("m2po", "kl-cov"):
                terms |= self._of_batches(row, ratios)
            elif loss.surrogate in ("gmpo", "vespo"):
                terms |= self._of_samples(ratios, advantages, lp, mask)
            else:
                scored = [
                    self._surrogate(ratios[t], advantages[t], lp[t], behind[t]) for t in steps
                ]
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

    def _of_batches(self, row: int, ratios: Sequence[float]) -> dict[str, list[float]]:
        """M2PO and KL-Cov: which of all tokens of a micro-batch are clipped or penalised."""
        loss, mine = self.settings.loss, (self.ranks[row], self.samples[row].micro_batch_id)
        rows = [
            other
            for other, one in enumerate(self.samples)
            if (self.ranks[other], one.micro_batch_id) == mine
        ]
        flat: dict[str, list[float]] = {
            name: [x for other in rows for x in self.column(name)[other]]
            for name in ("log_probs", "old_log_probs", "advantages")
        }
        masks = [m for other in rows for m in self.masks[other]]
        trained = [t for t, m in enumerate(masks) if m]
        start = sum(self.samples[other].length for other in rows if other < row)
        if loss.surrogate == "kl-cov":
            gates = kl_cov_gates(
                flat["log_probs"], flat["advantages"], trained, fraction=loss.kl_cov_fraction
            )
            return {
                "pg_loss": [
                    -a * math.exp(d) + (start + t in gates) * loss.kl_cov_coef * abs(d)
                    for t, (a, d) in enumerate(
                        zip(self.column("advantages")[row], ratios, strict=True)
                    )
                ]
            }
        gaps = [p - o for p, o in zip(flat["log_probs"], flat["old_log_probs"], strict=True)]
        low, high, _, _ = m2po_bounds(
            gaps, flat["advantages"], trained, budget=loss.m2po_kl2_budget
        )
        losses, clipped = [], []
        for a, one in zip(self.column("advantages")[row], ratios, strict=True):
            r = math.exp(one)
            plain, bounded = -a * r, -a * min(max(r, 1.0 - low), 1.0 + high)
            losses.append(max(plain, bounded))
            clipped.append(float(bounded > plain))
        return {"pg_loss": losses, "pg_clipfrac": clipped}

    def _of_samples(
        self,
        ratios: Sequence[float],
        advantages: Sequence[float],
        lp: Sequence[float],
        mask: Sequence[float],
    ) -> dict[str, list[float]]:
        """GMPO and VESPO: one factor for all tokens of a sample."""
        loss, count = self.settings.loss, max(sum(mask), 1.0)
        trained = [t for t, m in enumerate(mask) if m]
        if loss.surrogate == "vespo":
            total = sum(clamped(ratios[t], (-20.0, 20.0)) for t in trained)
            log_w = clamped(total, (math.log(1e-8), 20.0))
            losses = []
            for a, one in zip(advantages, lp, strict=True):
                k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
                phi = math.exp(rate + k * log_w - rate * math.exp(log_w))
                losses.append(-phi * a * one)
            return {"pg_loss": losses}
        low, high = -loss.eps_clip, float(loss.eps_clip_high or 0.0)
        bounded = []
        for t in trained:
            sign = math.copysign(1.0, advantages[t]) if advantages[t] else 0.0
            bounded.append(sign * min(sign * ratios[t], sign * clamped(ratios[t], (low, high))))
        mean = sum(advantages[t] for t in trained) / count
        return {"pg_loss": [-mean * math.exp(sum(bounded) / count)] * len(mask)}

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
        d = clamped(lp - reference, loss.kl_loss_log_ratio_clamp)
        kl = divergence(loss.kl_loss_estimator, d)
        if loss.kl_loss_weighted:
            kl *= math.exp(lp - old)
        return clamped(kl, loss.kl_loss_clamp)

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
                name: float(float32([self._scalar(name, terms, own)])[0]) for name in terms[0]
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
