"""Settings that are stated where nothing reads them are said."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.composed import ComposedTrainer
from tests.helpers.small_lakes import rollout
from tests.stages.test_bad_settings import STAGE_OF
from tests.stages.test_composed import CHANGES, COLUMNS, PLAIN, _shares, _take_apart
from trajreplay import Lake, ParallelCoordinates, RecomputeConfig, SchemaError, with_changes
from trajreplay.schema import PROFILES, Settings
from trajreplay.schema.settings import LOSS_TERMS, SECTIONS
from trajreplay.schema.settings.knobs import kinds
from trajreplay.stages.capability import ability, not_read
from trajreplay.stages.capability.unread import _OF_STAGES, _filled

ON_POLICY = {"loss.ratio": "one"}
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
    ("advantage.whiten_epsilon", {"advantage.whiten_epsilon": 0.1}, {"advantage.whiten": "none"}),
    (
        "advantage.whiten_epsilon",
        {"advantage.whiten_epsilon": 0.1, "advantage.whiten": "cohort"},
        {"advantage.whiten_scale": False},
    ),
    (
        "advantage.lam",
        {"advantage.lam": 0.5, "advantage.estimator": "gae"},
        {"advantage.lam_alpha": 0.1},
    ),
    ("advantage.reward_at", {"advantage.reward_at": "after-last-unmasked"}, {}),
    ("kl.estimator", {"kl.estimator": "k2"}, {"kl.coef": 0.0}),
    ("kl.policy_source", {"kl.policy_source": "odd"}, {"kl.coef": 0.0}),
    ("value.counted", {"value.counted": "odd"}, {"value.clip": None}),
    ("loss.eps_clip", {"loss.eps_clip": 0.5}, {"loss.surrogate": "sapo"}),
    ("loss.eps_clip", {"loss.eps_clip": 0.5}, {"loss.surrogate": "vespo"}),
    ("loss.eps_clip", {"loss.eps_clip": 0.5}, {"loss.surrogate": "reinforce"}),
    (
        "loss.eps_clip",
        {"loss.eps_clip": 0.5},
        {"loss.surrogate": "cispo", "loss.cispo_bounds": "upper-absolute"},
    ),
    ("loss.eps_clip_high", {"loss.eps_clip_high": 0.5}, {"loss.surrogate": "kl-cov"}),
    ("loss.kl_loss_estimator", {"loss.kl_loss_estimator": "k2"}, {"loss.kl_loss_coef": 0.0}),
    (
        "loss.dppo_kl_tau",
        {"loss.dppo_kl_tau": 0.5, "loss.surrogate": "dppo"},
        {"loss.dppo_form": "log-prob"},
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
    ("loss.dual_clip", {"loss.dual_clip": 5.0}, ON_POLICY),
    ("loss.dual_side", {"loss.dual_side": "both", "loss.dual_clip": 5.0}, ON_POLICY),
    *(
        (f"loss.{name}", {f"loss.{name}": 0.5, "loss.surrogate": surrogate}, ON_POLICY)
        for name, surrogate in (
            ("dro_beta", "dro"),
            ("kl_cov_fraction", "kl-cov"),
            ("kl_cov_coef", "kl-cov"),
            ("m2po_kl2_budget", "m2po"),
            ("m2po_least_low", "m2po"),
            ("vespo_k_pos", "vespo"),
        )
    ),
    ("loss.opsm_delta", {"loss.opsm_delta": 0.1}, {"loss.proximal": "current"}),
    (
        "loss.kl_loss_mean_over",
        {"loss.kl_loss_mean_over": "micro-batch", "loss.kl_loss_coef": 0.1},
        {"loss.kl_loss_coef": 0.0},
    ),
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


# What changes no number of the cohort below though it is read, and why.
UNSEEN = {
    "reward.n_samples_per_prompt",  # checked
    "reward.bias",  # what is centred has none
    "reward.grouping",  # of greedy baselines, which are of no group
    "reward.unit",  # fragments of one trajectory have one reward
    "kl.coef",  # paid by others
    "advantage.whiten_short",  # of sets that are not short
    "advantage.whiten_leave_one_out",  # distances and deviation grow by the same factor
    "advantage.otb_zero_tail",  # of samples that end together
    "loss.batch_reduction",  # stated by the outputs themselves
    "loss.advantage_level",  # what is linear in the advantages
    "loss.dual_clip",  # of ratios that no token here has at a negative advantage
    "loss.mean_over",  # the scope, where a rank has one micro-batch
    "loss.entropy_mean_over",  # the scope, where the loss is a mean over it
    "loss.kl_loss_mean_over",  # the scope, where the loss is a mean over it
    "value.mean_over",  # likewise
    "loss.ratio",  # one, of what has none
    "loss.undefined_weight",  # every weight here is finite
    "loss.correction_criterion",  # of bounds that nothing reaches
    *(f"loss.{name}" for name in LOSS_TERMS),  # checked
    *("reward.constant_groups", "reward.constant_within"),  # no group here has equal rewards
}
# Settings that this cohort happens to say nothing of beside others.
COINCIDENCE: dict[str, tuple[str, ...]] = {
    "constant norm": ("loss.count_epsilon",),
    "constant norm and samples": ("loss.count_epsilon",),
    "dppo": ("loss.dppo_measure",),
    "lengthy and cut responses": ("reward.stop_properly_rule",),  # 0 of them, or 0
    "dppo of heavier terms": ("loss.dppo_measure",),
    "m2po": ("loss.m2po_counts",),  # of samples that are trained on as a whole, or not at all
    "epsilon as floor": ("reward.ddof", "reward.std_grouping"),  # all of which lie below it
    "sequence mask": ("loss.correction_norm",),  # every sample has a weight of 0
    "gspo on policy": ("loss.opsm_delta",),  # which nothing drifts beyond
}
HELD = (*COLUMNS, "micro_batch_id")
SPREADS = {"rollout_log_probs": 0.3, "log_probs": 0.5, "ref_log_probs": 0.5}
TRIED: dict[str, tuple[Any, ...]] = {
    "flag": (True, False),
    "number": (0.5, 2.0, 0.01),
    "count": (0, 3),
    "interval": ((0.2, 0.6), (-0.01, 0.01)),
    "weights": ({},),
    "intervals": ({}, {"token-ratio": (0.9, 1.1)}),
    "names": (("solver",),),
}


def _numbers(settings: Settings, section: str) -> str:
    """What a training under settings records of a stage, as text."""
    numbers = np.random.default_rng(1)
    shares = _shares()
    if settings.reward.weights:
        _take_apart(shares, missing=settings.reward.missing == "exclude")
    samples = [one for own in shares.values() for one in own]
    for one in samples:  # far enough apart that bounds bite
        old = one.columns["old_log_probs"]
        for name, spread in SPREADS.items():
            drift = torch.tensor(numbers.normal(0.0, spread, one.length), dtype=torch.float32)
            one.columns[name] = (old + drift).clamp(max=-0.01)
        for name in ("advantages", "returns"):
            drawn = numbers.normal(0.0, 1.0, one.length)
            one.columns[name] = torch.tensor(drawn, dtype=torch.float32)
    trainer = ComposedTrainer(settings, shares)
    if section == "loss":
        return repr(trainer.policy_scalars())
    if section == "value":
        return repr(trainer.value_scalars())
    trainer.score()
    if section == "reward":
        return repr([one.reward for one in samples])
    trainer.estimate()
    if section == "kl":
        return repr(trainer.column("kl"))
    pairs = zip(trainer.column("advantages"), trainer.masks, strict=True)
    kept = [[x for x, m in zip(*pair, strict=True) if m] for pair in pairs]
    return repr((kept, trainer.column("returns")))


def _others(settings: Settings, section: str, name: str) -> Iterator[Settings]:
    """The same settings with another value of a field, where that can be recomputed."""
    kind, stage = kinds(SECTIONS[section])[name], STAGE_OF[section]
    known = TRIED.get(kind.what, kind.known)
    for value in (*known, *((None,) if kind.optional else ())):
        if value == getattr(getattr(settings, section), name):
            continue
        try:
            other = with_changes(settings, {f"{section}.{name}": value})
        except SchemaError:
            continue
        if ability(stage, other, ParallelCoordinates(), HELD).capability == "recompute":
            yield other


# What rejects leaves too few of these tokens to say anything.
CONTEXTS = sorted(
    name
    for name, (changes, stage) in CHANGES.items()
    if stage in STAGE_OF.values()
    and not {"loss.rejection", "loss.veto", "loss.m2_threshold"} & changes.keys()
)


@given(st.sampled_from(CONTEXTS), st.data())
def test_what_changes_no_number_is_said_and_what_is_said_changes_none(
    context: str, data: st.DataObject
) -> None:
    section = next(one for one, its in STAGE_OF.items() if its == CHANGES[context][1])
    _judge(context, section, data.draw(st.sampled_from(sorted(kinds(SECTIONS[section])))))


def _judge(context: str, section: str, name: str) -> None:
    changes = CHANGES[context][0]
    label, base = f"{section}.{name}", with_changes(PLAIN, changes)
    plain = _numbers(base, section)
    found = []
    for other in _others(base, section, name):
        try:
            changed = _numbers(other, section) != plain
        except (ValueError, ArithmeticError, LookupError, TypeError):
            return  # what the loops of the training know nothing of
        says = any(one.startswith(f"{label} is") for one in not_read(STAGE_OF[section], other))
        if says:  # then the default, or that of a profile, gives the same
            default = getattr(SECTIONS[section](), name)
            usual = with_changes(other, {label: default})
            assert _numbers(usual, section) == _numbers(other, section), (label, other)
        known = getattr(getattr(other, section), name) in [*_filled(section, name)]
        found.append((changed, says or known))
    if found and label not in UNSEEN and not any(changed for changed, _ in found):
        assert all(said for _, said in found) or label in COINCIDENCE.get(context, ()), (
            label,
            context,
        )


def test_a_replay_says_it_and_passes(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    settings = with_changes(RecomputeConfig().resolve(), {"reward.overlong_penalty": 5.0})
    rollout(lake, 0, settings=settings)
    report = lake.replay()
    (found,) = [one for one in report.cohorts[0].findings if one.check == "settings.not-read"]
    assert (found.severity, found.stage) == ("warning", "reward.post_process")
    assert "reward.overlong_penalty is 5.0" in found.message
    assert report.verdict == "pass"
