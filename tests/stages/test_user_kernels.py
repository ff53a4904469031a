"""Stages that a user's own kernel recomputes: what it gives passes, another training diverges."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.captures import entries_of
from tests.helpers.cohorts import ALL_COLUMNS, capture
from tests.helpers.plugins import KERNELS, pip_install, scalars, score, write_package
from tests.helpers.scenes import WAY, drawn, refusals, the_cohort, the_stage, verdicts
from tests.helpers.trainer import Sample
from trajreplay import KlSettings, Lake, LossSettings, RewardSettings, Settings, StageContract
from trajreplay.schema import SchemaError, with_changes
from trajreplay.schema.contracts import REUSABLE
from trajreplay.stages import CohortReport

POINTS = {
    "reward.post_process": "acme:rewards",
    "reward.post_process:centred": "acme:centred",
    "advantage.kl:mine": "acme:kl",
    "advantage.estimate:mine": "acme:advantages",
    "loss.policy:my_loss": "acme:policy",
    "loss.value:mine": "acme:value",
    "loss.policy:broken": "acme:broken",
    "loss.policy:narrow": "acme:narrow",
    "loss.policy:short": "acme:short",
    "loss.policy:bare": "acme:bare",
    "loss.policy:nothing": "acme:nothing",
    "loss.policy:leaves": "acme:leaves",
    "loss.policy:number": "acme:number",
    "loss.policy:gone": "acme:no_such_function",
    "loss.policy:lost": "no_such_module:policy",
}
NAMES = {
    "reward.post_process": "reuse",
    "advantage.kl": "reuse:mine",
    "advantage.estimate": "reuse:mine",
    "loss.policy": "reuse:my_loss",
    "loss.value": "reuse:mine",
}
SETTINGS = Settings(
    reward=RewardSettings(n_samples_per_prompt=4),
    kl=KlSettings(coef=0.1),
    loss=LossSettings(entropy_coef=0.01, surrogate="tanh"),
)


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = write_package(tmp_path / "site", "acme", {KERNELS: POINTS})
    monkeypatch.syspath_prepend(str(site))


def _shares(rollout_id: int = 0) -> dict[int, list[Sample]]:
    numbers = np.random.default_rng(rollout_id)
    samples = drawn(rollout_id=rollout_id)
    for one in samples:
        for name in ("old_values", "values"):
            one.columns[name] = torch.from_numpy(numbers.normal(0.0, 0.5, one.length)).float()
    score(samples)
    return {0: samples[:4], 1: samples[4:]}


def _stages(**changes: str) -> list[StageContract]:
    names = NAMES | {name.replace("__", "."): value for name, value in changes.items()}
    plain = [StageContract("sample"), StageContract("reward.raw")]
    return plain + [StageContract(one, implementation=names[one]) for one in REUSABLE]


def _record(lake: Lake, shares: dict[int, list[Sample]], **options: Any) -> None:
    options = {"expected": scalars(shares), "stages": _stages(), "step_id": 0, **options}
    capture(
        lake,
        shares,
        WAY,
        settings=options.pop("settings", SETTINGS),
        columns=(*ALL_COLUMNS, "values", "old_values"),
        **options,
    )


def _replayed(lake: Lake, **changes: str) -> CohortReport:
    _record(lake, _shares(), stages=_stages(**changes))
    return the_cohort(lake.replay())


def test_what_the_kernels_compute_passes(lake: Lake) -> None:
    _record(lake, _shares())
    cohort = the_cohort(lake.replay())
    assert set(verdicts(cohort).values()) == {"pass"}, cohort.to_json()
    assert all(the_stage(cohort, one).compared for one in NAMES)
    said = [one.message for one in cohort.findings if one.check == "kernel"]
    assert said[3] == "recomputed by the kernel loss.policy:my_loss (acme:policy of acme 1.2)"


def test_without_the_kernels_the_same_training_diverges(lake: Lake) -> None:
    cohort = _replayed(lake, reward__post_process="reimplemented")
    assert cohort.first_divergent_stage == "reward.post_process"


@pytest.mark.parametrize(
    ("stage", "column"),
    [("advantage.kl", "kl"), ("advantage.estimate", "advantages")],
)
def test_a_wrong_value_diverges_at_its_stage(lake: Lake, stage: str, column: str) -> None:
    shares = _shares()
    shares[1][0].columns[column][0] += 0.01
    _record(lake, shares, expected=scalars(shares))
    cohort = the_cohort(lake.replay())
    assert cohort.first_divergent_stage == stage
    (found,) = (one for one in the_stage(cohort, stage).divergences if one.field == column)
    assert (found.sample_id, found.token) == ("s-4", 0)


def test_a_wrong_reward_diverges_and_what_follows_inherits(lake: Lake) -> None:
    shares = _shares()
    wrong = shares[0][2]
    wrong.reward = float(wrong.reward or 0.0) + 0.25
    advantages = wrong.columns["advantages"].double()
    places = 0.5 ** torch.arange(wrong.length)
    wrong.columns["advantages"] = (advantages + 0.25 * places).float()
    wrong.columns["returns"] = (wrong.columns["returns"].double() + 0.25 * places).float()
    _record(lake, shares, expected=scalars(shares))
    cohort = the_cohort(lake.replay())
    assert cohort.first_divergent_stage == "reward.post_process"
    assert {one.stage for one in cohort.stages if one.inherited} == {
        "advantage.estimate",
        "loss.policy",
        "loss.value",
    }


@pytest.mark.parametrize("name", ["pg_loss", "spread", "loss", "value_loss"])
def test_a_wrong_scalar_diverges_at_its_loss(lake: Lake, name: str) -> None:
    shares = _shares()
    expected = scalars(shares)
    stage = "loss.value" if name == "value_loss" else "loss.policy"
    (one,) = (one for one in expected[1] if one.stage == stage)
    one.values = {**one.values, name: one.values[name] + 0.01}
    _record(lake, shares, expected=expected)
    cohort = the_cohort(lake.replay())
    assert cohort.first_divergent_stage == stage
    assert [(one.field, one.rank) for one in the_stage(cohort, stage).divergences] == [(name, 1)]


def test_a_recorded_scalar_that_the_kernel_does_not_give_is_said(lake: Lake) -> None:
    shares = _shares()
    expected = scalars(shares)
    for one in expected[0]:
        one.values = {**one.values, "grad_norm": 1.0}
    _record(lake, shares, expected=expected)
    cohort = the_cohort(lake.replay())
    said = [one.message for one in cohort.findings if one.check == "outputs.not-compared"]
    no_such = (
        "recorded and compared with nothing: grad_norm; under the settings there is no such term"
    )
    assert said == [no_such] * 2
    assert cohort.verdict == "pass"


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("broken", "raised RuntimeError: no such thing as a loss"),
        (
            "narrow",
            "gives for pg_loss float32 of shape (26,) on cpu, expected float64 of shape (26,)",
        ),
        ("short", "gives for pg_loss float64 of shape (3,) on cpu, expected float64 of shape"),
        ("bare", "expected entropy_loss too, or loss itself, since entropy_coef is 0.01"),
        ("nothing", "gives a NoneType, expected a mapping from scalars to tensors"),
        ("leaves", "raised SystemExit: 0"),
    ],
)
def test_a_kernel_that_fails_refuses_its_stage_alone(lake: Lake, kernel: str, reason: str) -> None:
    cohort = _replayed(lake, loss__policy=f"reuse:{kernel}")
    assert cohort.verdict == "refused"
    assert f"loss.policy: the kernel loss.policy:{kernel} (acme:{kernel}" in refusals(cohort)
    assert reason in refusals(cohort)
    assert {one for one, verdict in verdicts(cohort).items() if verdict != "pass"} == {
        "loss.policy"
    }


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("absent", "the entry point 'loss.policy:absent' of the group trajreplay.kernels is not"),
        ("number", "is a int, expected a function"),
        ("gone", "cannot be imported: AttributeError"),
        ("lost", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_kernel_that_is_not_there_is_refused_by_name(
    lake: Lake, kernel: str, reason: str
) -> None:
    cohort = _replayed(lake, loss__policy=f"reuse:{kernel}")
    assert (cohort.verdict, verdicts(cohort)["loss.value"]) == ("refused", "pass")
    assert f"loss.policy:{kernel}" in refusals(cohort)
    assert reason in refusals(cohort)


def test_an_entry_point_that_two_packages_have_is_refused(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"loss.policy:my_loss": "other_acme:policy"}
    site = write_package(tmp_path / "other", "other_acme", {KERNELS: points})
    monkeypatch.syspath_prepend(str(site))
    reason = refusals(_replayed(lake))
    assert "acme:policy of acme 1.2 and other_acme:policy of other_acme 1.2" in reason


def test_only_the_cohort_whose_kernel_fails_is_refused(lake: Lake) -> None:
    for rollout_id, name in enumerate(["my_loss", "broken", "my_loss"]):
        stages = _stages(loss__policy=f"reuse:{name}")
        _record(lake, _shares(rollout_id), rollout_id=rollout_id, stages=stages)
    assert [one.verdict for one in lake.replay().cohorts] == ["pass", "refused", "pass"]


def test_a_kernel_gets_one_cohort_at_a_time(lake: Lake) -> None:
    stages = [StageContract("reward.post_process", implementation="reuse:centred")]
    for rollout_id in range(3):
        shares = _shares(rollout_id)
        samples = [one for own in shares.values() for one in own]
        mean = sum(one.raw_reward for one in samples) / len(samples)
        for one in samples:
            one.reward = one.raw_reward - mean
        _record(lake, shares, rollout_id=rollout_id, stages=stages, expected={})
    assert [one.verdict for one in lake.replay().cohorts] == ["pass"] * 3


def test_a_part_of_a_cohort_is_not_given_to_a_kernel_that_may_need_all(lake: Lake) -> None:
    _record(lake, _shares())
    cohort = the_cohort(lake.replay(groups=["g-0"]))
    assert verdicts(cohort)["advantage.kl"] == "pass"
    assert verdicts(cohort)["loss.policy"] == "skipped"
    assert "--closure cohort" in the_stage(cohort, "loss.policy").message


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("loss.policy", {"loss.mean_over": "micro-batch"}),
        ("loss.policy", {"loss.entropy_mean_over": "micro-batch", "loss.entropy_coef": 0.1}),
        ("loss.value", {"value.mean_over": "micro-batch"}),
        ("loss.policy", {"loss.nll_coef": 0.1}),
        ("loss.policy", {"loss.count_epsilon": -5.0}),
        ("loss.policy", {"loss.constant_norm": -1.0}),
        ("loss.policy", {"loss.token_count": "whatever"}),
        ("loss.policy", {"loss.proximal": "interpolated"}),
        ("reward.post_process", {"reward.unit": "trajectory"}),
    ],
)
def test_what_a_kernel_cannot_be_summed_up_by_is_refused_by_name(
    lake: Lake, stage: str, changes: dict[str, Any]
) -> None:
    _record(lake, _shares(), settings=with_changes(SETTINGS, changes))
    cohort = the_cohort(lake.replay())
    assert verdicts(cohort)[stage] == "refused"
    assert next(iter(changes)) in the_stage(cohort, stage).message


@pytest.mark.parametrize(
    "changes",
    [
        {"reward.costs": {"turns": 0.1, "input": 0.2}},
        {"reward.baseline": "greedy"},
        {"loss.dual_clip": 3.0},
        {"loss.micro_batch_weight": "rows"},
    ],
)
def test_what_is_the_kernels_own_affair_asks_for_nothing(
    lake: Lake, changes: dict[str, Any]
) -> None:
    _record(lake, _shares(), settings=with_changes(SETTINGS, changes))
    assert set(verdicts(the_cohort(lake.replay())).values()) == {"pass"}


def test_a_v1_contract_says_reuse_as_a_remark(lake: Lake) -> None:
    contract = StageContract("sample", version="v1", implementation="reuse")
    assert contract.kernel is None
    assert StageContract("loss.policy", implementation="relax 1.2").kernel is None


@pytest.mark.parametrize(
    ("stage", "implementation", "problem"),
    [
        ("loss.policy", "my_loss", "expected reimplemented, reuse or reuse:NAME"),
        ("loss.policy", "reuse:", "expected reimplemented, reuse or reuse:NAME"),
        ("loss.policy", "reuse:a b", "expected reimplemented, reuse or reuse:NAME"),
        ("reward.raw", "reuse", "takes no kernel, expected one of reward.post_process"),
    ],
)
def test_an_implementation_that_no_replay_would_find_is_not_declared(
    lake: Lake, stage: str, implementation: str, problem: str
) -> None:
    stages = [StageContract(stage, implementation=implementation)]
    with pytest.raises(SchemaError, match=problem):
        _record(lake, _shares(), stages=stages)
    assert entries_of(lake) == []


def test_the_name_of_a_kernel_is_kept_with_the_capture(lake: Lake) -> None:
    _record(lake, _shares())
    kept = [one.contracts["loss.policy"].kernel for one in entries_of(lake)]
    assert kept == ["loss.policy:my_loss"] * 2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pip")
    points = {one: value.replace("acme", "acme_wheel") for one, value in POINTS.items()}
    return pip_install(tmp_path_factory.mktemp("pip"), "acme_wheel", {KERNELS: points})


@pytest.mark.parametrize("wrong", [False, True])
def test_a_package_that_pip_installed_recomputes_its_stages(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Path, wrong: bool
) -> None:
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(tmp_path / "site")])
    monkeypatch.syspath_prepend(str(target))
    shares = _shares()
    if wrong:
        shares[0][0].columns["kl"][1] += 0.5
    _record(lake, shares, expected=scalars(shares))
    cohort = the_cohort(lake.replay())
    origins = {one.message.partition("(")[2] for one in cohort.findings if one.check == "kernel"}
    assert "acme_wheel:policy of acme_wheel 1.2)" in origins
    assert cohort.verdict == ("diverged" if wrong else "pass"), cohort.to_json()
    assert cohort.first_divergent_stage == ("advantage.kl" if wrong else None)
