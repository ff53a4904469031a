"""How the samples of a batch are spread over steps, and their tokens over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from trajreplay.schema.settings.knobs import count, name


@dataclass(frozen=True)
class LayoutSettings:
    """Which tokens a context-parallel rank holds of each response, and which samples are a batch.

    Args:
        context: `unstated`; `whole`, every rank holds all of them (NeMo-RL; prime-rl, which
            gathers them before the loss); `zigzag`, two chunks a rank, one from either end (slime,
            Relax, Megatron); `contiguous`, one of every sequence; `all-gather`, one of the
            sequences of a micro-batch laid end to end in row order (the forward pass of prime-rl;
            slime's and Relax's allgather_cp, before they hand it on as zigzag).
        context_multiple: Tokens to whose multiple a sequence, or such a stream, is padded before
            it is cut; None for the number of chunks.
        context_padding: What a sequence is padded from: its own length (`sequence`), or that of a
            batch to whose length all of it are padded (`batch`; bshd of slime and Relax), which is
            `padded_length` of each sample, for ranks and micro-batches may differ in it.
        batch: What statistics over all samples are of where one rollout feeds several steps, or
            one step is fed by several: the samples of the `step`, or those of the `rollout` that
            generated them, before these are cut into mini-batches; `unstated`, and they are
            recomputed where the two are the same.
    """

    context: str = name("unstated", "whole", "zigzag", "contiguous", "all-gather")
    context_multiple: int | None = count(None)
    context_padding: str = name("sequence", "batch")
    batch: str = name("unstated", "step", "rollout")
