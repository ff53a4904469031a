"""Advantages of the response tokens."""

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.segments import check_shapes


def grpo_advantages(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Give every response token the reward of its sample.

        A_t = r_s      with s the sample of token t

    Args:
        rewards: (S,) float. The processed reward of each sample. Dimensionless.
        lengths: (S,) int64. Response tokens of each sample.

    Returns:
        (N,) in the dtype of `rewards`, N the sum of the lengths. Dimensionless.

    Raises:
        StageError: The inputs differ in length, or a length is negative.

    Conventions:
        Masked tokens get it too, as in slime and Relax; verl and OpenRLHF give them 0. A sample
        without tokens adds nothing. The value is copied and so exact: it has no error of its own.

    Source:
        Shao et al. 2024, DeepSeekMath, section 4.1.2, arXiv:2402.03300.

    >>> grpo_advantages(torch.tensor([0.5, -0.5, 1.0]), torch.tensor([2, 0, 1]))
    tensor([0.5000, 0.5000, 1.0000])
    """
    check_shapes("grpo_advantages", rewards=(rewards, "S"), lengths=(lengths, "S"))
    if not lengths.numel():
        return rewards.clone()
    shortest, longest = (int(length) for length in lengths.aminmax())
    if shortest < 0:
        raise StageError(
            f"grpo_advantages: a sample has {shortest} tokens, expected 0 or more",
            hint="Pass the response lengths, the differences of the offsets.",
        )
    if shortest == longest:
        rows = rewards[:, None].expand(-1, longest)
        return rows.clone(memory_format=torch.contiguous_format).flatten()
    return rewards.repeat_interleave(lengths)
