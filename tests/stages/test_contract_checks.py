"""Contract checks: what is wrong is found by name and place, and nothing of what is healthy."""

from __future__ import annotations

import ast
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.captures import sample, start
from tests.helpers.cohorts import Expected, capture
from tests.helpers.scenes import WAY, write_step
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake, SampleRecord, with_changes
from trajreplay.schema import Settings
from trajreplay.stages import Finding, contract_checks
from trajreplay.stages.faults.catalogue import FAULTS

STAGES = ("sample", "reward.raw", "reward.post_process", "advantage.estimate")
COLUMNS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages")


def _samples(seed: int = 0, *, size: int = 8, length: int = 12) -> list[Sample]:
    """Samples whose trainer and sampler agree but for a little noise."""
    numbers = np.random.default_rng(seed)
    samples = []
    for row in range(size):
        one = Sample(f"s-{row}", f"g-{row // 4}", [1] * length, float(numbers.random()))
        base = -np.abs(numbers.normal(0.0, 1.0, length)) - 1e-3
        for name, spread in (("rollout_log_probs", 0.002), ("old_log_probs", 0.0)):
            values = np.minimum(base + numbers.normal(0.0, spread, length), -1e-6)
            one.columns[name] = torch.tensor(values, dtype=torch.float32)
        one.columns["ref_log_probs"] = one.columns["old_log_probs"] - 0.1
        samples.append(one)
    trainer = Trainer(WAY)
    trainer.score(samples)
    trainer.estimate(samples)
    return samples


def _findings(lake: Lake, samples: Sequence[Sample], **options: Any) -> list[Finding]:
    """What a replay finds of a rollout over two ranks, groups whole on each."""
    shares = options.pop("shares", {0: samples[:4], 1: samples[4:]})
    options.setdefault("settings", WAY.full)
    capture(lake, shares, WAY, columns=COLUMNS, **{"stages": STAGES, **options})
    (cohort,) = lake.replay().cohorts
    return [one for one in cohort.findings if one.check != "handoff"]


def _each(change: Callable[[Sample, torch.Tensor], torch.Tensor]) -> Callable[[list[Sample]], None]:
    def spoil(samples: list[Sample]) -> None:
        for one in samples:
            name = "rollout_log_probs"
            one.columns[name] = change(one, one.columns[name])

    return spoil


Spoil = Callable[[list[Sample]], None]


def _late(samples: list[Sample]) -> None:
    for one in samples:
        values = one.columns["rollout_log_probs"]
        one.columns["rollout_log_probs"] = torch.cat([values[:1], values[:-1]])


def _early(samples: list[Sample]) -> None:
    for one in samples:
        values = one.columns["rollout_log_probs"]
        one.columns["rollout_log_probs"] = torch.cat([values[1:], values[-1:]])


def _cut_at_borders(samples: list[Sample]) -> None:
    """One value too many at the front of all, and each sample cut by its length."""
    for share in (samples[:4], samples[4:]):
        flat = torch.cat([one.columns["rollout_log_probs"] for one in share])
        flat = torch.cat([flat[:1], flat[:-1]])
        for number, one in enumerate(share):
            part = flat[number * one.length : (number + 1) * one.length]
            one.columns["rollout_log_probs"] = part


def _permuted(samples: list[Sample]) -> None:
    columns = [one.columns["rollout_log_probs"] for one in samples]
    for one, values in zip(samples, columns[2:] + columns[:2], strict=True):
        one.columns["rollout_log_probs"] = values


def _recorded_of(pick: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], kept: int) -> Spoil:
    """Tokens sampled of the most likely ones, whose log-probs an engine with noise recorded."""

    def spoil(samples: list[Sample]) -> None:
        for number, one in enumerate(samples):
            numbers = torch.Generator().manual_seed(number)
            logits = 3.0 * torch.randn(one.length, 50, generator=numbers)
            noisy = logits + 0.02 * torch.randn(one.length, 50, generator=numbers)
            last = noisy.topk(kept).values[:, -1:]
            own = noisy.masked_fill(noisy < last, -torch.inf).log_softmax(1)
            token = torch.multinomial(own.exp(), 1, generator=numbers)
            one.columns["old_log_probs"] = logits.log_softmax(1).gather(1, token)[:, 0]
            one.columns["ref_log_probs"] = one.columns["old_log_probs"] - 0.1
            one.columns["rollout_log_probs"] = pick(own, token).clamp(max=-1e-7)

    return spoil


