"""The surrogates of the trainer for every setting: plain loops over samples and tokens."""

import math
from collections.abc import Sequence

from tests.helpers.composed_corrections import LossRows, clamped
from tests.helpers.reference_losses import dppo_gated, kl_cov_gates, m2po_bounds


class SurrogateRows(LossRows):
    """Samples on their ranks, and what the surrogate of a loss makes of each token."""

    def scored(self, row: int, ratios: list[float]) -> dict[str, list[float]]:
        """The surrogate of one sample, token by token."""
        loss, mask = self.settings.loss, self.counted[row]
        lp, advantages = self.column("log_probs")[row], self.column("advantages")[row]
        if loss.advantage_level == "sequence-mean":
            total = sum(m * a for m, a in zip(mask, advantages, strict=True))
            advantages = [total / self.divided(sum(mask))] * len(advantages)
        if loss.surrogate == "reinforce":
            return {"pg_loss": [-a * one for a, one in zip(advantages, lp, strict=True)]}
        if loss.surrogate in ("m2po", "kl-cov"):
            return self._of_batches(row, ratios)
        if loss.surrogate in ("gmpo", "vespo"):
            return self._of_samples(row, ratios, advantages, lp)
        behind = self.behind(loss.old_source)[row]
        tokens = zip(ratios, advantages, lp, behind, strict=True)
        scored = [self._surrogate(*one) for one in tokens]
        return {
            "pg_loss": [one[0] for one in scored],
            "pg_clipfrac": [one[1] for one in scored],
        }

    def of_sample(self, ratios: list[float], mask: Sequence[float]) -> list[float]:
        """The log ratios that are scored: of tokens, or that of the sample for each."""
        loss = self.settings.loss
        if not loss.ratio.startswith("sequence"):
            return ratios
        total = sum(m * one for m, one in zip(mask, ratios, strict=True))
        if loss.ratio == "sequence-mean":
            total /= self.divided(sum(mask))
        return [clamped(total, loss.sequence_log_ratio_clamp)] * len(ratios)

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
            for name in ("log_probs", "advantages")
        }
        behind = [x for other in rows for x in self.behind(loss.old_source)[other]]
        masks = [m for other in rows for m in self.counted[other]]
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
        gaps = [p - o for p, o in zip(flat["log_probs"], behind, strict=True)]
        low, high, _, _ = m2po_bounds(
            gaps,
            flat["advantages"],
            trained if loss.m2po_counts == "trained" else range(len(masks)),
            budget=loss.m2po_kl2_budget,
            least=(loss.m2po_least_low, loss.m2po_least_high),
        )
        losses, clipped = [], []
        for a, one in zip(self.column("advantages")[row], ratios, strict=True):
            r = math.exp(one)
            plain, bounded = -a * r, -a * min(max(r, 1.0 - low), 1.0 + high)
            losses.append(max(plain, bounded))
            clipped.append(float(bounded > plain))
        return {"pg_loss": losses, "pg_clipfrac": clipped}

    def _of_samples(
        self, row: int, ratios: Sequence[float], advantages: Sequence[float], lp: Sequence[float]
    ) -> dict[str, list[float]]:
        """GMPO and VESPO: one factor for all tokens of a sample."""
        loss, mask = self.settings.loss, self.counted[row]
        count, trained = self.divided(sum(mask)), [t for t, m in enumerate(mask) if m]
        if loss.surrogate == "vespo":
            total = sum(clamped(ratios[t], (-20.0, 20.0)) for t in trained)
            if loss.correction != "none":
                weights = [max(self.weights[row][t], 1e-8) for t in trained]
                total += sum(math.log(one) for one in weights)
            log_w = clamped(total, (math.log(1e-8), 20.0))
            losses = []
            for a, one in zip(advantages, lp, strict=True):
                k, rate = loss.vespo_k_neg, loss.vespo_lambda_neg
                if a >= 0:
                    k, rate = loss.vespo_k_pos, loss.vespo_lambda_pos
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
            flat = loss.sapo_clipped == "slope" and 4.0 * gate * (1.0 - gate) < 0.9
            return -4.0 / tau * gate * a, float(flat)
        if loss.surrogate == "cispo":
            bounded = min(max(r, low), high)
            if loss.cispo_bounds == "by-sign":
                bounded = min(r, high) if a >= 0 else max(r, low)
            elif loss.cispo_bounds == "upper-absolute":
                bounded = min(r, high - 1.0)
            counted = a > 0 or loss.cispo_bounds != "upper-absolute"
            return -bounded * a * lp, float(bounded != r and counted)
        if loss.surrogate == "dro":
            return -a * lp + 0.5 * loss.dro_beta * log_ratio**2, 0.0
        if loss.surrogate == "dppo":
            rule, measure = loss.dppo_rule, loss.dppo_measure
            bounds = {"low": loss.eps_clip, "high": float(loss.eps_clip_high or 0.0)}
            out = dppo_gated(lp, behind, a, rule=rule, measure=measure, **bounds)
            a *= loss.dppo_adv_tau
            if loss.dppo_form == "log-prob":
                cap = math.inf if loss.dppo_ratio_cap is None else loss.dppo_ratio_cap
                return (0.0 if out else -a * min(r, cap) * lp), float(out)
            d = lp - behind
            return (0.0 if out else -a * math.exp(d)) + loss.dppo_kl_tau * d * d, float(out)
        plain, clipped = -a * r, -a * min(max(r, low), high)
        worst = max(plain, clipped)
        if loss.dual_clip is not None and loss.dual_side == "both":
            return max(-a * min(r, loss.dual_clip), clipped), float(clipped > plain)
        if loss.dual_clip is not None and a < 0:
            worst = min(worst, -loss.dual_clip * a)
        return worst, float(clipped > plain)
