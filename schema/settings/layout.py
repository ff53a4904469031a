"""How the samples of a capture set are spread over its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from trajreplay.schema.settings.knobs import count, name


@dataclass(frozen=True)
class LayoutSettings:
    """Which tokens a rank of a context-parallel group holds of each response.

    Args:
        context: `unstated`; `whole`, every rank holds all of them (NeMo-RL); `zigzag`, two chunks
            a rank, one from either end (slime, Relax, Megatron); `contiguous`, one (prime-rl);
            `all-gather`, one of the sequences of a micro-batch laid end to end in row order
            (slime's and Relax's allgather_cp, before they hand it on as zigzag).
        context_multiple: Tokens to whose multiple a sequence, or such a stream, is padded before
            it is cut; None for the number of chunks.
    """

    context: str = name("unstated", "whole", "zigzag", "contiguous", "all-gather")
    context_multiple: int | None = count(None)
