"""Rows of verl's padded tensors: how long each response is, and which value shows its reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trajreplay.schema.identity import ProducerInfo

if TYPE_CHECKING:
    import torch


def lengths_of(mask: torch.Tensor) -> list[int]:
    """Tokens of each response, up to the last that is trained: verl tells a loss no more.

    Args:
        mask: (S, T). Not 0 where a token is trained. Read on the host, as verl's own metrics are.
    """
    import torch

    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    found: list[int] = ((mask > 0) * positions).amax(1).tolist() if mask.numel() else []
    return found


def shown_rewards(values: torch.Tensor, mask: torch.Tensor) -> list[float | None]:
    """The value of the first trained token of each sample; None where it has none.

    Args:
        values: (S, T). The same for all trained tokens of a sample.
        mask: (S, T). As of `lengths_of`.
    """
    trained = mask > 0
    first = trained.int().argmax(1, keepdim=True)
    shown = values.gather(1, first).squeeze(1).tolist()
    return [
        value if any_trained else None
        for value, any_trained in zip(shown, trained.any(1).tolist(), strict=True)
    ]


def producer(role: str = "train") -> ProducerInfo:
    """What captures: this version of torch, and of verl, in a process of some role."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    try:
        framework = f"verl {version('verl')}"
    except PackageNotFoundError:
        framework = "verl"
    return ProducerInfo(torch_version=str(torch.__version__), framework=framework, role=role)