_most_likely = _recorded_of(lambda own, token: own.max(1).values, 50)
_filtered = _recorded_of(lambda own, token: own.gather(1, token)[:, 0], 5)


def _one_value(column: str, value: float) -> Callable[[list[Sample]], None]:
    def spoil(samples: list[Sample]) -> None:
        samples[2].columns[column][5] = value

    return spoil


def _duplicated(samples: list[Sample]) -> None:
    samples[3].columns["rollout_log_probs"] = samples[1].columns["rollout_log_probs"].clone()


def _doubled(samples: list[Sample]) -> None:
    for one, other in zip(samples[:4], samples[4:], strict=True):
        for name in COLUMNS[:3]:
            other.columns[name] = one.columns[name].clone()


SPOILT: dict[str, tuple[Callable[[list[Sample]], None], str, str]] = {
    "late": (_late, "log-prob.shifted", "error"),
    "early": (_early, "log-prob.shifted", "error"),
    "cut at packed borders": (_cut_at_borders, "log-prob.packed-shift", "error"),
    "permuted": (_permuted, "sample.permuted", "error"),
    "most likely": (_most_likely, "log-prob.most-likely", "warning"),
    "filtered": (_filtered, "log-prob.filtered", "warning"),
    "above 0": (_one_value("rollout_log_probs", 0.25), "log-prob.positive", "warning"),
    "without probability": (
        _one_value("rollout_log_probs", -math.inf),
        "log-prob.infinite",
        "warning",
    ),
    "filled in": (_one_value("rollout_log_probs", 0.0), "log-prob.zero", "warning"),
    "bfloat16": (
        _each(lambda one, values: values.bfloat16().float()),
        "log-prob.quantised",
        "warning",
    ),
    "float16": (_each(lambda one, values: values.half().float()), "log-prob.quantised", "warning"),
    "temperature": (_each(lambda one, values: values * 0.6), "log-prob.temperature", "warning"),
    "duplicated": (_duplicated, "sample.duplicated", "warning"),
    "doubled": (_doubled, "rank.doubled", "error"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_wrong_is_found_by_name(lake: Lake, name: str) -> None:
    spoil, check, severity = SPOILT[name]
    samples = _samples(length=24 if name == "filtered" else 12)
    spoil(samples)
    found = [one for one in _findings(lake, samples) if one.check == check]
    assert [one.severity for one in found] == [severity]
    assert found[0].stage == "sample"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_in_reduced_precision_is_named_beside_one_that_is_not(lake: Lake, rank: int) -> None:
    samples = _samples()
    for one in samples[4 * rank : 4 * rank + 4]:
        values = one.columns["rollout_log_probs"]
        one.columns["rollout_log_probs"] = values.bfloat16().float()
    (found,) = [one for one in _findings(lake, samples) if one.check == "log-prob.quantised"]
    assert f"every value of rollout_log_probs of rank {rank} is one of bfloat16" in found.message
    assert (found.sample_id, found.token) == (f"s-{4 * rank}", 0)


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_of_short_samples_is_there_twice_where_their_tokens_together_say_so(
    lake: Lake, length: int, shared: bool
) -> None:
    """Members of one prompt may be equal, and a few tokens are by chance."""
    samples = _samples(size=16, length=length)
    for one, other in zip(samples[:8], samples[8:], strict=True):
        for name in COLUMNS[:3]:
            other.columns[name] = one.columns[name].clone()
        if shared:
            other.group = one.group
    found = _findings(lake, samples, stages=["sample"], shares={0: samples[:8], 1: samples[8:]})
    doubled = [one for one in found if one.check == "rank.doubled"]
    assert len(doubled) == (length * 8 >= 32 and not shared)
    assert [(one.sample_id, one.token) for one in doubled] == [("s-8", 0)] * len(doubled)


@pytest.mark.parametrize("name", ["above 0", "without probability", "filled in"])
def test_the_token_is_named(lake: Lake, name: str) -> None:
    spoil, check, _ = SPOILT[name]
    samples = _samples()
    spoil(samples)
    (found,) = [one for one in _findings(lake, samples) if one.check == check]
    assert (found.sample_id, found.token) == ("s-2", 5)


def test_an_error_makes_the_stage_diverge_and_a_warning_does_not(lake: Lake) -> None:
    samples = _samples()
    _late(samples)
    _findings(lake, samples)
    (cohort,) = lake.replay().cohorts
    assert cohort.first_divergent_stage == "sample"
    other = Lake.create(f"{lake.path}-other")
    samples = _samples()
    _one_value("rollout_log_probs", 0.25)(samples)
    _findings(other, samples)
    assert other.replay().verdict == "pass"


def test_rewards_of_the_size_of_1_over_epsilon_are_found(lake: Lake) -> None:
    samples = _samples()
    samples[1].reward = 800000.0
    found = {one.check: one for one in _findings(lake, samples)}
    assert found["reward.near-epsilon"].sample_id == "s-1"


def test_constant_groups_that_are_not_scored_0_are_found(lake: Lake) -> None:
    samples = _samples()
    for one in samples[:4]:
        one.raw_reward, one.reward = 0.1, -0.0074
    found = {one.check: one for one in _findings(lake, samples, stages=["sample"])}
    assert found["group.constant"].sample_id == "s-0"


@pytest.mark.parametrize(
    ("changes", "advantage", "found"),
    [
        ({}, 2e4, True),
        ({}, 50.0, False),
        ({"reward.epsilon_place": "inside"}, 400.0, True),
        ({"reward.divide_by_std": False}, 2e4, False),
        ({"reward.divide_by_std": False, "advantage.whiten": "cohort"}, 2e4, True),
        (
            {
                "reward.divide_by_std": False,
                "advantage.whiten": "cohort",
                "advantage.whiten_centre": "none",
            },
            2e4,
            False,
        ),
        (
            {
                "reward.divide_by_std": False,
                "advantage.whiten": "cohort",
                "advantage.whiten_form": "std",
            },
            2e4,
            False,
        ),
    ],
)
def test_advantages_of_the_size_of_1_over_epsilon_are_found_where_something_is_divided(
    lake: Lake, changes: dict[str, Any], advantage: float, found: bool
) -> None:
    samples = _samples()
    samples[5].mask[3] = 0
    samples[5].columns["advantages"][3:5] = advantage
    settings = with_changes(WAY.full, changes)
    said = {
        one.check: one for one in _findings(lake, samples, stages=["sample"], settings=settings)
    }
    assert ("advantage.near-epsilon" in said) == found
    if found:
        one = said["advantage.near-epsilon"]
        assert (one.sample_id, one.token, one.stage) == ("s-5", 4, "advantage.estimate")
        assert "at 1 trained tokens" in one.message


def test_advantages_at_masked_tokens_of_some_samples_only_are_told(lake: Lake) -> None:
    samples = _samples()
    for one in samples[:4]:
        one.mask[2] = 0
        one.columns["advantages"] = torch.where(
            torch.tensor(one.mask) != 0, one.columns["advantages"], 0.0
        )
    healthy = _findings(lake, samples, stages=["sample"])
    assert "advantage.masked" not in {one.check for one in healthy}
    samples[1].columns["advantages"][2] = 0.5
    other = Lake.create(f"{lake.path}-other")
    found = {one.check: one for one in _findings(other, samples, stages=["sample"])}
    assert (found["advantage.masked"].severity, found["advantage.masked"].sample_id) == (
        "info",
        "s-1",
    )
    assert "1 samples have advantages at masked tokens, and 3 others" in (
        found["advantage.masked"].message
    )


_LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "log_probs")


@given(
    chosen=st.sets(st.sampled_from(_LOG_PROBS), min_size=1),
    zero=st.sets(st.sampled_from(_LOG_PROBS)),
    kept=st.integers(0, 2),
    seed=st.integers(0, 2**20),
)
def test_a_column_of_zeros_is_found_whatever_is_beside_it(
    chosen: set[str], zero: set[str], kept: int, seed: int
) -> None:
    """Alone, beside another of zeros, with a value here and there: a warning for each such one."""
    samples = _samples(seed)
    for one in samples:
        one.columns["log_probs"] = one.columns["old_log_probs"] - 0.01
        for name in zero:
            one.columns[name] = torch.zeros(one.length)
    for name in zero:
        samples[3].columns[name][:kept] = -0.5
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(f"{folder}/lake")
        capture(
            lake,
            {0: samples},
            WAY,
            step_id=0,
            stages=["sample"],
            columns=sorted(chosen),
            settings=WAY.full,
        )
        (cohort,) = lake.replay().cohorts
        found = [one for one in cohort.findings if one.check == "log-prob.zero"]
    assert {one.check for one in cohort.findings} <= {"log-prob.zero", "handoff"}
    assert sorted(one.message.partition(" ")[0] for one in found) == sorted(chosen & zero)
    assert all((one.severity, one.sample_id, one.token) == ("warning", "s-0", 0) for one in found)


@pytest.mark.parametrize("proximal", ["recorded", "current", "interpolated"])
def test_a_metric_is_stuck_only_where_its_ratio_moves(proximal: str, lake: Lake) -> None:
    samples = _samples()
    for one in samples:
        one.columns["log_probs"] = one.columns["old_log_probs"] - 1.0
        one.columns["advantages"] = torch.full_like(one.columns["old_log_probs"], -1.0)
    settings = with_changes(WAY.full, {"loss.proximal": proximal})
    scalars = Expected({"pg_clipfrac": 0.0}, {"scope": "rank", "reduction": "mean"})
    columns = ("log_probs", "old_log_probs", "advantages")
    write_step(
        lake,
        {0: samples},
        stages=["sample"],
        settings=settings,
        columns=columns,
        expected={0: [scalars]},
    )
    (cohort,) = lake.replay().cohorts
    stuck = [one for one in cohort.findings if one.check == "metric.stuck"]
    assert bool(stuck) == (proximal == "recorded")


@pytest.mark.parametrize("moved", [0.1, 0.5])
@pytest.mark.parametrize("counted", ["value", "loss"])
@pytest.mark.parametrize("logged", [0.0, 0.25])
def test_a_clip_fraction_of_values_is_stuck_only_where_values_moved_beyond_the_clip(
    lake: Lake, moved: float, counted: str, logged: float
) -> None:
    samples = _samples()
    for one in samples:
        one.columns["old_values"] = one.columns["old_log_probs"].clone()
        one.columns["values"] = one.columns["old_values"] + moved
    settings = with_changes(WAY.full, {"value.clip": 0.2, "value.counted": counted})
    scalars = Expected(
        {"value_clipfrac": logged}, {"scope": "rank", "reduction": "mean"}, stage="loss.value"
    )
    write_step(
        lake,
        {0: samples},
        stages=["sample"],
        settings=settings,
        columns=("values", "old_values"),
        expected={0: [scalars]},
    )
    (cohort,) = lake.replay().cohorts
    stuck = [one for one in cohort.findings if one.check == "metric.stuck"]
    assert bool(stuck) == (moved > 0.2 and counted == "value" and not logged)
    assert {(one.stage, one.sample_id, one.token) for one in stuck} <= {("loss.value", "s-0", 0)}


def test_a_few_certain_tokens_are_no_column_of_zeros(lake: Lake) -> None:
    samples = _samples()
    for one in samples:
        one.columns["rollout_log_probs"][: one.length * 3 // 4] = 0.0
    capture(
        lake,
        {0: samples},
        WAY,
        stages=["sample"],
        columns=["rollout_log_probs"],
        settings=WAY.full,
    )
    (cohort,) = lake.replay().cohorts
    assert cohort.findings == []


def _with_tokens(lake: Lake, prompts: Sequence[int], stages: Sequence[Any] = ("sample",)) -> None:
    """A rollout of one group, whose prompts begin with these tokens."""
    with start(lake, stages=list(stages)) as builder:
        rows = range(len(prompts))
        builder.samples([sample(row, raw_reward=None, reward=None) for row in rows])
        builder.tensor("rollout_log_probs", [[-0.5 - row / 7, -0.3] for row in rows])
        builder.tensor("tokens", [[first, 8, 9] for first in prompts])


def test_members_with_other_prompts_are_found_by_a_replay_and_by_a_validation(lake: Lake) -> None:
    _with_tokens(lake, [5, 5, 6, 5])
    (cohort,) = lake.replay().cohorts
    (found,) = cohort.findings
    assert (found.check, found.severity, found.sample_id) == (
        "group.mixed-prompts",
        "warning",
        "s-2",
    )
    (told,) = lake.validate(deep=True).findings
    assert (told.check, told.severity) == ("group.mixed-prompts", "warning")
    other = Lake.create(f"{lake.path}-other")
    _with_tokens(other, [5, 5, 5, 5])
    assert other.replay().cohorts[0].findings == []


def test_a_part_of_a_group_may_well_be_constant(lake: Lake) -> None:
    samples = _samples()
    for one in samples[:2]:
        one.raw_reward, one.reward = 0.1, -0.0074
    shares = {0: samples[:2], 1: samples[4:]}
    found = _findings(lake, samples, stages=["sample"], shares=shares)
    assert "group.constant" not in {one.check for one in found}


def test_a_nan_hides_no_log_prob_above_0(lake: Lake) -> None:
    samples = _samples()
    samples[0].columns["ref_log_probs"][0] = float("nan")
    samples[1].columns["ref_log_probs"][3] = 0.5
    found = {one.check: one for one in _findings(lake, samples, stages=["sample"])}
    assert (found["log-prob.positive"].sample_id, found["log-prob.positive"].token) == ("s-1", 3)


def test_what_differs_little_is_no_shift(lake: Lake) -> None:
    """A drift of the policy moves log-probs by more than the sampler's noise, and shifts none."""
    samples = _samples()
    for number, one in enumerate(samples):
        drift = np.random.default_rng(number).normal(0.0, 0.4, one.length)
        values = one.columns["old_log_probs"] + torch.from_numpy(drift).float()
        one.columns["rollout_log_probs"] = values.clamp(max=-1e-4)
    assert [one for one in _findings(lake, samples) if one.severity == "error"] == []


def test_settings_are_only_read(lake: Lake) -> None:
    """Defaults have everything that the checks ask for."""
    assert _findings(lake, _samples(), settings=Settings()) == []


def test_a_deep_validation_checks_every_cohort(lake: Lake) -> None:
    samples = _samples()
    _late(samples)
    _findings(lake, samples)
    assert lake.validate().ok
    report = lake.validate(deep=True)
    assert not report.ok
    (found,) = report.findings
    assert (found.severity, found.check) == ("error", "log-prob.shifted")
    assert found.message.startswith("run 'r' rollout 0 s-0 token ")


# Findings that name no mistake, beside what is unstated or unchecked: what was not done or not
# said, and what is said of whole captures; NaN and infinities are told by where they entered.
NO_MISTAKE = {
    *("advantage.masked", "also-consumed-by", "completeness", "copy", "dtype", "handoff", "kernel"),
    *("nothing-declared", "outputs.not-compared", "refused", "tolerance"),
    *("non-finite.masked", "non-finite.trained", "non-finite.unread", "reward.function"),
    *("settings.not-read", "gradient", "loss.reduction"),
}


def _names_of_findings(module: Path) -> set[str]:
    """First arguments of the calls that make a finding, words in both branches of a choice."""
    tree = ast.parse(module.read_text())
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = set[str]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        places = {
            "Finding": (0, 1),
            "finding": (0, 1),
            "at": (0, 2),
            "about": (1, 2),
            "_find": (1, 2),
        }
        if name not in places:
            continue
        start, stop = places[name]
        for one in node.args[start:stop]:
            value = constants.get(one.id, one) if isinstance(one, ast.Name) else one
            found |= {
                part.value
                for part in ast.walk(value)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            }
    return found - {"error", "warning", "info"}


def test_every_finding_has_a_fault_of_its_name() -> None:
    """What a check says is explained: by name, and with where to look."""
    folder = Path(contract_checks.__file__).parents[1]
    said = {
        name
        for module in folder.rglob("*.py")
        if module.relative_to(folder).parts[0] not in ("gate", "explain", "faults")
        for name in _names_of_findings(module)
        if re.fullmatch(r"[a-z]+(-[a-z]+)*(\.[a-z]+(-[a-z]+)*)?", name)
    }
    assert len(said) > 50
    known = {one.id for one in FAULTS}
    unsaid = {one for one in said if one.endswith((".unstated", ".unchecked"))}
    assert said - known - unsaid == NO_MISTAKE


def _kl(change: Callable[[torch.Tensor, float], torch.Tensor]) -> Callable[[list[Sample]], None]:
    def spoil(samples: list[Sample]) -> None:
        for one in samples:
            gap = one.columns["ref_log_probs"] - one.columns["old_log_probs"]
            k3 = torch.exp(gap) - 1.0 - gap
            one.columns["kl"] = change(k3, float(one.reward or 0.0))

    return spoil


def _rewarded(kl: torch.Tensor, reward: float) -> torch.Tensor:
    found = -0.05 * kl
    found[-1] += reward
    return found


@pytest.mark.parametrize(
    ("change", "checks"),
    [
        (lambda kl, reward: kl, set()),
        (lambda kl, reward: -0.1 * kl, {"kl.negative"}),
        (_rewarded, {"kl.negative", "kl.edited"}),
    ],
)
def test_a_kl_that_was_edited_is_found_where_nothing_recomputes_it(
    lake: Lake, change: Callable[[torch.Tensor, float], torch.Tensor], checks: set[str]
) -> None:
    samples = _samples()
    _kl(change)(samples)
    settings = with_changes(WAY.full, {"kl.estimator": "k3"})
    capture(
        lake,
        {0: samples},
        WAY,
        stages=["sample"],
        columns=(*COLUMNS, "kl"),
        settings=settings,
    )
    (cohort,) = lake.replay().cohorts
    assert {one.check for one in cohort.findings if one.severity == "warning"} == checks


def test_rewards_that_are_centred_over_all_and_in_no_group_are_found(lake: Lake) -> None:
    samples = _samples()
    raw = np.array([one.raw_reward for one in samples])
    healthy = _findings(lake, samples, stages=["sample"])
    assert "group.one-block" not in {one.check for one in healthy}
    for one, used in zip(samples, (raw - raw.mean()) / raw.std(), strict=True):
        one.reward = float(np.float32(used))
    found = _findings(Lake.create(f"{lake.path}-other"), samples, stages=["sample"])
    assert "group.one-block" in {one.check for one in found}


def _versioned(
    lake: Lake, spans: Sequence[Sequence[int]], trainer: int | None, **changes: Any
) -> dict[str, Finding]:
    """Findings of samples of four tokens, each sampled by so many versions in turn."""
    settings = with_changes(Settings(), {f"sampling.{name}": one for name, one in changes.items()})
    with lake.capture(
        run_id="r", rollout_id=5, rank=0, expected_ranks=[0], settings=settings, stages=["sample"]
    ) as builder:
        builder.samples(
            [
                SampleRecord(
                    sample_id=f"s-{row}",
                    group_id="g",
                    response_length=4,
                    total_length=6,
                    loss_mask=[1] * 4,
                    weight_versions=[
                        (4 * at // len(versions), 4 * (at + 1) // len(versions), one)
                        for at, one in enumerate(versions)
                    ]
                    or None,
                )
                for row, versions in enumerate(spans)
            ],
            reward_dtype="float32",
        )
        values = [torch.full((4,), -0.5 - row / 7) for row in range(len(spans))]
        builder.tensor("old_log_probs", values, source="trainer", weight_version=trainer)
    (cohort,) = lake.replay().cohorts
    return {one.check: one for one in cohort.findings if one.check.startswith("weights.")}


def test_weights_older_than_allowed_are_an_error_at_the_sample(lake: Lake) -> None:
    found = _versioned(lake, [[9], [7, 8], [6]], 9, max_staleness=2, partial=True)
    assert {*found} == {"weights.stale"}
    stale = found["weights.stale"]
    assert (stale.severity, stale.sample_id) == ("error", "s-2")
    assert "1 samples are more than 2 weight versions behind" in stale.message
    other = Lake.create(f"{lake.path}-other")
    assert _versioned(other, [[9], [7, 8], [7]], 9, max_staleness=2, partial=True) == {}


def test_mixed_weights_are_an_error_where_no_rollout_is_partial(lake: Lake) -> None:
    spans = [[3], [3, 4]]
    for number, (partial, severity) in enumerate([(False, "error"), (None, "warning")]):
        found = _versioned(Lake.create(f"{lake.path}-{number}"), spans, 4, partial=partial)
        assert {name: one.severity for name, one in found.items()} == {"weights.mixed": severity}
    assert _versioned(lake, spans, 4, partial=True) == {}


def test_weights_that_go_back_are_found(lake: Lake) -> None:
    found = _versioned(lake, [[4, 3], [4]], 4, partial=True)
    assert {*found} == {"weights.backwards"}


def test_a_policy_that_was_trained_since_is_at_no_other_temperature(lake: Lake) -> None:
    """Training makes likely tokens likelier; where versions are known, none is blamed for it."""
    samples = _samples(size=8, length=12)
    for number, known in enumerate((False, True)):
        made = Lake.create(f"{lake.path}-{number}")
        with made.capture(
            run_id="r",
            rollout_id=0,
            rank=0,
            expected_ranks=[0],
            settings=Settings(),
            stages=["sample"],
        ) as builder:
            builder.samples(
                [
                    SampleRecord(
                        sample_id=one.sample_id,
                        group_id=one.group,
                        response_length=one.length,
                        total_length=one.length,
                        loss_mask=one.mask,
                        weight_versions=[(0, one.length, 3)] if known else None,
                    )
                    for one in samples
                ],
                reward_dtype="float32",
            )
            old = [one.columns["old_log_probs"] for one in samples]
            builder.tensor("rollout_log_probs", [0.4 * one for one in old])
            version = 4 if known else None
            builder.tensor("old_log_probs", old, source="trainer", weight_version=version)
        (cohort,) = made.replay().cohorts
        named = {one.check for one in cohort.findings}
        assert ("log-prob.temperature" in named) == (not known)


@pytest.mark.parametrize(("spans", "trainer"), [([[9], [], [6]], 9), ([[9], [8], [6]], None)])
def test_a_bound_on_weights_that_cannot_be_held_is_said(
    lake: Lake, spans: list[list[int]], trainer: int | None
) -> None:
    found = _versioned(lake, spans, trainer, max_staleness=2, partial=True)
    assert {*found} == {"weights.unchecked"}
    assert "sampling.max_staleness stated and not checked" in found["weights.unchecked"].message


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ((0.5, 1.0), True),
        ((0.5, 1.5), False),  # three times, of two ranks
        ((1e-9, 1.23456e-5), False),
        ((0.5, math.inf), False),
        ((0.5, math.nan), False),
    ],
)
def test_a_number_of_all_ranks_is_a_multiple_by_at_most_the_ranks(
    lake: Lake, values: tuple[float, float], found: bool
) -> None:
    for rank, value in enumerate(values):
        with start(lake, step_id=0, rank=rank, expected_ranks=[0, 1], stages=["sample"]) as one:
            one.samples([sample(0, sample_id=f"s-{rank}")])
            one.expected("loss.policy", loss=value, scope="global", reduction="mean")
    (cohort,) = lake.replay().cohorts
    assert ("rank.factor" in {one.check for one in cohort.findings}) == found
