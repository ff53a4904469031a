"""A training by verl's own registered functions, captured and replayed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.oracles.frameworks import Verl
from trajreplay import Lake
from trajreplay.capture import CaptureWarning, Switches
from trajreplay.capture.verl import install, uninstall
from trajreplay.capture.verl.advantages import RUN_SUFFIX

pytestmark = pytest.mark.oracle

SAMPLES, TOKENS, WORDS, GROUP = 8, 6, 11, 4
ROLLOUTS, STEPS, MICRO_BATCHES = 2, 2, 2
LOSSES = ("vanilla", "cispo", "dppo_kl", "dppo_tv", "dro", "gpg", "gspo", "kl_cov", "sapo")
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "reinforce_plus_plus",
    "rloo",
    "rloo_vectorized",
)


class Engine:
    """What verl calls an engine: these methods, around a table of logits."""

    def __init__(self, verl: Verl, name: str, mode: str, of_batch: bool, weighted: bool) -> None:
        torch.manual_seed(0)
        self._verl, self._name, self._mode = verl, name, mode
        self._of_batch, self._weighted = of_batch, weighted
        self.logits = torch.randn(TOKENS, WORDS, requires_grad=True)
        self._optimizer = torch.optim.SGD([self.logits], lr=3.0)
        policy_loss = {"loss_mode": name, "dro_beta": 0.25, "kl_cov_ratio": 0.25}
        self.config = verl.actor_config(
            clip_ratio_low=0.125, clip_ratio_high=0.25, policy_loss=policy_loss
        )

    def log_probs(self, tokens: Tensor) -> Tensor:
        spread = self.logits.log_softmax(-1).expand(len(tokens), -1, -1)
        return spread.gather(2, tokens[:, :, None])[:, :, 0]

    def train_batch(self, batch: dict[str, Tensor]) -> float:
        self._optimizer.zero_grad()
        rows = len(batch["tokens"]) // MICRO_BATCHES
        told = self.config.global_batch_info
        told["dp_size"] = 1
        if self._of_batch:
            told["batch_num_tokens"] = batch["mask"].sum()
            told["global_batch_size"] = len(batch["tokens"])
            told["loss_scale_factor"] = 7
        total = 0.0
        for at in range(MICRO_BATCHES):
            part = {key: one[at * rows : (at + 1) * rows] for key, one in batch.items()}
            loss, _ = self._verl.core.get_policy_loss_fn(self._name)(
                old_log_prob=part["old"],
                log_prob=self.log_probs(part["tokens"]),
                advantages=part["advantages"],
                response_mask=part["mask"],
                loss_agg_mode=self._mode,
                config=self.config,
                rollout_is_weights=torch.ones_like(part["old"]) if self._weighted else None,
            )
            loss.backward()
            total += loss.item()
        self.optimizer_step()
        return total

    def optimizer_step(self) -> float:
        self._optimizer.step()
        return 1.0

    def lr_scheduler_step(self) -> float:
        return 3.0

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> None:
        return None

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True


def train(
    verl: Verl,
    *,
    loss: str = "vanilla",
    mode: str = "token-mean",
    estimator: str = "grpo",
    of_batch: bool = False,
    weighted: bool = False,
) -> Tensor:
    """Train for some steps, the driver and the actor in one process; return the parameters."""
    engine = Engine(verl, loss, mode, of_batch, weighted)
    drawn = torch.Generator().manual_seed(1)
    for _ in range(ROLLOUTS):
        tokens = torch.randint(WORDS, (SAMPLES, TOKENS), generator=drawn)
        lengths = torch.randint(1, TOKENS + 1, (SAMPLES,), generator=drawn)
        mask = (torch.arange(TOKENS) < lengths[:, None]).float()
        rewards = torch.zeros(SAMPLES, TOKENS)
        rewards[torch.arange(SAMPLES), lengths - 1] = torch.rand(SAMPLES, generator=drawn)
        given: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": mask}
        if estimator == "gae":
            given |= {"values": torch.rand(SAMPLES, TOKENS), "gamma": 0.875, "lam": 0.75}
        else:
            names = [f"the text of prompt {row // GROUP}" for row in range(SAMPLES)]
            given |= {"index": np.array(names, dtype=object), "config": verl.algorithm()}
        if estimator == "reinforce_plus_plus":
            del given["index"]
        advantages, _ = verl.core.get_adv_estimator_fn(estimator)(**given)
        with torch.no_grad():
            old = engine.log_probs(tokens)
        batch = {"tokens": tokens, "mask": mask, "advantages": advantages, "old": old}
        for at in range(STEPS):
            half = slice(at * SAMPLES // STEPS, (at + 1) * SAMPLES // STEPS)
            engine.train_batch({key: one[half] for key, one in batch.items()})
        engine.lr_scheduler_step()
    return engine.logits.detach().clone()


@pytest.fixture
def lake(verl: Verl, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "lake"
    install(Switches(lake=str(path), run_id="r", strict=True))
    yield path
    uninstall()


def verdicts(path: Path, run_id: str) -> dict[str, str]:
    """The verdict of each stage over all cohorts, the worst of each."""
    report = Lake.open(path).replay(run=run_id)
    assert report.verdict == "pass", report
    return {one.stage: one.verdict for cohort in report.cohorts for one in cohort.stages}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_the_registry_are_captured_and_replayed(
    verl: Verl, lake: Path, name: str
) -> None:
    train(verl, loss=name)
    uninstall()
    assert verdicts(lake, "r")["loss.policy"] == "pass"
    assert len(Lake.open(lake).replay(run="r").cohorts) == ROLLOUTS * STEPS


@pytest.mark.parametrize("of_batch", [False, True], ids=["micro-batch", "global batch"])
@pytest.mark.parametrize("mode", MODES)
def test_every_aggregation_is_replayed(verl: Verl, lake: Path, mode: str, of_batch: bool) -> None:
    train(verl, mode=mode, of_batch=of_batch)
    uninstall()
    assert verdicts(lake, "r")["loss.policy"] == "pass"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_of_the_registry_are_captured_and_replayed(
    verl: Verl, lake: Path, name: str
) -> None:
    train(verl, estimator=name)
    uninstall()
    found = verdicts(lake, f"r{RUN_SUFFIX}")
    assert found["advantage.estimate"] == "pass"


WATCHED = ("vanilla", "cispo", "dppo_kl", "dppo_tv", "dro", "gpg", "sapo")


@pytest.mark.parametrize("name", WATCHED)
def test_gradients_of_verl_are_those_of_the_replay(verl: Verl, tmp_path: Path, name: str) -> None:
    plain = train(verl, loss=name)
    lake = tmp_path / "lake"
    install(Switches(lake=str(lake), run_id="r", strict=True, gradients=True))
    watched = train(verl, loss=name)
    uninstall()
    assert watched.equal(plain)
    report = Lake.open(lake).replay(run="r")
    assert report.verdict == "pass"
    told = [one for cohort in report.cohorts for one in cohort.findings if one.check == "gradient"]
    assert [one.message for one in told if one.severity != "info"] == []
    assert len(told) == ROLLOUTS * STEPS


def test_a_training_is_the_same_to_the_bit_with_and_without(verl: Verl, tmp_path: Path) -> None:
    plain = train(verl)
    install(Switches(lake=str(tmp_path / "lake"), run_id="r"))
    captured = train(verl)
    uninstall()
    assert captured.equal(plain)
    assert verl.core.POLICY_LOSS_REGISTRY["vanilla"].__name__ == "compute_policy_loss_vanilla"
    assert train(verl).equal(plain)


def test_what_no_column_holds_is_recorded_and_not_claimed(verl: Verl, lake: Path) -> None:
    train(verl, weighted=True)
    uninstall()
    report = Lake.open(lake).replay(run="r")
    (stage,) = {
        one.verdict for c in report.cohorts for one in c.stages if one.stage == "loss.policy"
    }
    assert stage == "recorded-only"


def test_whitened_advantages_are_recorded_and_not_claimed(verl: Verl, lake: Path) -> None:
    train(verl, estimator="reinforce_plus_plus_baseline")
    uninstall()
    report = Lake.open(lake).replay(run=f"r{RUN_SUFFIX}")
    found = {one.stage: one.verdict for cohort in report.cohorts for one in cohort.stages}
    assert found["advantage.estimate"] == found["reward.post_process"] == "recorded-only"


def test_names_of_prompts_never_reach_the_lake(verl: Verl, lake: Path) -> None:
    train(verl)
    uninstall()
    files = [one for one in lake.rglob("*") if one.is_file()]
    assert len(files) > ROLLOUTS
    assert not any(b"text of prompt" in one.read_bytes() for one in files)


def test_a_wrong_loss_is_found(verl: Verl, lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = verl.core.agg_loss
    monkeypatch.setattr(verl.core, "agg_loss", lambda *args, **given: 1.5 * whole(*args, **given))
    train(verl)
    uninstall()
    assert Lake.open(lake).replay(run="r").first_divergent_stage == "loss.policy"


def test_a_lake_that_is_not_there_changes_nothing(verl: Verl, tmp_path: Path) -> None:
    plain = train(verl)
    (tmp_path / "file").write_text("")
    install(Switches(lake=str(tmp_path / "file" / "lake"), run_id="r"))
    with pytest.warns(CaptureWarning, match="nothing is captured"):
        assert train(verl).equal(plain)
    uninstall()


def test_the_module_for_verl_does_nothing_unless_switched_on() -> None:
    code = "import sys, trajreplay.capture.verl.plugin; sys.exit('torch' in sys.modules)"
    off = {name: one for name, one in os.environ.items() if not name.startswith("TRAJREPLAY")}
    assert subprocess.run([sys.executable, "-c", code], env=off, check=False).returncode == 0
    on = {**off, "TRAJREPLAY_CAPTURE": "1", "TRAJREPLAY_CAPTURE_STEPS": "nonsense"}
    broken = subprocess.run([sys.executable, "-c", code], env=on, capture_output=True, check=False)
    assert broken.returncode == 1
    assert b"TRAJREPLAY_CAPTURE_STEPS" in broken.stderr
