"""Compiled losses and forward passes that are repeated: what is recorded is what was computed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.helpers.recorded import captured, switched
from trajreplay import Lake, SampleRecord, StageContract, capture, profile
from trajreplay.capture import Recorder

pytestmark = [  # what torch warns of wherever it stops compiling, and of itself
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SAMPLES, TOKENS = 3, 4
RECORDS = [SampleRecord(f"s-{row}", TOKENS, TOKENS, [1] * TOKENS) for row in range(SAMPLES)]
STAGES = ("sample", StageContract("loss.policy", scalars=("loss",)))


def recording(lake: Lake) -> Recorder:
    settings = profile("verl").settings
    return capture.enable(switched(lake, gradients=True), settings=settings, step_stages=STAGES)


class Training:
    """One step of one micro-batch, whose loss function records what it is given."""

    def __init__(self, recorder: Recorder) -> None:
        torch.manual_seed(0)
        self.recorder = recorder
        self.weights = torch.randn(SAMPLES, TOKENS, requires_grad=True)
        self.old = -torch.rand(SAMPLES, TOKENS)
        self.advantages = torch.randn(SAMPLES, TOKENS)
        self.calls = 0

    def loss(self, weights: Tensor) -> Tensor:
        self.calls += 1
        new = -weights.abs()
        ratio = (new - self.old).exp()
        plain, clipped = -ratio * self.advantages, -ratio.clamp(0.8, 1.2) * self.advantages
        worst = torch.maximum(plain, clipped)
        bounded = torch.minimum(worst, -3.0 * self.advantages)
        loss = torch.where(self.advantages < 0, bounded, worst).mean()
        self.recorder.record_policy_loss(
            0,
            RECORDS,
            scalars={"loss": loss},
            log_probs=new,
            old_log_probs=self.old,
            advantages=self.advantages,
        )
        return loss

    def step(self, loss: Callable[[Tensor], Tensor]) -> Tensor:
        with self.recorder.step(0, 0):
            loss(self.weights).backward()  # type: ignore[no-untyped-call]
        assert self.weights.grad is not None
        return self.weights.grad


def verdict(lake: Lake) -> tuple[str, list[str]]:
    assert [one.status for one in captured(lake)] == ["complete"]
    report = lake.replay()
    told: list[str] = [
        one.severity for one in report.cohorts[0].findings if one.check == "gradient"
    ]
    return str(report.verdict), told


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_loss_that_is_computed_twice_is_recorded_once(lake: Lake, reentrant: bool) -> None:
    plain = Training(Recorder())
    expected = plain.step(plain.loss)
    training = Training(recording(lake))

    def again(weights: Tensor) -> Tensor:
        found = checkpoint(training.loss, weights, use_reentrant=reentrant)
        assert isinstance(found, Tensor)
        return found

    assert training.step(again).equal(expected)
    training.recorder.close()
    assert training.calls == 2  # the forward pass was repeated
    assert verdict(lake) == ("pass", ["info"])


@pytest.mark.filterwarnings("ignore:Reliance on distutils")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_loss_is_recorded_without_the_gradients_that_it_hides(
    lake: Lake, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiler asks for the distutils of setuptools, which cannot take over a loaded one.
    monkeypatch.setenv("SETUPTOOLS_USE_DISTUTILS", "stdlib")
    training = Training(recording(lake))
    training.step(torch.compile(training.loss, backend=backend))
    training.recorder.close()
    found, told = verdict(lake)
    assert found == "pass"
    assert told == (["info"] if backend == "eager" else [])


def test_a_compiled_training_is_the_same_with_and_without(lake: Lake) -> None:
    plain = Training(Recorder())
    expected = plain.step(torch.compile(plain.loss, backend="aot_eager"))
    torch.compiler.reset()
    training = Training(recording(lake))
    assert training.step(torch.compile(training.loss, backend="aot_eager")).equal(expected)
    training.recorder.close()
