"""Gradients of the golden losses, by autograd through the kernels: equal values may train apart."""

import pytest
import torch
from torch import Tensor

from trajreplay.stages.kernels import clip_loss, log_ratio, sequence_log_ratio, weighted_kl

# G12: the first three tokens of G09, one sample.
OLD = torch.tensor([-1.2, -1.0, -0.4])
OFFSETS = torch.tensor([0, 3])
FORMS = ["mean", "stopped"]


def _policy() -> Tensor:
    return torch.tensor([-0.9, -1.5, -0.3], requires_grad=True)


def _gradient(loss: Tensor, policy: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss, policy)
    return found.tolist()


def _gspo(policy: Tensor, advantages: Tensor, mask: Tensor, form: str) -> Tensor:
    """The mean loss of the sample; verl's form hands each token the ratio of the sample."""
    samples = sequence_log_ratio(log_ratio(policy, OLD), mask, OFFSETS)
    if form == "stopped":
        samples = policy - policy.detach() + samples.detach()
    tokens = clip_loss(samples, advantages, eps_clip=0.2, eps_clip_high=0.28).pg_loss
    return (tokens * mask).sum() / mask.sum()


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_of_gspo_train_alike_where_the_advantage_is_one(form: str) -> None:
    """G12, a mask of ones."""
    policy, ones = _policy(), torch.ones(3)
    loss = _gspo(policy, ones, ones, form)
    assert float(loss.detach()) == pytest.approx(-0.967216194, rel=1e-6)
    assert _gradient(loss, policy) == pytest.approx([-0.322405368] * 3, rel=1e-6)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("mean", [-0.644810736] * 3),
        ("stopped", [-0.322405368, -0.644810736, -0.967216104]),
    ],
)
def test_forms_of_gspo_of_one_value_train_apart(form: str, expected: list[float]) -> None:
    """G12, advantages of 1, 2 and 3: the mean form spreads their mean, verl's weighs each token."""
    policy = _policy()
    loss = _gspo(policy, torch.tensor([1.0, 2.0, 3.0]), torch.ones(3), form)
    assert float(loss.detach()) == pytest.approx(-1.93443239, rel=1e-6)
    assert _gradient(loss, policy) == pytest.approx(expected, rel=1e-6)


def test_a_masked_token_gets_no_gradient_from_its_sample() -> None:
    policy, mask = _policy(), torch.tensor([1.0, 1.0, 0.0])
    found = _gradient(_gspo(policy, torch.ones(3), mask, "mean"), policy)
    assert found == pytest.approx([-0.90483743 / 2] * 2 + [0.0], rel=1e-6)


@pytest.mark.parametrize(("weighted", "gradient"), [(False, 0.393469334), (True, 0.5)])
def test_a_weight_of_one_adds_the_gradient_of_the_score(weighted: bool, gradient: float) -> None:
    """G27: exp(x - sg x) leaves the value of k3 and makes its gradient that of k2."""
    policy = torch.tensor([-1.0], requires_grad=True)
    weights = (policy - policy.detach()).exp() if weighted else None
    kl = weighted_kl(policy, torch.tensor([-1.5]), estimator="k3", weights=weights)
    assert float(kl.detach()) == pytest.approx(0.106530666, rel=1e-6)
    assert _gradient(kl.sum(), policy) == pytest.approx([gradient], rel=1e-6)
