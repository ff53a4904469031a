"""A trainer for every setting: plain loops over samples and tokens in float64, rounded to float32.

It shares no code with the kernels: each rule is written from what the frameworks publish.
"""

from tests.helpers.composed_corrections import Rows, clamped
from tests.helpers.composed_losses import estimated_kl
from tests.helpers.composed_rewards import RewardTrainer
from tests.helpers.reference_advantages import (
    discounted_returns,
    gae,
    optimal_token_advantages,
    token_rewards,
    whiten,
)


class ComposedTrainer(RewardTrainer):
    """Scores, estimates and sums up as its settings say.

    Args:
        settings: The arithmetic.
        shares: The samples of each rank, in row order; changed in place.
    """

    def estimate(self) -> None:
        """Give every sample its KL, advantages and returns."""
        settings = self.settings
        policy = self.column(f"{settings.kl.policy_source}_log_probs")
        kl = [
            [
                estimated_kl(settings.kl, p, r) if settings.kl.coef else 0.0
                for p, r in zip(ps, rs, strict=True)
            ]
            for ps, rs in zip(policy, self.column("ref_log_probs"), strict=True)
        ]
        self.record("kl", kl)
        advantages, returns = self._estimated(self.column("kl"))
        if settings.advantage.opd_coef:
            advantages = self._distilled(advantages)
            returns = advantages if settings.advantage.estimator == "opd" else returns
        if settings.advantage.whiten != "none":
            advantages = self._whitened(advantages)
            of_none = settings.advantage.estimator in ("grpo", "reinforce++-baseline", "opd")
            if of_none and settings.advantage.returns == "whitened":
                returns = advantages
        rows = []
        for one, row in zip(self.samples, advantages, strict=True):
            faults = (
                one.columns["message_faults"].tolist() if "message_faults" in one.columns else []
            )
            rows.append(
                [clamped(value, settings.advantage.clip) for value in self._overridden(faults, row)]
            )
        self.record("advantages", rows)
        self.record("returns", returns)

    @property
    def estimating(self) -> Rows:
        """The mask of what returns and statistics are of."""
        return self.summed if self.settings.advantage.counts == "kept" else self.masks

    def _distilled(self, advantages: Rows) -> Rows:
        coef, policy = self.settings.advantage.opd_coef, self.settings.kl.policy_source
        columns = self.column(f"{policy}_log_probs"), self.column("teacher_log_probs")
        return [
            [a - coef * (p - t) for a, p, t in zip(*row, strict=True)]
            for row in zip(advantages, *columns, strict=True)
        ]

    def _overridden(self, faults: list[int], row: list[float]) -> list[float]:
        settings = self.settings.advantage
        given = {1: settings.invalid_tool_call, 2: settings.malformed_thinking}
        found = list(row)
        for token, fault in enumerate(faults):
            override = given.get(fault)
            if override is not None:
                found[token] = override
        return found

    def _estimated(self, kl: Rows) -> tuple[Rows, Rows]:
        settings, masks = self.settings.advantage, self.estimating
        coef = self.settings.kl.coef if settings.kl_in_reward else 0.0
        rewards = [self.number(one.reward or 0.0) for one in self.samples]
        by_token = settings.reward_source == "token"
        own = self.column("token_rewards") if by_token else []
        if settings.estimator == "opd":
            zeros = [[0.0] * one.length for one in self.samples]
            return zeros, zeros
        if settings.estimator in ("grpo", "reinforce++-baseline"):
            paid = coef if settings.estimator != "grpo" else 0.0
            both = [
                [reward - paid * one for one in row]
                for reward, row in zip(rewards, kl, strict=True)
            ]
            return (own, own) if by_token else (both, both)
        tokens = token_rewards(
            [0.0] * len(rewards) if by_token else rewards,
            self.masks,
            kl,
            reward_at=settings.reward_at,
            kl_coef=coef,
            kl_masked=settings.kl_masked,
        )
        if by_token:
            tokens = [
                [x + y for x, y in zip(*row, strict=True)] for row in zip(tokens, own, strict=True)
            ]
        if settings.estimator in ("remax", "otb"):
            return self._less_baseline(tokens)
        gamma = [settings.gamma] * len(rewards)
        if settings.estimator == "reinforce++":
            returns = discounted_returns(tokens, masks, gamma=gamma, masking=settings.masking)
            return returns, returns
        lambdas = [
            settings.lam
            if settings.lam_alpha is None
            else 1.0 - 1.0 / max(settings.lam_alpha * one.length, 1.0)
            for one in self.samples
        ]
        advantages, returns = self._gae(tokens, lambdas)
        if settings.lam_returns is not None:
            _, returns = self._gae(tokens, [settings.lam_returns] * len(rewards))
        return advantages, returns

    def _gae(self, tokens: Rows, lam: list[float]) -> tuple[Rows, Rows]:
        settings = self.settings.advantage
        cut = [settings.bootstrap == "last" or bool(one.truncated) for one in self.samples]
        if settings.bootstrap == "none":
            cut = [False] * len(cut)
        return gae(
            tokens,
            self.column("old_values"),
            self.estimating,
            gamma=[settings.gamma] * len(lam),
            lam=lam,
            masking=settings.masking,
            bootstrap=[
                (one.last_value or 0.0) * taken
                for one, taken in zip(self.samples, cut, strict=True)
            ],
        )

    def _less_baseline(self, tokens: Rows) -> tuple[Rows, Rows]:
        settings, masks = self.settings.advantage, self.estimating
        ones = [1.0] * len(tokens)
        returns = discounted_returns(tokens, masks, gamma=ones, masking="multiply")
        if settings.estimator == "remax":
            greedy = [one.greedy_reward or 0.0 for one in self.samples]
            advantages = [
                [value - m * base for value, m in zip(row, mask, strict=True)]
                for row, mask, base in zip(returns, masks, greedy, strict=True)
            ]
            return advantages, returns
        weights = [[1.0] * len(mask) for mask in masks]
        if settings.otb_weights == "correction":
            weights = self.weights
        policy = self.column(f"{self.settings.kl.policy_source}_log_probs")
        given = (tokens, policy, self.column("sum_pi_squared"), weights, masks)
        if settings.otb_positions == "trained":
            given = tuple(_only(rows, masks) for rows in given)  # type: ignore[assignment]
        dense = optimal_token_advantages(*given, self.prompts(), zero_tail=settings.otb_zero_tail)
        if settings.otb_positions == "all":
            return dense, returns
        found = []
        for row, mask in zip(dense, masks, strict=True):
            left = iter(row)
            found.append([next(left) if m else 0.0 for m in mask])
        return found, returns

    whiten = staticmethod(whiten)

    def _whitened(self, advantages: Rows) -> Rows:
        settings, masks = self.settings.advantage, self.estimating
        batches = [one.consumer_batch_id for one in self.samples]
        of_samples = {
            "cohort": [0] * len(masks),
            "rank": self.ranks,
            "group": self.prompts(),
            "sample": list(range(len(masks))),
            "consumer-batch": [batches.index(one) for one in batches],
        }
        centre = settings.whiten_centre
        own, other = (
            [one for one, row in zip(of_samples[sets], advantages, strict=True) for _ in row]
            for sets in (settings.whiten, settings.whiten if centre in ("same", "none") else centre)
        )
        rule = "leave-one-out" if settings.whiten_leave_one_out else "mean"
        flat = self.whiten(
            [one for row in advantages for one in row],
            [one for row in masks for one in row],
            own,
            centre_index=other,
            centre="none" if centre == "none" else rule,
            scale=settings.whiten_scale,
            form=settings.whiten_form,
            ddof=settings.whiten_ddof,
            epsilon=settings.whiten_epsilon,
            short=settings.whiten_short,
        )
        rows, start = [], 0
        for row in advantages:
            rows.append(flat[start : start + len(row)])
            start += len(row)
        return rows


def _only(rows: Rows, masks: Rows) -> Rows:
    """The values of trained tokens."""
    pairs = zip(rows, masks, strict=True)
    return [[x for x, m in zip(*pair, strict=True) if m] for pair in pairs]
