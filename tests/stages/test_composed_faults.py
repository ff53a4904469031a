"""What must not pass, and what must not be refused, under settings beyond those of V1."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cohorts import Expected, capture
from tests.helpers.composed import ComposedTrainer
from tests.helpers.scenes import WAY, refusals, the_cohort, the_stage
from tests.helpers.trainer import Sample
from tests.stages.test_composed import COLUMNS, PLAIN, STAGES, _shares
from trajreplay import Lake, SchemaError, with_changes
from trajreplay.stages import CohortReport

Scalars = dict[int, list[Expected]]
WHITE = {"advantage.whiten": "cohort"}
AREAL = {"loss.correction": "tis", "loss.correction_bounds": (0.0, 5.0)}
FIRST = {
    "reward.overlong_max_length": 5,
    "reward.overlong_buffer": 2,
    "reward.overlong_counts": "first-message",
}
KEPT_BASELINE = {
    "reward.baseline": "kept",
    "reward.grouping": "none",
    "reward.divide_by_std": False,
}


def _replayed(
    lake: Lake,
    made: dict[str, Any],
    told: dict[str, Any] | None = None,
    change: Callable[[dict[int, list[Sample]], Scalars], None] = lambda shares, scalars: None,
) -> CohortReport:
    """The replay of a training that computes one thing, may be tampered with, and tells another."""
    shares = _shares()
    trainer = ComposedTrainer(with_changes(PLAIN, made), shares)
    trainer.score()
    trainer.estimate()
    policy, value = trainer.policy_scalars(), trainer.value_scalars()
    expected = {rank: [*policy[rank], *value[rank]] for rank in shares}
    change(shares, expected)
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        stages=STAGES,
        columns=COLUMNS,
        settings=with_changes(PLAIN, made if told is None else told),
        expected=expected,
    )
    return the_cohort(lake.replay())


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({"loss.surrogate": "dppo", "loss.ratio": "one"}, "'dppo'"),
        ({"loss.surrogate": "cispo", "loss.dual_clip": 1.05}, "loss.dual_clip"),
        ({"loss.dppo_ratio_cap": 2.0}, "loss.dppo_ratio_cap"),
        ({"loss.sequence_log_ratio_clamp": (-1.0, 1.0)}, "loss.sequence_log_ratio_clamp"),
        ({"loss.correction": "geometric-tis"}, "loss.correction_bounds"),
        ({"loss.correction_norm": "token"}, "loss.correction_norm"),
        (
            {
                "loss.surrogate": "vespo",
                "loss.correction": "sequence-tis",
                "loss.correction_bounds": (0.0, 2.0),
            },
            "'vespo'",
        ),
        ({"loss.rejection": {"token-k3": (-math.inf, math.inf)}}, "expected at least one end"),
        ({"loss.rejection": {"token-k4": (0.5, 2.0)}}, "loss.rejection names 'token-k4'"),
        ({"loss.rejection_reverse": True}, "loss.rejection_reverse"),
        ({"loss.proximal": "interpolated", "loss.old_source": "rollout"}, "loss.old_source"),
        ({"loss.count_epsilon": -1.0}, "loss.count_epsilon"),
        ({"loss.nll_coef": 0.1, "loss.fragments": "shared"}, "loss.nll_coef"),
        ({"loss.nll_coef": 0.1, "reward.factor": 2.0}, "loss.nll_coef"),
        ({"advantage.lam_returns": 1.0}, "advantage.lam_returns"),
        ({"advantage.bootstrap": "last"}, "advantage.bootstrap"),
        ({"advantage.otb_weights": "correction"}, "advantage.otb_weights"),
        (
            {"advantage.estimator": "otb", "advantage.otb_weights": "correction"},
            "advantage.otb_weights is 'correction' and loss.correction is 'none'",
        ),
        ({"advantage.otb_positions": "trained"}, "advantage.otb_positions"),
        ({"loss.rejection_denominator": "kept"}, "nothing rejects"),
        ({"loss.veto": 0.0}, "loss.veto"),
        ({"loss.m2_threshold": -1.0}, "loss.m2_threshold"),
        ({"loss.mean_over": "micro-batch"}, "loss.batch_reduction"),
        ({"loss.token_count": "at-least-one"}, "loss.aggregation"),
        ({"loss.constant_norm_by_rows": True}, "loss.constant_norm_by_rows"),
        (
            {
                "loss.surrogate": "reinforce",
                "loss.kl_loss_coef": 0.1,
                "loss.kl_loss_weighted": True,
                "loss.kl_loss_weight": "ratio",
            },
            "loss.kl_loss_weight",
        ),
        ({"loss.dual_clip": -1.0}, "loss.dual_clip"),
        ({"loss.surrogate": "sapo", "loss.sapo_tau_pos": 0.0}, "loss.sapo_tau_pos"),
        ({"loss.surrogate": "m2po", "loss.m2po_least_high": -0.5}, "loss.m2po_least_low, _high"),
        ({"loss.eps_clip": -0.5}, "loss.eps_clip"),
        ({"value.huber_delta": 0.0}, "value.huber_delta"),
        ({"value.clip": 0.0}, "value.clip"),
        ({"advantage.whiten": "cohort", "advantage.whiten_ddof": 2}, "advantage.whiten_ddof"),
        ({"reward.epsilon": -1.0}, "reward.epsilon"),
        ({"reward.scale_from": (1.0, 1.0), "reward.scale_to": (0.0, 1.0)}, "reward.scale_from"),
        ({"reward.clip_before": (math.inf, math.inf)}, "reward.clip_before"),
        ({"reward.unit": "step", "reward.grouping": "batch"}, "reward.unit is 'step'"),
        ({"reward.baseline": "greedy", "reward.grouping": "none"}, "reward.baseline is 'greedy'"),
        ({"reward.rule": "gpg", "reward.missing": "exclude"}, "reward.missing is 'exclude'"),
        ({"reward.rule": "pass@k", "reward.baseline": "none"}, "reward.baseline is 'none'"),
        ({"reward.rule": "maxrl"}, "reward.rule is 'maxrl'"),
        ({"reward.combination": "normalise-then-sum"}, "reward.weights has 0 components"),
        (
            {
                "reward.combination": "normalise-then-sum",
                "reward.weights": {"a": 1.0, "b": 1.0},
                "reward.clip_before": (0.0, 1.0),
            },
            "reward.clip_before is (0.0, 1.0), expected none",
        ),
        ({"reward.batch_epsilon": -1.0}, "reward.batch_epsilon"),
        ({"reward.baseline": "kept"}, "reward.baseline is 'kept' and reward.grouping is 'group'"),
        ({"reward.episode_agents": ("solver",)}, "reward.episode_agents"),
        ({"reward.source": "token", "reward.weights": {"a": 1.0}}, "reward.source is 'token'"),
        ({"reward.costs": {"time": 1.0}}, "reward.costs names 'time'"),
        ({"reward.costs": {"turns": 1.0}, "reward.missing": "exclude"}, "reward.costs are named"),
        ({"reward.unit": "step", "reward.missing": "exclude"}, "reward.unit is 'step'"),
        (
            {
                "loss.surrogate": "gmpo",
                "loss.correction": "tis",
                "loss.correction_bounds": (0.0, 2.0),
            },
            "loss.surrogate is 'gmpo', whose samples take the geometric mean",
        ),
        ({"reward.costs": {"turns": 1.0}, "reward.grouping": "none"}, "reward.costs"),
        ({"reward.rule": "gpg", "reward.gpg_norm": 0.0}, "reward.gpg_norm is 0"),
        (
            {"reward.std_grouping": "group", "reward.unit": "step"},
            "reward.std_grouping is 'group'",
        ),
        ({**AREAL, "loss.correction_criterion": "token-k5"}, "loss.correction_criterion"),
        ({"loss.correction_criterion": "token-k2"}, "loss.correction_criterion is 'token-k2'"),
        (
            {**AREAL, "loss.correction": "geometric-mask", "loss.correction_criterion": "max-k2"},
            "loss.correction is 'geometric-mask', which has none or its own",
        ),
        (
            {
                **AREAL,
                "loss.correction_bounds": (-math.inf, math.inf),
                "loss.correction_criterion": "max-k2",
            },
            "which bound nothing",
        ),
        (
            {
                **AREAL,
                "loss.correction_log_clamp": (-1.0, 1.0),
                "loss.correction_criterion": "max-k2",
            },
            "loss.correction_log_clamp is stated",
        ),
        ({"advantage.whiten_centre": "group"}, "advantage.whiten is 'none'"),
        ({**WHITE, "advantage.whiten_centre": "odd"}, "advantage.whiten_centre is 'odd'"),
        (
            {
                **WHITE,
                "advantage.whiten_one_pass": True,
                "advantage.whiten_leave_one_out": True,
            },
            "advantage.whiten_one_pass is true",
        ),
        (
            {**WHITE, "advantage.whiten_scale": False, "advantage.whiten_centre": "group"},
            "state advantage.whiten alone",
        ),
        (
            {
                **WHITE,
                "advantage.whiten_centre": "none",
                "advantage.whiten_leave_one_out": True,
            },
            "advantage.whiten_leave_one_out is true",
        ),
        (
            {"reward.baseline": "length-weighted", "reward.baseline_counts": "kept"},
            "reward.baseline_counts are 'kept' and the loss rejects nothing",
        ),
        (
            {
                "reward.baseline": "length-weighted",
                "reward.baseline_counts": "kept",
                "loss.m2_threshold": 0.1,
                "loss.rejection_denominator": "kept",
            },
            "reward.baseline_counts are 'kept' and loss.m2_threshold is stated",
        ),
        (
            {**FIRST, "reward.unit": "trajectory"},
            "reward.overlong_counts is 'first-message' and reward.unit is 'trajectory'",
        ),
        ({"advantage.estimator": "opd"}, "advantage.opd_coef is 0"),
        ({"advantage.estimator": "otb", "kl.policy_source": "new"}, "kl.policy_source is 'new'"),
        ({"advantage.estimator": "remax", "advantage.gamma": 0.5}, "advantage.gamma is 0.5"),
        ({"advantage.estimator": "otb", "advantage.masking": "carry"}, "advantage.masking"),
        (
            {
                "advantage.estimator": "reinforce++-baseline",
                "advantage.reward_source": "token",
            },
            "advantage.reward_source is 'token'",
        ),
        ({"loss.opd": True}, "loss.opd is True and advantage.opd_coef is 0"),
        ({"loss.opd": False, "advantage.opd_coef": 0.5}, "loss.opd is False"),
    ],
)
def test_settings_that_contradict_are_refused_by_name(
    lake: Lake, told: dict[str, Any], name: str
) -> None:
    cohort = _replayed(lake, {}, told)
    assert cohort.verdict in ("refused", "diverged")
    assert name in refusals(cohort)


@pytest.mark.parametrize(
    ("told", "column"),
    [
        ({"reward.baseline": "greedy"}, "greedy_reward"),
        ({"reward.unit": "step", "reward.n_samples_per_prompt": None}, "fragment_index"),
        ({"reward.grouping": "agent"}, "agent_id"),
        ({"reward.grouping": "agent", "reward.episode_agents": ("solver",)}, "episode_id"),
        ({"reward.costs": {"turns": 0.1}}, "turns"),
        ({**KEPT_BASELINE}, "kept_baseline"),
        (FIRST, "first_message_length"),
        ({"advantage.whiten": "consumer-batch"}, "consumer_batch_id"),
        ({"reward.source": "token"}, "token_rewards"),
        ({"advantage.reward_source": "token"}, "token_rewards"),
        ({"advantage.estimator": "remax"}, "greedy_reward"),
        ({"advantage.estimator": "otb"}, "sum_pi_squared"),
        ({"advantage.opd_coef": 0.5}, "teacher_log_probs"),
        ({"advantage.malformed_thinking": -1.0}, "message_faults"),
        ({"advantage.estimator": "gae", "advantage.bootstrap": "last"}, "last_value"),
        ({"advantage.estimator": "gae", "advantage.bootstrap": "truncated"}, "truncated"),
        ({"loss.proximal": "interpolated"}, "weight_versions"),
    ],
)
def test_what_lacks_a_column_is_refused_by_its_name(
    lake: Lake, told: dict[str, Any], column: str
) -> None:
    def change(shares: dict[int, list[Sample]], scalars: Scalars) -> None:
        for one in (one for own in shares.values() for one in own):
            one.columns.pop(column, None)
            if hasattr(one, column):
                setattr(one, column, None)

    cohort = _replayed(lake, {}, told, change)
    assert cohort.verdict in ("refused", "diverged")
    assert f"input {column} is missing for 8 of 8 samples" in refusals(cohort)


def test_a_policy_in_between_needs_the_weights_of_now(lake: Lake) -> None:
    cohort = _replayed(lake, {"loss.proximal": "interpolated"})
    assert "does not say which weights its log_probs were made with" in refusals(cohort)


def test_a_sample_has_no_part_of_a_likelihood_of_its_micro_batch(lake: Lake) -> None:
    def change(shares: dict[int, list[Sample]], scalars: Scalars) -> None:
        for rank, own in shares.items():
            per_sample = {"loss": [0.0] * len(own)}
            scalars[rank].append(Expected(per_sample, {"scope": "sample"}, "loss.policy"))

    cohort = _replayed(lake, {"loss.nll_coef": 0.1}, change=change)
    assert "loss is recorded of each sample, and loss.nll_coef" in refusals(cohort)


def test_a_lone_sample_has_no_second_best(lake: Lake) -> None:
    def change(shares: dict[int, list[Sample]], scalars: Scalars) -> None:
        shares[0][0].group = "g-7"

    told = {"reward.rule": "pass@k", "reward.n_samples_per_prompt": None}
    cohort = _replayed(lake, told, change=change)
    assert "1 of 3 groups have one sample" in refusals(cohort)


@pytest.mark.parametrize(
    "changes", [{"loss.eps_clip": 10**400}, {"loss.eps_clip": 1e39}, {"reward.ddof": 10**30}]
)
def test_numbers_that_no_training_holds_are_no_settings(changes: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        with_changes(PLAIN, changes)


def test_a_refused_stage_hides_no_divergence_before_it(lake: Lake) -> None:
    """Whitening asks for two tokens of a rank, one rank has none; a reward is wrong beside it."""

    def change(shares: dict[int, list[Sample]], scalars: Scalars) -> None:
        for one in shares[1]:
            one.mask = [0] * one.length
        shares[0][0].reward = float(shares[0][0].reward or 0.0) + 1.0

    cohort = _replayed(lake, {}, {"advantage.whiten": "rank"}, change)
    assert (cohort.verdict, cohort.first_divergent_stage) == ("diverged", "reward.post_process")
    assert "expected" in the_stage(cohort, "advantage.estimate").message


def test_a_recorded_scalar_that_the_settings_do_not_give_is_named(lake: Lake) -> None:
    def change(shares: dict[int, list[Sample]], scalars: Scalars) -> None:
        scalars[0][0].values = {**scalars[0][0].values, "kl_loss": 999.0}

    cohort = _replayed(lake, {}, change=change)
    (finding,) = [one for one in cohort.findings if one.check == "outputs.not-compared"]
    assert "kl_loss" in finding.message


@pytest.mark.parametrize(
    ("told", "true", "false"),
    [
        ({"loss.denominator_rows": "with-tokens"}, 3.0, 4.0),
        ({"loss.aggregation": "constant-norm", "loss.constant_norm": 16.0}, 16.0, 4.0),
    ],
)
def test_a_divisor_is_believed_only_where_the_settings_have_it(
    tmp_path: Path, told: dict[str, Any], true: float, false: float
) -> None:
    mean = {"loss.batch_reduction": "mean"}
    told |= mean
    by_rows = told if "loss.constant_norm" in told else mean  # who divides by all four rows
    for made, divisor, verdict in ((told, true, "pass"), (by_rows, false, "unverified")):

        def change(
            shares: dict[int, list[Sample]], scalars: Scalars, divisor: float = divisor
        ) -> None:
            for rank, found in scalars.items():
                counts = {0: divisor, 1: divisor if divisor != 3.0 else 4.0}
                for one in found:
                    one.meaning = {**one.meaning, "denominator": counts[rank]}

        other = Lake.create(tmp_path / f"{divisor:g}")
        cohort = _replayed(other, made, told, change)
        assert the_stage(cohort, "loss.policy").verdict == verdict, cohort.to_json()


def test_an_infinite_reward_is_not_missing(lake: Lake) -> None:
    settings = {
        "reward.missing": "exclude",
        "reward.baseline": "none",
        "reward.divide_by_std": False,
        "reward.clip_after": (-5.0, 5.0),
    }

    def change(shares: dict[int, list[Sample]], scalars: Scalars) -> None:
        shares[0][2].raw_reward, shares[0][2].reward = math.inf, 5.0
        shares[0][3].raw_reward, shares[0][3].reward = math.nan, 0.0

    cohort = _replayed(lake, settings, change=change)
    found = the_stage(cohort, "reward.raw")
    assert [one.sample_id for one in found.divergences] == ["s-2"]
    assert cohort.first_divergent_stage == "reward.raw"


def test_a_micro_batch_without_trained_tokens_has_the_mean_zero(lake: Lake) -> None:
    settings = with_changes(
        PLAIN, {"loss.aggregation": "token-mean", "loss.batch_reduction": "mean"}
    )
    shares = _shares()
    for one in shares[0][:2]:
        one.mask, one.micro_batch_id = [0] * one.length, "mb-0000"
    for one in shares[0][2:]:
        one.micro_batch_id = "mb-0001"
    samples = {0: shares[0]}
    ComposedTrainer(settings, samples).score()
    whole = ComposedTrainer(settings, samples)
    whole.estimate()
    (rest,) = ComposedTrainer(settings, {0: shares[0][2:]}).policy_scalars()[0]
    meaning = {"scope": "micro_batch", "reduction": "mean"}
    expected = [
        Expected(dict.fromkeys(rest.values, 0.0), {**meaning, "micro_batch_id": "mb-0000"}),
        Expected(rest.values, {**meaning, "micro_batch_id": "mb-0001"}),
    ]
    capture(
        lake, samples, WAY, step_id=0, columns=COLUMNS, settings=settings, expected={0: expected}
    )
    cohort = the_cohort(lake.replay())
    assert the_stage(cohort, "loss.policy").verdict == "pass", cohort.to_json()


def test_a_stride_that_the_rows_do_not_fill_is_no_group(lake: Lake) -> None:
    settings = {"reward.grouping": "stride", "reward.n_samples_per_prompt": 3}
    cohort = _replayed(lake, settings)
    found = the_stage(cohort, "reward.post_process")
    assert {one.field for one in found.divergences} == {"group_size"}


UNCAPTURED = "micro-batch of samples was not captured"


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"loss.surrogate": "clip-cov"}, "at random"),
        (
            {"loss.kl_loss_coef": 0.1, "loss.kl_loss_source": "unfiltered"},
            "log-probs that no column holds",
        ),
        ({"loss.surrogate": "m2po"}, UNCAPTURED),
        ({"loss.m2_threshold": 0.04}, UNCAPTURED),
        ({"loss.mean_over": "micro-batch", "loss.batch_reduction": "mean"}, UNCAPTURED),
        (
            {
                "loss.correction": "tis",
                "loss.correction_bounds": (0.0, 2.0),
                "loss.correction_norm": "token",
                "loss.correction_norm_over": "micro-batch",
            },
            UNCAPTURED,
        ),
    ],
)
def test_what_takes_more_than_was_captured_is_only_shown(
    lake: Lake, told: dict[str, Any], reason: str
) -> None:
    def change(shares: dict[int, list[Sample]], scalars: Scalars) -> None:
        for one in (one for own in shares.values() for one in own):
            one.micro_batch_id = None

    cohort = _replayed(lake, {}, told, change)
    found = the_stage(cohort, "loss.policy")
    assert (found.verdict, found.capability) == ("unverified", "inspect-only")
    assert reason in found.message


@pytest.mark.parametrize(
    "told",
    [
        {"loss.m2_threshold": 1e-4},
        {"loss.surrogate": "kl-cov", "loss.kl_cov_fraction": 0.3},
        {
            "loss.correction": "tis",
            "loss.correction_bounds": (0.0, 2.0),
            "loss.correction_norm": "token",
        },
    ],
)
def test_what_other_samples_decide_waits_for_all_of_them(lake: Lake, told: dict[str, Any]) -> None:
    _replayed(lake, told)
    part = the_stage(the_cohort(lake.replay(groups=["g-0"])), "loss.policy")
    assert (part.verdict, part.compared) == ("skipped", 0)
    assert "--closure cohort" in part.message


@pytest.mark.parametrize(("made", "told"), [("trained", "response"), ("response", "trained")])
def test_masked_tokens_are_harmful_only_where_the_settings_say(
    lake: Lake, made: str, told: str
) -> None:
    """Bounds of a micro-batch are those of its trained tokens, or of all of them."""
    m2po: dict[str, Any] = {"loss.surrogate": "m2po", "loss.m2po_kl2_budget": 0.02}
    m2po |= {"loss.m2po_least_low": 0.0, "loss.m2po_least_high": 0.0}
    counts = "loss.m2po_counts"
    cohort = _replayed(lake, {**m2po, counts: made}, {**m2po, counts: told})
    assert cohort.first_divergent_stage == "loss.policy", cohort.to_json()


def test_a_fault_of_a_message_that_nobody_knows_is_refused(lake: Lake) -> None:
    def change(shares: dict[int, list[Sample]], scalars: Scalars) -> None:
        shares[1][2].columns["message_faults"][0] = 3

    cohort = _replayed(lake, {"advantage.malformed_thinking": -1.0}, change=change)
    assert "message_faults holds 3, expected 0 to 2" in refusals(cohort)
