"""Real trainings of TRL on the CPU: captured, they replay, and their numbers are the same bits."""

import json
import math
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.processes import ROOT, free_port
from tests.helpers.trl_training import PLAIN, PROMPTS, known_fault, lacking, make_trainer, train
from trajreplay import Lake
from trajreplay.capture import CaptureWarning, Selection, Switches
from trajreplay.capture.switching.triggers import Triggers
from trajreplay.capture.trl import TrajReplayCallback, attach, hooks
from trajreplay.capture.trl.generation import generation_of
from trajreplay.capture.writing.outlet import Outlet
from trajreplay.schema.events import load_detail
from trajreplay.stages import Report

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore")]

KL = {"beta": 0.04, "num_iterations": 2}
BY_SEQUENCE = {"importance_sampling_level": "sequence", "num_iterations": 2}
TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
CASES: dict[str, dict[str, Any]] = {
    **{f"{name}": {"loss_type": name} for name in TYPES},
    **{f"{name} with kl, twice": {"loss_type": name, **KL} for name in TYPES},
    "gspo": {"loss_type": "grpo", **BY_SEQUENCE},
    "gspo, on policy, with kl": {**BY_SEQUENCE, "beta": 0.04, "num_iterations": 1},
    "gspo with plain kl": {
        "loss_type": "grpo",
        "use_bias_correction_kl": False,
        "scale_rewards": "batch",
        **BY_SEQUENCE,
        "beta": 0.04,
    },
    "luspo by sequence": {"loss_type": "luspo", **BY_SEQUENCE},
    "clipped on both sides": {"loss_type": "grpo", "delta": 1.5, "num_iterations": 3},
    "unscaled": {"loss_type": "grpo", "scale_rewards": "none", "num_iterations": 2},
    "truncated completions masked": {
        "loss_type": "dapo",
        "mask_truncated_completions": True,
        "epsilon_high": 0.28,
        "num_iterations": 2,
    },
    "off-policy samples masked": {"off_policy_mask_threshold": 0.05, "num_iterations": 2},
    "a generation of two steps": {
        "loss_type": "dapo",
        "steps_per_generation": 8,
        "per_device_train_batch_size": 4,
    },
    "accumulation of two": {
        "loss_type": "dapo",
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    },
    "a step of two generations": {"loss_type": "dapo", "steps_per_generation": 2},
    "no accumulation, and a temperature": {"gradient_accumulation_steps": 1, "temperature": 0.7},
    "an entropy bonus": {"loss_type": "grpo", "entropy_coef": 0.5, "num_iterations": 2},
    "an entropy bonus beside a constant": {
        **KL,
        "loss_type": "dr_grpo",
        "entropy_coef": 0.5,
        "num_iterations": 2,
    },
    "each reward normalised": {
        "multi_objective_aggregation": "normalize_then_sum",
        "scale_rewards": "none",  # which it then does not read
        "num_iterations": 2,
    },
}
# What TRL computes and no setting describes: it is recorded, and says why it is not recomputed.
SHOWN: dict[str, tuple[dict[str, Any], str, str]] = {
    "gspo with weighted kl": ({**BY_SEQUENCE, "beta": 0.04}, "loss.policy", "KL of its tokens"),
    "high entropy only": ({"top_entropy_quantile": 0.5}, "loss.policy", "high entropy"),
    "entropy bonus": ({"entropy_coef": 0.01}, "loss.policy", "entropy bonus of another scale"),
    "adaptive bonus": (
        {"loss_type": "grpo", "use_adaptive_entropy": True},
        "loss.policy",
        "bonus is adaptive",
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def switches(folder: Path, **changes: Any) -> Switches:
    return Switches(**{"lake": str(folder / "lake"), "run_id": "r", "strict": True, **changes})


def replayed(folder: Path) -> Report:
    return Lake.open(folder / "lake").replay()


def verdicts(report: Report, stage: str) -> set[str]:
    found = [one for cohort in report.cohorts for one in cohort.stages if one.stage == stage]
    return {str(one.verdict) for one in found} - {"not-declared"}


@pytest.mark.parametrize("name", CASES)
def test_a_training_replays_and_its_parameters_are_the_same_bits(
    model: Path, tmp_path: Path, name: str
) -> None:
    plain, _ = train(model, tmp_path / "out", CASES[name], None)
    captured, trainer = train(model, tmp_path / "out", CASES[name], switches(tmp_path))
    assert captured == plain
    report = replayed(tmp_path)
    if fault := known_fault(CASES[name]):
        assert report.verdict == fault
        assert verdicts(report, "loss.policy") == {fault}
        return
    assert report.verdict == "pass", report.to_json()
    steps = [one for one in report.cohorts if one.step_id is not None]
    assert len(steps) == PLAIN["max_steps"] == trainer.state.global_step
    for stage in ("sample", "reward.raw", "reward.post_process", "advantage.estimate"):
        assert verdicts(report, stage) == {"pass"}
    losses = [one for cohort in steps for one in cohort.stages if one.stage == "loss.policy"]
    accumulation = CASES[name].get("gradient_accumulation_steps", 4)
    assert [one.verdict for one in losses] == ["pass"] * len(steps)
    assert {one.compared for one in losses} == {accumulation}
    assert max(one.max_abs_error or 0.0 for one in losses) < 5e-7


def test_the_version_that_is_installed_by_the_project_has_all_that_is_trained_here() -> None:
    pinned = (ROOT / "tests/oracles/requirements.txt").read_text().split()
    if f"trl=={version('trl')}" not in pinned:
        pytest.skip(f"TRL {version('trl')} is not the one of tests/oracles/requirements.txt")
    assert [lacking(one) for one in CASES.values() if lacking(one)] == []
    assert [one for one in CASES.values() if known_fault(one)] == []


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo"])
def test_in_float32_and_its_own_order_a_loss_is_the_recorded_one_bit_for_bit(
    model: Path, tmp_path: Path, kind: str
) -> None:
    """What a loss in float64 differs by is the order of the sums in float32, and nothing else."""
    train(model, tmp_path / "out", {"loss_type": kind, "num_iterations": 2}, switches(tmp_path))
    lake = Lake.open(tmp_path / "lake")
    place = "rollout_id, step_id, micro_batch_id"
    losses = lake.sql(f"select {place}, value from outputs where field = 'loss'").arrow()
    widths = lake.sql("select rollout_id, max(response_length) as n from rollouts group by 1")
    width = dict(zip(*widths.arrow().to_pydict().values(), strict=True))
    samples = lake.sql(f"select * from steps order by {place}, row").arrow().to_pylist()
    assert len(losses) == PLAIN["max_steps"] * PLAIN["gradient_accumulation_steps"]
    for loss in losses.to_pylist():
        rows = [
            one for one in samples if all(one[name] == loss[name] for name in place.split(", "))
        ]
        new, old, advantages, mask = (
            _padded([one[name] for one in rows], width[loss["rollout_id"]])
            for name in ("log_probs", "old_log_probs", "advantages", "loss_mask")
        )
        ratio, advantages = (new - old).exp(), advantages[:, :1]
        terms = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        found = _reduced(kind, terms * mask, mask) / PLAIN["gradient_accumulation_steps"]
        assert found.item() == loss["value"]


@pytest.mark.parametrize("is_told", [True, False], ids=["ended when done", "by the next one"])
def test_ratios_are_told_with_the_step_whose_micro_batches_have_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    if not is_told:  # as where a step had fewer micro-batches than its trainer says
        monkeypatch.setattr(hooks.Hooks, "end_step_if_done", lambda *_, **__: None)
    told: dict[str, list[float]] = {}
    check = Outlet.check

    def seen(outlet: Outlet, step: str, scalars: Any) -> None:
        told[step] = list(scalars["ratio"][0])
        check(outlet, step, scalars)

    monkeypatch.setattr(Outlet, "check", seen)
    watching = switches(
        tmp_path,
        keep_last=2,
        triggers=Triggers("ratio>1e6"),
        selection=Selection(steps="0-99:0-99"),
    )
    train(model, tmp_path / "out", {"num_iterations": 2}, watching)
    place = "rollout_id, step_id, micro_batch_id"
    rows = Lake.open(tmp_path / "lake").sql(f"select * from steps order by {place}, row").arrow()
    widths: dict[int, int] = {}
    for one in rows.to_pylist():
        before = widths.get(one["rollout_id"], 0)
        widths[one["rollout_id"]] = max(before, one["response_length"])
    moved: dict[str, dict[str, list[float]]] = {}
    for one in rows.to_pylist():
        step = moved.setdefault(f"step {one['rollout_id']}:{one['step_id']}", {})
        mine = step.setdefault(one["micro_batch_id"], [])
        tokens = zip(one["log_probs"], one["old_log_probs"], strict=True)
        mine += [new - old for new, old in tokens]
        mine += [0.0] * (one["response_length"] < widths[one["rollout_id"]])  # a padding has 1
    assert told.keys() == moved.keys()
    assert len(told) == PLAIN["max_steps"]
    for name, step in moved.items():
        expected = [math.exp(end) for mine in step.values() for end in (max(mine), min(mine))]
        assert told[name] == pytest.approx(expected, rel=1e-6)
    assert any(abs(one - 1.0) > 1e-3 for values in told.values() for one in values)


def _reduced(kind: str, terms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As TRL adds up the terms of a micro-batch."""
    found: torch.Tensor
    if kind == "grpo":
        found = (terms.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    elif kind == "bnpo":
        found = terms.sum() / mask.sum().clamp(min=1.0)
    else:
        found = terms.sum() / (len(terms) * PLAIN["max_completion_length"])
    return found


def _padded(rows: list[list[float]], width: int) -> torch.Tensor:
    """(S, T) float32, as TRL pads a generation."""
    return torch.tensor([[*map(float, row), *[0.0] * (width - len(row))] for row in rows])


GRADIENTS: dict[str, dict[str, Any]] = {
    "on policy": {"loss_type": "grpo"},
    **{name: {"loss_type": name, "num_iterations": 2} for name in ("dapo", "cispo", "sapo")},
    "with plain kl": {"loss_type": "grpo", "use_bias_correction_kl": False, **KL},
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_a_training_are_those_of_the_replay(
    model: Path, tmp_path: Path, name: str
) -> None:
    plain, _ = train(model, tmp_path / "out", GRADIENTS[name], None)
    watching = switches(tmp_path, gradients=True)
    captured, _ = train(model, tmp_path / "out", GRADIENTS[name], watching)
    assert captured == plain
    report = replayed(tmp_path)
    assert report.verdict == "pass", report.to_json()
    told = [one for cohort in report.cohorts for one in cohort.findings if one.check == "gradient"]
    assert [one.message for one in told if one.severity != "info"] == []
    assert len(told) == PLAIN["max_steps"]
    assert all("are those of the recorded loss" in one.message for one in told)


@pytest.mark.parametrize("name", SHOWN)
def test_what_no_setting_describes_is_recorded_and_says_why(
    model: Path, tmp_path: Path, name: str
) -> None:
    fields, stage, why = SHOWN[name]
    train(model, tmp_path / "out", {"max_steps": 2, **fields}, switches(tmp_path))
    report = replayed(tmp_path)
    assert verdicts(report, stage) == {"recorded-only"}
    found = [one for cohort in report.cohorts for one in cohort.stages if one.stage == stage]
    assert any(why in one.message for one in found)
    assert report.verdict == "pass"


@pytest.mark.parametrize("form", ["callback", "attach"])
def test_the_environment_switches_it_on(
    model: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAJREPLAY_CAPTURE", "1")
    monkeypatch.setenv("TRAJREPLAY_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("TRAJREPLAY_RUN_ID", "r")
    monkeypatch.setenv("TRAJREPLAY_CAPTURE_ROLLOUTS", "1")
    monkeypatch.setenv("TRAJREPLAY_CAPTURE_REDACTION", "prompt=truncate:2,response=hash")
    options = {"callbacks": [TrajReplayCallback()]} if form == "callback" else {}
    trainer = make_trainer(model, tmp_path / "out", {"max_steps": 3, **KL}, **options)
    if form == "attach":
        attach(trainer)
    trainer.train()
    lake = Lake.open(tmp_path / "lake")
    report = lake.replay()
    assert report.verdict == "pass"
    assert [(one.rollout_id, one.step_id) for one in report.cohorts] == [(1, None), (1, 0)]
    texts = lake.sql("select distinct prompt, response[:7] as response from rollouts").arrow()
    assert set(texts["prompt"].to_pylist()) <= {one[:2] for one in PROMPTS}
    assert set(texts["response"].to_pylist()) == {"sha256:"}
    events = lake.sql("select event, count(*) as n from events group by 1 order by 1").arrow()
    assert events["n"].to_pylist() == [
        3,
        1,
    ]  # heartbeats of steps that are not captured, and the end
    assert "_compute_loss" not in vars(trainer)


def test_without_the_switch_a_trainer_is_left_alone(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "out", {"max_steps": 1})
    before = [type(one) for one in trainer.callback_handler.callbacks]
    attach(trainer)
    assert [type(one) for one in trainer.callback_handler.callbacks] == before
    assert "_compute_loss" not in vars(trainer)


def test_a_training_that_takes_no_step_says_so(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path / "out", {"steps_per_generation": 8})
    attach(trainer, switches(tmp_path))
    with pytest.warns(CaptureWarning, match="took no optimizer step"):
        trainer.train()


@pytest.mark.parametrize(
    ("part", "stage"),
    [("loss", "loss.policy"), ("advantages", "reward.post_process"), ("old", "sample")],
)
def test_a_fault_in_a_trainer_is_found_where_it_is(
    model: Path, tmp_path: Path, part: str, stage: str
) -> None:
    trainer = make_trainer(model, tmp_path / "out", {"loss_type": "dapo", **KL})
    generate, compute = trainer._generate_and_score_completions, trainer._compute_loss

    def wrong_generation(inputs: Any) -> Any:
        output = generate(inputs)
        if part == "advantages":
            output["advantages"] = output["advantages"] * 1.01
        return output

    def wrong_loss(model: Any, inputs: Any) -> Any:
        if part == "old":
            inputs["old_per_token_logps"] = inputs["old_per_token_logps"] + 1e-3
        return compute(model, inputs) * (0.5 if part == "loss" else 1.0)

    trainer._generate_and_score_completions, trainer._compute_loss = wrong_generation, wrong_loss
    attach(trainer, switches(tmp_path))
    trainer.train()
    report = replayed(tmp_path)
    assert (report.verdict, report.first_divergent_stage) == ("diverged", stage)


@pytest.mark.parametrize("threshold", [0.0, 1e9])
def test_norms_of_gradients_are_told_and_fire_a_trigger(
    model: Path, tmp_path: Path, threshold: float
) -> None:
    bound = switches(tmp_path, keep_last=2, triggers=Triggers(f"grad_norm>{threshold:g}"))
    train(model, tmp_path / "out", {}, bound)
    lake = Lake.open(tmp_path / "lake")
    steps = lake.sql("select count(*) as n from manifest where kind = 'step'").arrow()
    assert (steps["n"][0].as_py() > 0) == (threshold == 0.0)
    text = "select detail from events where event = 'heartbeat' order by seq"
    told = [load_detail(one) for one in lake.sql(text).arrow()["detail"].to_pylist()]
    assert [one["step"] for one in told] == [*range(1, 1 + PLAIN["max_steps"])]
    assert all(one["grad_norm"] > 0.0 for one in told)


@pytest.mark.parametrize(("bound", "fires"), [("ratio>1.0001", True), ("ratio<0.01", False)])
def test_the_ratio_of_a_step_fires_a_trigger(
    model: Path, tmp_path: Path, bound: str, fires: bool
) -> None:
    watched = switches(tmp_path, keep_last=2, triggers=Triggers(bound))
    train(model, tmp_path / "out", {"loss_type": "grpo", "num_iterations": 2}, watched)
    steps = Lake.open(tmp_path / "lake").sql("select * from manifest where kind = 'step'").arrow()
    assert (len(steps) > 0) is fires


def test_rewards_that_other_code_computes_are_not_claimed_and_the_steps_are_there(
    model: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path / "out", KL)
    score = trainer._calculate_rewards
    trainer.score = score

    def generate(inputs: Any) -> Any:
        # As a subclass that scores by a method of its own.
        wrapped, trainer._calculate_rewards = trainer._calculate_rewards, trainer.score
        try:
            return original(inputs)
        finally:
            trainer._calculate_rewards = wrapped

    original = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = generate
    attach(trainer, switches(tmp_path))
    trainer.train()
    report = replayed(tmp_path)
    assert report.verdict == "pass", report.to_json()
    assert verdicts(report, "reward.raw") == verdicts(report, "reward.post_process")
    assert verdicts(report, "reward.raw") == {"recorded-only"}
    steps = [one for one in report.cohorts if one.step_id is not None]
    assert len(steps) == PLAIN["max_steps"]
    assert verdicts(report, "loss.policy") == {"pass"}


def test_a_generation_that_cannot_be_described_leaves_entries_and_heartbeats(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = train(model, tmp_path / "out", {}, None)
    describe, calls = generation_of, iter(range(100))

    def failing(*args: Any, **given: Any) -> Any:
        if next(calls) == 1:
            raise KeyError("prompt_mask")
        return describe(*args, **given)

    monkeypatch.setattr(hooks, "generation_of", failing)
    captured, _ = train(model, tmp_path / "out", {}, switches(tmp_path, strict=False))
    assert captured == plain
    lake = Lake.open(tmp_path / "lake")
    text = "select kind, rollout_id, status from manifest where kind != 'events' order by 1, 2"
    found = lake.sql(text).arrow().to_pylist()
    assert [(one["kind"], one["rollout_id"], one["status"]) for one in found] == [
        (kind, rollout, "dropped" if rollout == 1 else "complete")
        for kind in ("rollout", "step")
        for rollout in range(PLAIN["max_steps"])
    ]
    beats = lake.sql("select detail from events where event = 'heartbeat'").arrow()
    assert all("loss" in load_detail(one) for one in beats["detail"].to_pylist())
    assert beats.num_rows == PLAIN["max_steps"]


def test_a_training_that_goes_on_from_a_checkpoint_is_one_lineage(
    model: Path, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "loss_type": "dapo", **KL}
    train(model, tmp_path / "out", saving, switches(tmp_path))
    trainer = make_trainer(model, tmp_path / "out", {**saving, "max_steps": 6})
    attach(trainer, switches(tmp_path))
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    lake = Lake.open(tmp_path / "lake")
    report = lake.replay()
    assert report.verdict == "pass", report.to_json()
    steps = [one for one in report.cohorts if one.step_id is not None]
    assert [(one.attempt, one.rollout_id, one.step_id) for one in steps] == [
        (0, 0, 0),
        (0, 0, 1),
        *((1, rollout, step) for rollout in (1, 2) for step in (0, 1)),
    ]
    text = "select attempt, detail from events where event = 'heartbeat' order by attempt, time"
    told = lake.sql(text).arrow().to_pylist()
    assert [load_detail(one["detail"])["step"] for one in told if one["attempt"]] == [3, 4, 5, 6]


@pytest.mark.parametrize("fields", [{"loss_type": "dapo", **KL}, {"loss_type": "grpo"}])
def test_two_ranks_replay_as_one_training(
    model: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    lake, given = str(tmp_path / "lake"), json.dumps({"per_device_train_batch_size": 4, **fields})
    digests = {where: _ranks(model, tmp_path / "out", where, given) for where in ("-", lake)}
    assert digests["-"] == digests[lake]
    report = replayed(tmp_path)
    assert report.verdict == "pass", report.to_json()
    assert [one.ranks for one in report.cohorts] == [[0, 1]] * len(report.cohorts)
    assert verdicts(report, "loss.policy") == {"pass"}


def _ranks(model: Path, out: Path, lake: str, fields: str) -> list[str]:
    """Train on two ranks that meet by gloo; the digest of the parameters of each."""
    port = free_port()
    programs = [
        subprocess.Popen(
            [sys.executable, "tests/helpers/trl_training.py", str(model), str(out), lake, fields],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(2)
    ]
    try:
        found = [one.communicate(timeout=300) for one in programs]
    finally:
        for one in programs:
            one.kill()
    assert [one.returncode for one in programs] == [0, 0], "\n".join(error for _, error in found)
    return [output.splitlines()[-1] for output, _ in found]
