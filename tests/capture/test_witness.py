"""The gradient witness: a loss of the right value whose gradient is wrong or missing is found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.recorded import captured, switched
from trajreplay import Lake, SampleRecord, Settings, StageContract, capture, profile, with_changes
from trajreplay.capture import CaptureWarning
from trajreplay.capture.taking.copies import Copier
from trajreplay.capture.taking.slots import Slots
from trajreplay.capture.taking.witness import Witness
from trajreplay.stages.report import Report

FAULT_CASES = Path(__file__).parents[1] / "cases" / "fault_cases.json"
SAMPLES, TOKENS = 4, 5
LENGTHS = [5, 3, 1, 4]
KL = 0.25
STAGES = ("sample", StageContract("loss.policy", scalars=("loss",)))
SETTINGS: Settings = with_changes(
    profile("verl").settings,
    {
        "loss.kl_loss_coef": KL,
        "loss.kl_loss_estimator": "k3",
        "loss.kl_loss_clamp": None,
        "loss.use_kl_loss": True,
        "loss.entropy_coef": 0.0,
    },
)


def clipped(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (log_probs - old).exp()
    plain, bounded = -ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages
    worst = torch.maximum(plain, bounded)
    return torch.where(advantages < 0, torch.minimum(worst, -3.0 * advantages), worst)


def k3(log_probs: Tensor, ref: Tensor) -> Tensor:
    return (ref - log_probs).exp() - (ref - log_probs) - 1.0


Terms = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def healthy(log_probs: Tensor, old: Tensor, ref: Tensor, advantages: Tensor) -> Tensor:
    return clipped(log_probs, old, advantages) + KL * k3(log_probs, ref)


FAULTS: dict[str, Terms] = {
    "the KL has no gradient": lambda new, old, ref, adv: (
        clipped(new, old, adv) + KL * k3(new.detach(), ref)
    ),
    "only the KL has one": lambda new, old, ref, adv: (
        clipped(new.detach(), old, adv) + KL * k3(new, ref)
    ),
    "none at all": lambda new, old, ref, adv: healthy(new.detach(), old, ref, adv) + 0.0 * new,
    "it is turned round": lambda new, old, ref, adv: (
        2.0 * healthy(new, old, ref, adv).detach() - healthy(new, old, ref, adv)
    ),
    "one token is cut off": lambda new, old, ref, adv: healthy(
        torch.cat([new[:1].detach(), new[1:]]), old, ref, adv
    ),
    "advantages are within the graph": lambda new, old, ref, adv: healthy(
        new, old, ref, adv + new - new.detach()
    ),
}


def train(lake: Lake, terms: Terms, *, form: str = "padded", scaled: float = 1.0) -> Tensor:
    """One step of two micro-batches, captured; returns the gradients as torch has them."""
    torch.manual_seed(0)
    recorder = capture.enable(switched(lake, gradients=True), settings=SETTINGS, step_stages=STAGES)
    old, ref = -torch.rand(SAMPLES, TOKENS), -torch.rand(SAMPLES, TOKENS)
    weights = (old + 0.4 * torch.randn(SAMPLES, TOKENS)).requires_grad_()
    advantages = torch.randn(SAMPLES, TOKENS)
    mask = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]
    with recorder.step(0, 0):
        for index in range(2):
            rows = slice(2 * index, 2 * index + 2)
            new = -weights[rows].abs()
            given: Any = new
            if form != "padded":
                given = [new[row, : LENGTHS[2 * index + row]] for row in range(2)]
                new = torch.nn.utils.rnn.pad_sequence(given, batch_first=True)
                new = torch.nn.functional.pad(new, (0, TOKENS - new.shape[1]), value=-1.0)
            found = terms(new.flatten(), *(one[rows].flatten() for one in (old, ref, advantages)))
            loss = (found * mask[rows].flatten()).sum() / mask[rows].sum()
            lengths = list(enumerate(LENGTHS[rows]))
            held = {
                "loss_mask": mask.byte(),
                "old_log_probs": old,
                "ref_log_probs": ref,
                "advantages": advantages,
            }
            columns: dict[str, Any] = {
                name: [one[2 * index + row, :n] for row, n in lengths] for name, one in held.items()
            }
            recorder.record_policy_loss(
                index,
                [SampleRecord(f"s-{2 * index + row}", n, n, ()) for row, n in lengths],
                scalars={"loss": loss},
                log_probs=given,
                columns=columns,
            )
            (scaled * loss).backward()  # type: ignore[no-untyped-call]
    recorder.close()
    assert weights.grad is not None
    return weights.grad


def told(report: Report) -> list[tuple[str, str]]:
    (cohort,) = report.cohorts
    return [(one.severity, one.message) for one in cohort.findings if one.check == "gradient"]


@pytest.mark.parametrize("scaled", [1.0, 1024.0])
@pytest.mark.parametrize("form", ["padded", "list"])
def test_gradients_of_a_healthy_loss_are_those_of_the_replay(
    lake: Lake, form: str, scaled: float
) -> None:
    train(lake, healthy, form=form, scaled=scaled)
    report = lake.replay()
    ((severity, message),) = told(report)
    assert (report.verdict, severity) == ("pass", "info")
    assert message.endswith(
        "13 tokens are those of the recorded loss" + " times 1024" * (scaled > 1)
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_gradient_that_is_not_that_of_the_loss_is_found(lake: Lake, name: str) -> None:
    train(lake, FAULTS[name])
    report = lake.replay()
    assert report.first_divergent_stage == "loss.policy"
    ((severity, _),) = told(report)
    assert severity == "error"
    (stage,) = [one for one in report.cohorts[0].stages if one.stage == "loss.policy"]
    assert stage.mismatches == 0  # every value is right


def test_what_is_watched_trains_as_it_did(lake: Lake, tmp_path: Any) -> None:
    watched = train(lake, healthy)
    other = Lake.create(tmp_path / "other")
    again = train(other, healthy, scaled=1.0)
    assert watched.equal(again)


@pytest.mark.parametrize("side", ["right", "wrong"])
def test_a_kl_without_gradient_has_the_right_value_and_is_found(lake: Lake, side: str) -> None:
    (case,) = [one for one in json.loads(FAULT_CASES.read_text()) if one["id"] == "K-062"]
    given, token = case["inputs"], case["inputs"]["token"]
    logits = torch.tensor(given["policy_logits"], requires_grad=True)
    ref = torch.tensor(given["ref_logits"]).log_softmax(0)[token].view(1, 1)
    new = logits.log_softmax(0)[token].view(1, 1)
    settings = with_changes(SETTINGS, {"loss.kl_loss_coef": case["config"]["coef"]})
    recorder = capture.enable(switched(lake, gradients=True), settings=settings, step_stages=STAGES)
    with recorder.step(0, 0):
        none = torch.zeros(1, 1)
        kl = k3(new if side == "right" else new.detach(), ref)
        loss = (clipped(new, new.detach(), none) + kl).sum()
        recorder.record_policy_loss(
            0,
            [SampleRecord("s-0", 1, 1, [1])],
            scalars={"loss": loss},
            log_probs=new,
            old_log_probs=new.detach(),
            advantages=none,
            ref_log_probs=ref,
        )
        loss.backward()  # type: ignore[no-untyped-call]
    recorder.close()
    assert loss.item() == pytest.approx(case[side]["kl"], abs=case["tol"])
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(case[side]["grad_logits"], abs=case["tol"])
    report = lake.replay()
    assert report.verdict == {"right": "pass", "wrong": "diverged"}[side]
    assert report.first_divergent_stage == {"right": None, "wrong": "loss.policy"}[side]


def test_log_probs_without_a_graph_are_warned_of_and_the_capture_stays(lake: Lake) -> None:
    recorder = capture.enable(
        switched(lake, gradients=True), settings=SETTINGS, step_stages=["sample"]
    )
    recorder.begin_step(0, 0)
    samples = [SampleRecord("s-0", 2, 2, [1, 1])]
    recorder.record_policy_loss(0, samples, log_probs=torch.ones(1, 2))
    with pytest.warns(CaptureWarning, match="no gradient is recorded of 1 micro-batches"):
        recorder.end_step()
    recorder.close()
    assert lake.replay().verdict == "pass"


def backward_without_memory(recorder: capture.Recorder, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """A step whose gradient finds no memory for its copy; returns the gradient of the weights."""

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory is left")

    weights = torch.ones(1, 2, requires_grad=True)
    with recorder.step(0, 0):
        new = weights * 2.0
        recorder.record_policy_loss(0, [SampleRecord("s-0", 2, 2, [1, 1])], log_probs=new)
        with monkeypatch.context() as patch:
            patch.setattr(Slots, "take", full)
            new.sum().backward()  # type: ignore[no-untyped-call]
    assert weights.grad is not None
    return weights.grad


def test_a_gradient_that_cannot_be_kept_drops_the_capture_and_training_goes_on(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    switches = switched(lake, gradients=True, strict=False)
    recorder = capture.enable(switches, settings=SETTINGS, step_stages=["sample"])
    with pytest.warns(CaptureWarning, match="no memory is left"):
        assert backward_without_memory(recorder, monkeypatch).tolist() == [[2.0, 2.0]]
    recorder.close()
    assert [one.status for one in captured(lake)] == ["dropped"]


def test_a_gradient_that_cannot_be_kept_is_raised_where_that_is_asked_for(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = capture.enable(
        switched(lake, gradients=True), settings=SETTINGS, step_stages=["sample"]
    )
    with pytest.raises(torch.OutOfMemoryError):
        backward_without_memory(recorder, monkeypatch)
    recorder.close()


def test_gradients_that_cannot_be_taken_over_drop_the_capture(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(Witness, "end", full)
    switches = switched(lake, gradients=True, strict=False)
    recorder = capture.enable(switches, settings=SETTINGS, step_stages=["sample"])
    recorder.begin_step(0, 0)
    new = torch.ones(1, 2, requires_grad=True) * 2.0
    recorder.record_policy_loss(0, [SampleRecord("s-0", 2, 2, [1, 1])], log_probs=new)
    with pytest.warns(CaptureWarning, match="no memory is left"):
        recorder.end_step()
    recorder.close()
    assert [one.status for one in captured(lake)] == ["dropped"]


def test_a_nan_under_the_mask_hides_no_wrong_gradient(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    settings = with_changes(SETTINGS, {"loss.kl_loss_coef": 0.0, "loss.use_kl_loss": False})
    with lake.capture(
        run_id="r",
        rollout_id=0,
        step_id=0,
        rank=0,
        expected_ranks=[0],
        settings=settings,
        stages=STAGES,
    ) as builder:
        builder.samples(
            [SampleRecord("s-0", response_length=3, total_length=4, loss_mask=[1, 1, 0])]
        )
        for name, values in {
            "old_log_probs": [-0.5, -0.75, -1.0],
            "log_probs": [-0.5, -0.75, float("nan")],
            "advantages": [1.0, 1.0, 1.0],
            "log_prob_gradients": [7.0, -7.0, 7.0],
        }.items():
            builder.tensor(name, [torch.tensor(values)])
        builder.expected("loss.policy", loss=-1.0, scope="rank", reduction="mean")
    (cohort,) = lake.replay().cohorts
    told = [one for one in cohort.findings if "gradient" in one.check]
    assert [one.severity for one in told] == ["error"], cohort.to_json()


ENDS: dict[str, Callable[[capture.Recorder], object]] = {
    "dropped": lambda one: one.drop("of-a-test"),
    "something went wrong": lambda one: one.record_policy_loss(None, []),
    "begun anew": lambda one: one.begin_step(1, 0),
    "closed": lambda one: one.close(),
    "retired": lambda one: one.retire(),
}


@pytest.mark.filterwarnings("ignore::trajreplay.capture.CaptureWarning")
@pytest.mark.parametrize("how", ENDS)
def test_a_capture_that_is_given_up_leaves_no_hook_on_a_tensor(lake: Lake, how: str) -> None:
    switches = switched(lake, gradients=True, strict=False)
    recorder = capture.enable(switches, settings=SETTINGS, step_stages=["sample"])
    recorder.begin_step(0, 0)
    new = torch.ones(1, 2, requires_grad=True) * 2.0
    recorder.record_policy_loss(0, [SampleRecord("s-0", 2, 2, [1, 1])], log_probs=new)
    assert new._backward_hooks
    ENDS[how](recorder)
    assert not new._backward_hooks
    recorder.close()
    assert [one.status for one in captured(lake) if one.key.rollout_id == 0] == ["dropped"]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_copied_as_they_come_and_added_as_torch_does(
    whole: bool, dtype: torch.dtype
) -> None:
    rows = [torch.randn(one, dtype=dtype, requires_grad=True) for one in LENGTHS]
    packed = torch.cat([one.detach() for one in rows]).requires_grad_()
    given: Any = packed if whole else rows
    copier = Copier(Slots(1 << 20))
    failed: list[Exception] = []
    witness = Witness(copier, given, LENGTHS, failed.append)
    tensors = [packed] if whole else rows[:-1]  # nothing is propagated back to the last one
    held = [copier.held_bytes]
    for factor in (0.3, 1.7):
        loss = torch.stack([(factor * one.exp()).sum() for one in tensors]).sum()
        torch.autograd.backward(loss)
        held.append(copier.held_bytes)  # and no gradient is left where it was made
    assert held[0] < held[1] < held[2]
    assert failed == []
    found = [torch.as_tensor(one, dtype=dtype) for one in witness.seen().rows()]
    expected = [one.grad for one in tensors]
    assert torch.cat(found[: len(LENGTHS) if whole else -1]).equal(torch.cat(expected))  # type: ignore[arg-type]
    assert whole or found[-1].tolist() == [0.0] * LENGTHS[-1]
