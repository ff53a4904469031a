"""Settings that are stated where nothing reads them are said."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.small_lakes import rollout
from trajreplay import Lake, RecomputeConfig, with_changes
from trajreplay.schema import PROFILES, Settings
from trajreplay.stages.capability import not_read
from trajreplay.stages.capability.unread import _OF_STAGES

# Each beside what makes it be read.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("reward.divisor", {"reward.divisor": "baseline"}, {"reward.divide_by_std": False}),
    ("reward.std_grouping", {"reward.std_grouping": "batch"}, {"reward.divide_by_std": False}),
    ("reward.std_grouping", {"reward.std_grouping": "batch"}, {"reward.grouping": "none"}),
    ("reward.ddof", {"reward.ddof": 0}, {"reward.divisor": "baseline"}),
    ("reward.epsilon", {"reward.epsilon": 0.5}, {"reward.divisor": "baseline"}),
    ("reward.epsilon_place", {"reward.epsilon_place": "inside"}, {"reward.rule": "gpg"}),
    ("reward.baseline", {"reward.baseline": "none"}, {"reward.grouping": "none"}),
    ("advantage.gamma", {"advantage.gamma": 0.9}, {"advantage.estimator": "grpo"}),
    ("advantage.masking", {"advantage.masking": "reset"}, {"advantage.estimator": "opd"}),
    ("advantage.lam_alpha", {"advantage.lam_alpha": 0.05}, {"advantage.estimator": "reinforce++"}),
    ("advantage.whiten_form", {"advantage.whiten_form": "std"}, {"advantage.whiten": "none"}),
    (
        "advantage.whiten_ddof",
        {"advantage.whiten_ddof": 0, "advantage.whiten": "cohort"},
        {"advantage.whiten_scale": False},
    ),
    ("loss.ratio", {"loss.ratio": "sequence-mean"}, {"loss.surrogate": "reinforce"}),
    ("loss.proximal", {"loss.proximal": "interpolated"}, {"loss.ratio": "one"}),
    ("loss.correction_bounds", {"loss.correction_bounds": (0.0, 0.5)}, {"loss.correction": "none"}),
    ("loss.micro_batch_weight", {"loss.micro_batch_weight": "rows"}, {"loss.mean_over": "scope"}),
    ("loss.dual_side", {"loss.dual_side": "both"}, {"loss.dual_clip": None}),
    ("loss.constant_norm", {"loss.constant_norm": 3.0}, {"loss.aggregation": "token-mean"}),
    (
        "loss.denominator_rows",
        {"loss.denominator_rows": "kept", "loss.batch_reduction": "mean"},
        {"loss.aggregation": "token-mean"},
    ),
    ("loss.denominator_rows", {"loss.denominator_rows": "kept"}, {"loss.batch_reduction": "sum"}),
    ("loss.sapo_tau_pos", {"loss.sapo_tau_pos": 3.0}, {"loss.surrogate": "cispo"}),
]


def told(changes: dict[str, Any], base: Settings | None = None) -> str:
    settings = with_changes(base or Settings(), changes)
    return "; ".join(one for stage in _OF_STAGES for one in not_read(stage, settings))


@pytest.mark.parametrize(("field", "stated", "off"), CASES)
def test_what_is_stated_and_switched_off_is_said(
    field: str, stated: dict[str, Any], off: dict[str, Any]
) -> None:
    assert f"{field} is" in told(stated | off)
    assert f"{field} is" not in told(off)


def fields() -> Iterator[tuple[str, str]]:
    for reads in _OF_STAGES.values():
        for one in reads:
            yield from ((one.section, name) for name in one.fields)


@pytest.mark.parametrize(("section", "name"), sorted(set(fields())))
def test_every_field_of_the_table_is_a_setting(section: str, name: str) -> None:
    assert hasattr(getattr(Settings(), section), name)


@pytest.mark.parametrize("profile", PROFILES)
def test_what_a_profile_fills_in_is_not_said(profile: str) -> None:
    assert told({}, PROFILES[profile].settings) == ""
    assert "loss.dual_side" in told({"loss.dual_side": "both", "loss.dual_clip": None})


def test_a_replay_says_it_and_passes(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    settings = with_changes(RecomputeConfig().resolve(), {"reward.overlong_penalty": 5.0})
    rollout(lake, 0, settings=settings)
    report = lake.replay()
    (found,) = [one for one in report.cohorts[0].findings if one.check == "settings.not-read"]
    assert (found.severity, found.stage) == ("warning", "reward.post_process")
    assert "reward.overlong_penalty is 5.0" in found.message
    assert report.verdict == "pass"
