"""Entropy, KL and value losses that verl's workers compute, captured and replayed."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.oracles.frameworks import Verl
from tests.oracles.terms import MICRO_BATCHES, STEPS, Worker
from trajreplay import Lake
from trajreplay.capture import CaptureWarning, Switches
from trajreplay.capture.verl import install, uninstall, wrapping
from trajreplay.capture.verl.critic import RUN_SUFFIX

pytestmark = pytest.mark.oracle

KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k3+", "k2+")


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    uninstall()


@pytest.fixture
def lake(verl: Verl, tmp_path: Path) -> Path:
    path = tmp_path / "lake"
    install(Switches(lake=str(path), run_id="r", strict=True))
    return path


def actor(verl: Verl, **settings: Any) -> Any:
    """A configuration of verl's actor with an entropy bonus and a KL."""
    given = {"use_kl_loss": True, "kl_loss_coef": 0.25, "entropy_coeff": 0.125, **settings}
    return verl.actor_config(**given)


def critic(verl: Verl, **settings: Any) -> Any:
    """A configuration of verl's critic."""
    import importlib

    kind = importlib.import_module("verl.workers.config").CriticConfig
    return kind(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)


def outputs(lake: Path, run: str, field: str) -> list[float]:
    """The recorded values of a scalar, in order."""
    text = (
        f"select value from outputs where field = '{field}' "
        "order by rollout_id, step_id, micro_batch_id"
    )
    return [float(one) for one in Lake.open(lake).sql(text, run=run).arrow()["value"].to_pylist()]


def verdict(lake: Path, run: str, stage: str) -> set[str]:
    """The verdicts of a stage."""
    report = Lake.open(lake).replay(run=run)
    assert len(report.cohorts) == STEPS
    return {one.verdict for c in report.cohorts for one in c.stages if one.stage == stage}


@pytest.mark.parametrize("kind", KINDS)
def test_terms_of_a_policy_loss_are_captured_and_replayed(
    verl: Verl, lake: Path, kind: str
) -> None:
    told = Worker(actor(verl, kl_loss_type=kind), entropy=True).train("ppo_loss")
    uninstall()
    assert outputs(lake, "r", "loss") == pytest.approx(told, rel=1e-6)
    policy, entropy, kl = (
        outputs(lake, "r", name) for name in ("pg_loss", "entropy_loss", "kl_loss")
    )
    assert told == pytest.approx(
        [p - 0.125 * e + 0.25 * k for p, e, k in zip(policy, entropy, kl, strict=True)], abs=1e-6
    )
    assert verdict(lake, "r", "loss.policy") == {"pass"}


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum",
                                  "seq-mean-token-sum-norm", "seq-mean-token-mean"])  # fmt: skip
def test_terms_and_values_are_replayed_under_every_aggregation(
    verl: Verl, lake: Path, mode: str
) -> None:
    Worker(actor(verl, loss_agg_mode=mode), entropy=True).train("ppo_loss")
    Worker(critic(verl, loss_agg_mode=mode)).train("value_loss")
    uninstall()
    assert verdict(lake, "r", "loss.policy") == {"pass"}
    assert verdict(lake, f"r{RUN_SUFFIX}", "loss.value") == {"pass"}


def test_a_loss_without_terms_has_none_in_the_lake(verl: Verl, lake: Path) -> None:
    config = actor(verl, use_kl_loss=False, entropy_coeff=0.0)
    told = Worker(config).train("ppo_loss")
    uninstall()
    assert outputs(lake, "r", "pg_loss") == pytest.approx(told, rel=1e-6)
    assert outputs(lake, "r", "entropy_loss") == outputs(lake, "r", "kl_loss") == []
    assert verdict(lake, "r", "loss.policy") == {"pass"}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", "pass"),
        ("seq-mean-token-sum", "pass"),
        ("seq-mean-token-mean", "pass"),
        ("token-sum", "recorded-only"),
        ("seq-mean-token-sum-norm", "recorded-only"),
    ],
)
def test_terms_that_are_aggregated_otherwise_are_replayed_where_each_is_a_mean(
    verl: Verl, lake: Path, mode: str, expected: str
) -> None:
    config = actor(verl, policy_loss={"loss_mode": "sapo"}, loss_agg_mode=mode)
    Worker(config, entropy=True).train("ppo_loss")
    uninstall()
    assert verdict(lake, "r", "loss.policy") == {expected}


