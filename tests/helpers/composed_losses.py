"""The losses of the trainer for every setting: plain loops over samples and tokens."""

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tests.helpers.cohorts import Expected
from tests.helpers.composed_corrections import Rows, clamped
from tests.helpers.composed_surrogates import SurrogateRows
from tests.helpers.reference_means import held
from trajreplay.schema import KlSettings


def divergence(estimator: str, d: float) -> float:
    """A KL estimate of one log ratio."""
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2.0
    return abs(d) if estimator == "abs" else math.exp(-d) - 1.0 + d


def estimated_kl(settings: KlSettings, policy: float, reference: float) -> float:
    """The KL of a token, as settings say."""
    clamps = settings.clamped == "every" or settings.estimator in ("k3", "low_var_kl")
    if not clamps:
        return divergence(settings.estimator, policy - reference)
    d = clamped(policy - reference, settings.log_ratio_clamp)
    return clamped(divergence(settings.estimator, d), settings.value_clamp)


class LossTrainer(SurrogateRows):
    """Samples on their ranks, and the scalars that each rank records of its losses."""

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
        terms = [self.value_terms(row) for row in range(len(self.samples))]
        return self._recorded("loss.value", terms)

    def value_terms(self, row: int) -> dict[str, list[float]]:
        """What is summed up into the scalars of the value loss, by token of one sample."""
        settings = self.settings.value
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
        return {"value_loss": losses, "value_clipfrac": clipped}

    def _distance(self, error: float) -> float:
        delta = self.settings.value.huber_delta
        if delta is None or abs(error) < delta:
            return error * error
        return delta * (2.0 * abs(error) - delta)

    def _policy_terms(self, row: int) -> dict[str, list[float]]:
        loss, mask = self.settings.loss, self.counted[row]

        def get(name: str) -> list[float]:
            return self.column(name)[row]

        lp, old, roll = get("log_probs"), self.proximal[row], get("rollout_log_probs")
        terms: dict[str, list[float]] = {"entropy_loss": get("entropy")}
        ratios = [0.0] * len(lp)
        if loss.ratio != "one":
            behind = old if loss.old_source == "old" else roll
            pairs = zip(lp, behind, strict=True)
            ratios = [clamped(a - b, loss.log_ratio_clamp) for a, b in pairs]
        if loss.surrogate != "reinforce":
            measured = abs if loss.kl_cov_ppo_kl == "absolute" else operator.neg
            of_all = loss.surrogate == "kl-cov"
            terms["ppo_kl"] = [measured(one) if of_all else -one for one in ratios]
        ratios = self.of_sample(ratios, mask)
        terms |= self.scored(row, ratios)
        if loss.opsm_delta is not None:
            then = old if loss.opsm_source == "old" else roll
            drift = sum(m * (o - p) for m, o, p in zip(mask, then, lp, strict=True))
            far = drift / max(sum(mask), 1.0) > loss.opsm_delta
            terms["pg_loss"] = [
                0.0 if far and a < 0 else one
                for a, one in zip(get("advantages"), terms["pg_loss"], strict=True)
            ]
        if loss.correction != "none" and loss.surrogate != "vespo":
            pairs = zip(self.weights[row], terms["pg_loss"], strict=True)
            terms["pg_loss"] = [w * x for w, x in pairs]
        if loss.kl_loss_coef:
            terms["kl_loss"] = self._kl_losses(row, ratios)
        return terms

    def _kl_losses(self, row: int, ratios: Sequence[float]) -> list[float]:
        loss, lp = self.settings.loss, self.column("log_probs")[row]
        powers = list(ratios)
        if loss.kl_loss_weight != "ratio":
            other = self.behind(loss.kl_loss_weight)[row]
            powers = [a - b for a, b in zip(lp, other, strict=True)]
        rows = zip(lp, self.column("ref_log_probs")[row], powers, strict=True)
        return [self._kl_loss(*one) for one in rows]

    def _kl_loss(self, lp: float, reference: float, power: float) -> float:
        loss = self.settings.loss
        clamps = loss.kl_loss_clamped == "every"
        clamps |= loss.kl_loss_estimator in ("k3", "low_var_kl")
        d = clamped(lp - reference, loss.kl_loss_log_ratio_clamp if clamps else None)
        kl = divergence(loss.kl_loss_estimator, d)
        if loss.kl_loss_weighted:
            weight, undefined = math.exp(power), loss.undefined_weight
            if undefined is not None and loss.kl_loss_weight == "rollout":
                weight = held(weight, undefined)
            kl *= weight
        return clamped(kl, loss.kl_loss_clamp if clamps else None)

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
                name: float(np.float32(self.scalar(stage, name, terms, own))) for name in terms[0]
            }
            meaning = {"scope": "rank", "reduction": loss.batch_reduction}
            found[rank] = [Expected(values, meaning, stage)]
        return found

    def scalar(
        self, stage: str, name: str, terms: Sequence[Mapping[str, list[float]]], rows: list[int]
    ) -> float:
        """One scalar over some samples, from its terms by token of every sample."""
        loss = self.settings.loss
        if name == "loss":
            added = {"pg_loss": 1.0, "entropy_loss": -loss.entropy_coef}
            added["kl_loss"] = loss.kl_loss_coef
            parts = [
                coef * self.scalar(stage, one, terms, rows)
                for one, coef in added.items()
                if one in terms[0]
            ]
            nll = loss.nll_coef * self._nll(rows) if loss.nll_coef else 0.0
            return math.fsum(parts) + nll
        if self._way(stage, name)[1] == "micro-batch":
            return self._of_means(stage, name, terms, rows)
        return self._mean(stage, name, terms, rows)

    def _way(self, stage: str, name: str) -> tuple[str, str]:
        """How a scalar becomes one number: its aggregation, and what its mean is over."""
        loss, value = self.settings.loss, self.settings.value
        kind, over = "same", "same"
        if name == "entropy_loss":
            kind, over = loss.entropy_aggregation, loss.entropy_mean_over
        elif name == "kl_loss":
            kind, over = loss.kl_loss_aggregation, loss.kl_loss_mean_over
        elif name not in ("pg_loss", "value_loss"):
            kind = loss.metrics_aggregation
        if stage == "loss.value":
            kind = value.aggregation if kind == "same" else kind
            over = value.mean_over
        return (
            loss.aggregation if kind == "same" else kind,
            loss.mean_over if over == "same" else over,
        )

    def _nll(self, rows: list[int]) -> float:
        """The sum over micro-batches of the mean of -log pi in samples that scored."""
        total = 0.0
        for batch in {self.batches[row] for row in rows}:
            tokens = [
                -lp
                for row in rows
                if self.batches[row] == batch and self.samples[row].raw_reward > 0
                for lp, m in zip(self.column("log_probs")[row], self.summed[row], strict=True)
                if m
            ]
            total += math.fsum(tokens) / max(len(tokens), 1)
        return total

    def _of_means(
        self, stage: str, name: str, terms: Sequence[Mapping[str, list[float]]], rows: list[int]
    ) -> float:
        """The mean over the means of micro-batches."""
        total, divisor = 0.0, 0.0
        for batch in {self.batches[row] for row in rows}:
            mine = [row for row in rows if self.batches[row] == batch]
            weight = {
                "equal": 1.0,
                "rows": float(len(mine)),
                "tokens": sum(sum(self.masks[row]) for row in mine),
            }[self.settings.loss.micro_batch_weight]
            total += weight * self._mean(stage, name, terms, mine)
            divisor += weight
        return total / divisor

    def _mean(
        self, stage: str, name: str, terms: Sequence[Mapping[str, list[float]]], rows: list[int]
    ) -> float:
        loss, policy = self.settings.loss, stage == "loss.policy"
        summed, counted = (self.summed, self.counted) if policy else (self.valued, self.valued)
        sums = [sum(m * x for m, x in zip(summed[r], terms[r][name], strict=True)) for r in rows]
        counts = [sum(counted[r]) for r in rows]
        aggregation = self._way(stage, name)[0]
        if aggregation == "seq-mean-token-mean":
            whole = [self._shared_tokens(row, counted) for row in rows]
            sums = [one / self.divided(count) for one, count in zip(sums, whole, strict=True)]
        total = math.fsum(sums)
        with_tokens = loss.denominator_rows == "with-tokens"
        members = [row if loss.fragments == "own" else self._trajectory(row) for row in rows]
        pairs = zip(members, counts, strict=True)
        there = len({one for one, count in pairs if count > 0 or not with_tokens})
        if loss.denominator_rows == "kept":
            there = sum(1 for row in rows if any(counted[row]) or not any(self.masks[row]))
        if aggregation == "constant-norm":
            total /= float(loss.constant_norm or 1.0)
            return total / there if loss.constant_norm_by_rows else total
        if loss.batch_reduction == "sum":
            return total
        if aggregation == "token-mean":
            least = 1.0 if loss.token_count == "at-least-one" else 0.0
            return total / (
                (sum(max(count, least) for count in counts) or 1.0) + loss.count_epsilon
            )
        return total / ((there or 1.0) + loss.count_epsilon)

    @property
    def valued(self) -> Rows:
        """The mask of the value loss."""
        counts = self.settings.value.counts
        if counts == "response":
            return [[1.0] * one.length for one in self.samples]
        return self.summed if counts == "kept" else self.masks

    def _trajectory(self, row: int) -> tuple[int, str | None]:
        """Whose fragment a sample is: rollouts name their trajectories each for itself."""
        return self.samples[row].rollout_id, self.samples[row].trajectory_id

    def _shared_tokens(self, row: int, counted: Sequence[Sequence[float]]) -> float:
        """The tokens that the mean of a sample divides by: its own, or of its trajectory."""
        if self.settings.loss.fragments == "own":
            return sum(counted[row])
        mine = self._trajectory(row)
        others = [r for r in range(len(self.samples)) if self._trajectory(r) == mine]
        return sum(sum(counted[other]) for other in others)
