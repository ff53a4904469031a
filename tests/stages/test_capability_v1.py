from dataclasses import replace

import pytest

from trajreplay import ParallelCoordinates, Settings
from trajreplay.schema import AdvantageSettings, KlSettings, LossSettings, RewardSettings
from trajreplay.schema.contracts import V1_STAGES
from trajreplay.stages.capability.v1 import ability

PLAIN = Settings(kl=KlSettings(coef=0.1), loss=LossSettings(entropy_coef=0.01))
ALONE = ParallelCoordinates()


@pytest.mark.parametrize("stage", V1_STAGES)
def test_grpo_without_context_parallelism_is_recomputed(stage: str) -> None:
    found = ability(stage, PLAIN, ALONE)
    assert (found.capability, found.reason) == ("recompute", "")


@pytest.mark.parametrize("stage", V1_STAGES)
def test_other_estimators_and_layouts_are_unsupported_at_every_stage(stage: str) -> None:
    gae = replace(PLAIN, advantage=AdvantageSettings("gae"))
    assert "'gae'" in ability(stage, gae, ALONE).reason
    assert (
        "context-parallel size is 4"
        in ability(stage, PLAIN, ParallelCoordinates(context_size=4)).reason
    )


def test_other_parallel_dimensions_change_nothing() -> None:
    wide = ParallelCoordinates(data_size=8, tensor_size=4, pipeline_size=2)
    assert ability("loss.policy", PLAIN, wide).capability == "recompute"


@pytest.mark.parametrize(
    ("stage", "settings", "reads", "writes"),
    [
        ("reward.raw", PLAIN, ("raw_reward",), ()),
        ("reward.post_process", PLAIN, ("raw_reward", "group_id"), ("reward",)),
        (
            "reward.post_process",
            replace(PLAIN, reward=RewardSettings(grouping="none")),
            ("raw_reward",),
            ("reward",),
        ),
        ("advantage.kl", PLAIN, ("old_log_probs", "ref_log_probs"), ("kl",)),
        (
            "advantage.kl",
            replace(PLAIN, kl=KlSettings(coef=0.1, policy_source="rollout")),
            ("rollout_log_probs", "ref_log_probs"),
            ("kl",),
        ),
        ("advantage.kl", replace(PLAIN, kl=KlSettings(coef=0.0)), (), ("kl",)),
        ("advantage.estimate", PLAIN, ("reward",), ("advantages",)),
        (
            "loss.policy",
            PLAIN,
            ("log_probs", "old_log_probs", "advantages", "entropy"),
            ("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl"),
        ),
        (
            "loss.policy",
            replace(PLAIN, loss=LossSettings(old_source="rollout")),
            ("log_probs", "rollout_log_probs", "advantages"),
            ("loss", "pg_loss", "pg_clipfrac", "ppo_kl"),
        ),
    ],
)
def test_a_stage_reads_what_its_settings_ask_for(
    stage: str, settings: Settings, reads: tuple[str, ...], writes: tuple[str, ...]
) -> None:
    found = ability(stage, settings, ALONE)
    assert (found.reads, found.writes) == (reads, writes)


def test_an_entropy_that_is_there_is_read_even_without_a_bonus() -> None:
    bare = replace(PLAIN, loss=LossSettings(entropy_coef=0.0))
    assert "entropy" in ability("loss.policy", bare, ALONE, {"entropy"}).reads
    assert "entropy_loss" in ability("loss.policy", bare, ALONE, {"entropy"}).writes


def test_a_critic_is_not_part_of_v1() -> None:
    assert ability("loss.value", PLAIN, ALONE).reason == "loss.value is not part of V1"