@pytest.mark.parametrize("wrong", ["kl_penalty", "agg_loss"])
def test_a_wrong_term_is_found(
    verl: Verl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    import importlib

    losses = importlib.import_module("verl.workers.utils.losses")
    whole = getattr(losses, wrong)

    def changed(logprob: Any = None, ref_logprob: Any = None, kl_penalty: Any = None) -> Any:
        return 1.5 * whole(logprob, ref_logprob, kl_penalty)

    def larger(loss_mat: Any, loss_mask: Any, loss_agg_mode: Any, **given: Any) -> Any:
        return 1.5 * whole(loss_mat, loss_mask, loss_agg_mode, **given)

    monkeypatch.setattr(losses, wrong, changed if wrong == "kl_penalty" else larger)
    lake = tmp_path / "lake"
    install(Switches(lake=str(lake), run_id="r", strict=True))
    Worker(actor(verl), entropy=True).train("ppo_loss")
    uninstall()
    assert verdict(lake, "r", "loss.policy") == {"diverged"}


def test_a_wrong_value_loss_is_found(
    verl: Verl, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = verl.core.agg_loss
    monkeypatch.setattr(verl.core, "agg_loss", lambda *args, **given: 1.5 * whole(*args, **given))
    Worker(critic(verl)).train("value_loss")
    uninstall()
    assert verdict(lake, f"r{RUN_SUFFIX}", "loss.value") == {"diverged"}


def test_parameters_are_those_without_capture_to_the_bit(verl: Verl, tmp_path: Path) -> None:
    def trained() -> list[torch.Tensor]:
        policy = Worker(actor(verl, kl_loss_type="k3+"), entropy=True)
        policy.train("ppo_loss", 2)
        values = Worker(critic(verl))
        values.train("value_loss", 2)
        return [policy.table.detach(), values.table.detach()]

    plain = trained()
    install(Switches(lake=str(tmp_path / "lake"), run_id="r", gradients=True))
    with pytest.warns(CaptureWarning, match="no gradient is recorded"):
        captured = trained()
    uninstall()
    for one, other in zip(plain, captured, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_gradients_with_terms_are_those_of_the_replay(
    verl: Verl, tmp_path: Path, kind: str
) -> None:
    lake = tmp_path / "lake"
    install(Switches(lake=str(lake), run_id="r", strict=True, gradients=True))
    Worker(actor(verl, kl_loss_type=kind)).train("ppo_loss")
    uninstall()
    report = Lake.open(lake).replay(run="r")
    assert report.verdict == "pass"
    told = [one for c in report.cohorts for one in c.findings if one.check == "gradient"]
    assert {one.severity for one in told} == {"info"}


def test_what_is_taken_off_leaves_engine_and_verl_as_they_were(verl: Verl, lake: Path) -> None:
    import importlib

    losses = importlib.import_module("verl.workers.utils.losses")
    engine = Worker(actor(verl), entropy=True)
    engine.train("ppo_loss")
    assert {"optimizer_step", "lr_scheduler_step"} <= vars(engine).keys()
    uninstall()
    assert not {"optimizer_step", "lr_scheduler_step"} & vars(engine).keys()
    for name in ("ppo_loss", "kl_penalty", "agg_loss", "compute_value_loss"):
        assert not hasattr(getattr(losses, name), wrapping._ORIGINAL)


@pytest.mark.filterwarnings("ignore::trajreplay.capture.CaptureWarning")
@pytest.mark.parametrize("at", range(MICRO_BATCHES))
@pytest.mark.parametrize("what", ["lengths_of", "loss_settings", "signature"])
def test_a_step_of_which_a_micro_batch_could_not_be_recorded_is_dropped(
    verl: Verl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, what: str
) -> None:
    lake = tmp_path / "lake"
    install(Switches(lake=str(lake), run_id="r"))
    _failing(monkeypatch, what, at)
    Worker(actor(verl), entropy=True).train("ppo_loss")
    uninstall()
    entries = Lake.open(lake).sql(
        "select step_id, status from manifest where kind = 'step' order by step_id"
    )
    dropped = at if what == "loss_settings" else 0  # settings are those of a step
    assert entries.arrow().to_pylist() == [
        {"step_id": one, "status": "dropped" if one == dropped else "complete"} for one in range(2)
    ]


def _failing(monkeypatch: pytest.MonkeyPatch, what: str, at: int) -> None:
    """Have a function that the capture of a micro-batch calls fail at one of the calls."""
    import importlib

    name = "trajreplay.capture.verl." + ("engine" if what == "signature" else "losses")
    module = importlib.import_module(name)
    holder: Any = module
    if what == "signature":
        holder = SimpleNamespace(signature=module.inspect.signature)
        monkeypatch.setattr(module, "inspect", holder)
    original, calls = getattr(holder, what), iter(range(1000))

    def failing(*args: Any, **given: Any) -> Any:
        if next(calls) == at:
            raise MemoryError
        return original(*args, **given)

    monkeypatch.setattr(holder, what, failing)


def test_a_training_that_is_resumed_says_so(verl: Verl, lake: Path) -> None:
    Worker(actor(verl), entropy=True).train("ppo_loss", 3)
    uninstall()
    install(Switches(lake=str(lake), run_id="r", strict=True))
    Worker(actor(verl), entropy=True, trained=2).train("ppo_loss", 2)
    uninstall()
    report = Lake.open(lake).replay(run="r")
    assert [(one.attempt, one.rollout_id) for one in report.cohorts] == [
        (attempt, rollout) for attempt, rollout in ((0, 0), (0, 1), (1, 2), (1, 3)) for _ in "12"
    ]
