"""The short form of the settings, in the field's flat names."""

from __future__ import annotations

from dataclasses import dataclass

from trajreplay.schema.settings import (
    AdvantageSettings,
    KlSettings,
    LossSettings,
    RewardSettings,
    SamplingSettings,
    Settings,
)


@dataclass(frozen=True)
class RecomputeConfig:
    """GRPO settings under the names that Relax and slime use; resolves into `Settings`.

    A scalar recorded under it is a sum over the samples of its rank, unscaled, unless said
    otherwise.

    >>> RecomputeConfig(kl_loss_type="k3", kl_coef=0.1).resolve().kl.estimator
    'k3'
    """

    advantage_estimator: str = "grpo"
    n_samples_per_prompt: int | None = None
    rewards_normalization: bool = True
    grpo_std_normalization: bool = True
    kl_loss_type: str = "k1"
    kl_coef: float = 0.0
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    entropy_coef: float = 0.0
    use_rollout_logprobs: bool = False
    use_kl_loss: bool | None = None
    use_tis: bool | None = None
    use_opsm: bool | None = None
    use_opd: bool | None = None
    calculate_per_token_loss: bool | None = None
    partial_rollout: bool | None = None
    max_staleness: int | None = None

    def resolve(self) -> Settings:
        """The full settings it stands for.

        Raises:
            SchemaError: A value has the wrong type.
        """
        source = "rollout" if self.use_rollout_logprobs else "old"
        return Settings(
            reward=RewardSettings(
                grouping="group" if self.rewards_normalization else "none",
                n_samples_per_prompt=self.n_samples_per_prompt,
                divide_by_std=self.grpo_std_normalization,
            ),
            kl=KlSettings(estimator=self.kl_loss_type, coef=self.kl_coef, policy_source=source),
            advantage=AdvantageSettings(estimator=self.advantage_estimator),
            loss=LossSettings(
                eps_clip=self.eps_clip,
                eps_clip_high=self.eps_clip_high,
                entropy_coef=self.entropy_coef,
                old_source=source,
                use_kl_loss=self.use_kl_loss,
                tis=self.use_tis,
                opsm=self.use_opsm,
                opd=self.use_opd,
                per_token=self.calculate_per_token_loss,
            ),
            sampling=SamplingSettings(self.max_staleness, self.partial_rollout),
        )

    @classmethod
    def of(cls, settings: Settings) -> tuple[RecomputeConfig, list[str]]:
        """The short form that comes nearest to settings, and what of them it does not say.

        A loss term that is off and one of which nothing is stated are the same here.

        >>> RecomputeConfig.of(RecomputeConfig(kl_coef=0.1).resolve())[1]
        []
        """
        reward, loss = settings.reward, settings.loss
        found = cls(
            advantage_estimator=settings.advantage.estimator,
            n_samples_per_prompt=reward.n_samples_per_prompt,
            rewards_normalization=reward.grouping == "group",
            grpo_std_normalization=reward.divide_by_std,
            kl_loss_type=settings.kl.estimator,
            kl_coef=settings.kl.coef,
            eps_clip=loss.eps_clip,
            eps_clip_high=loss.eps_clip_high,
            entropy_coef=loss.entropy_coef,
            use_rollout_logprobs=loss.old_source == "rollout",
            use_kl_loss=loss.use_kl_loss or None,
            use_tis=loss.tis or None,
            use_opsm=loss.opsm or None,
            use_opd=loss.opd or None,
            calculate_per_token_loss=loss.per_token or None,
            partial_rollout=settings.sampling.partial,
            max_staleness=settings.sampling.max_staleness,
        )
        mine, theirs = found.resolve().to_json(), settings.to_json()
        differs = [
            f"{section}.{name}"
            for section, values in theirs.items()
            for name, value in values.items()
            if (mine[section].get(name) or None) != (value or None)
        ]
        return found, differs
