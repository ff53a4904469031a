"""Known ways in which a column changes between its rollout and the step that consumes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from trajreplay.stages.faults.fault import Fault, Handed, Hands, Made
from trajreplay.stages.faults.tokens import shifted

_STAGE = "sample"


def _rounded(given: Handed) -> Iterable[Made]:
    for dtype in (torch.bfloat16, torch.float16):
        yield given.origin.to(dtype).double(), str(dtype).removeprefix("torch.")


def _shifted(given: Handed) -> Iterable[Made]:
    if len(given.offsets) - 1 == len(given.origin):
        return
    for by, word in ((1, "late"), (-1, "early")):
        moved = shifted(given.origin, given.offsets, by)
        yield moved, f"one token {word}"
        border = given.offsets[:-1] if by > 0 else given.offsets[1:] - 1
        border = border[given.offsets.diff() > 0]
        for value in (0.0, 1.0):
            filled = moved.clone()
            filled[border] = value
            yield filled, f"one token {word}, with {value:g} at the border"
        wrapped = _wrapped(given, by)
        yield wrapped, f"one token {word}, the border wrapped around"
        yield torch.roll(given.origin, by), f"one token {word} over the borders of packed samples"


def _wrapped(given: Handed, by: int) -> Tensor:
    starts, lengths = given.offsets[:-1], given.offsets.diff()
    begin = starts.repeat_interleave(lengths)
    size = lengths.repeat_interleave(lengths)
    place = torch.arange(len(given.origin)) - begin
    return given.origin[begin + (place - by) % size.clamp(1)]


def _masked(given: Handed) -> Iterable[Made]:
    if given.column != "loss_mask" and not bool(given.mask.all()):
        yield torch.where(given.mask, given.origin, 0.0), "with 0 where the mask is 0"
        other = _mask_of_another(given)
        if other is not None:
            yield torch.where(other, given.origin, 0.0), "with 0 where another sample's mask is 0"


def _mask_of_another(given: Handed) -> Tensor | None:
    """(N,) bool. The masks by which values were set to 0, where they are those of other samples."""
    rows = list(pairwise(given.offsets.tolist()))
    masks: dict[bytes, Tensor] = {}
    for start, stop in rows:
        row = given.mask[start:stop]
        masks.setdefault(row.numpy().tobytes(), row)
    found = torch.ones_like(given.mask)
    for start, stop in rows:
        mine, theirs = given.recorded[start:stop], given.origin[start:stop]
        for row in masks.values():
            if len(row) == stop - start and torch.equal(mine, torch.where(row, theirs, 0.0)):
                found[start:stop] = row
                break
        else:
            return None
    return found


def _whole(given: Handed) -> Iterable[Made]:
    if given.column == "loss_mask":
        yield torch.ones_like(given.origin), "the attention mask, 1 at every token"
        yield 1.0 - given.origin, "inverted"
        yield torch.zeros_like(given.origin), "0 at every token"


def _other(given: Handed) -> Iterable[Made]:
    for name, values in given.others.items():
        yield values, f"the {name} of the rollout"
    for name, values in given.owns.items():
        yield values, f"the {name} of the step itself"


def _earlier(given: Handed) -> Iterable[Made]:
    if given.column.endswith("log_probs"):
        for words, values in given.earlier.items():
            yield values, f"the {words}"


def _permuted(given: Handed) -> Iterable[Made]:
    """Each sample has the values of another one of the same rollout."""
    offsets = given.offsets.tolist()
    rows = list(pairwise(offsets))
    there: dict[bytes, int] = {}
    for number, (start, stop) in enumerate(rows):
        if stop > start:
            there.setdefault(given.origin[start:stop].numpy().tobytes(), number)
    made = given.origin.clone()
    moved = 0
    used: Counter[bytes] = Counter()
    for start, stop in rows:
        mine = given.recorded[start:stop]
        used[mine.numpy().tobytes()] += 1
        if stop == start or torch.equal(mine, given.origin[start:stop]):
            continue
        other = there.get(mine.numpy().tobytes())
        if other is None:
            return
        made[start:stop] = given.origin[rows[other][0] : rows[other][1]]
        moved += 1
    # Of few possible values every one is another sample's, too, which a true permutation is not.
    own = Counter(given.origin[start:stop].numpy().tobytes() for start, stop in rows)
    yield made, f"{moved} samples with the values of another sample", 0 if used == own else moved


def _scaled(given: Handed) -> Iterable[Made]:
    yield -given.origin, "with the opposite sign"
    for value in (0.5, 0.6, 0.7, 0.8, 0.9, 1.2):
        yield (given.origin.float() / value).double(), f"divided by {value:g}"


def _fault(name: str, known: str, look: str, hands: Hands, *references: str) -> Fault:
    sentence = "the {}"
    return Fault(f"handoff.{name}", known, _STAGE, sentence, look, references, hands=hands)


FAULTS = (
    _fault(
        "mask",
        "another mask",
        "where the loss mask is made, shifted and sliced; attention mask against loss mask",
        _whole,
        "K-038",
        "K-079",
        "https://github.com/verl-project/verl/pull/2543",
    ),
    _fault(
        "shifted",
        "a column shifted by a token",
        "slices [:-1] and [1:] of logits, tokens and masks; borders of packed samples",
        _shifted,
        "K-037",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/605",
    ),
    _fault(
        "rounded",
        "stored in reduced precision",
        "the dtype of the buffer between rollout and step; handoff.COLUMN states such a rounding",
        _rounded,
        "K-039",
        "https://github.com/THUDM/slime/pull/245",
    ),
    _fault(
        "zeroed",
        "masked tokens set to 0",
        "where masks are multiplied in; handoff.COLUMN masked states it",
        _masked,
        "K-011",
    ),
    _fault(
        "other-column",
        "another column under this name",
        "which log-probs are handed on, and when they were recomputed",
        _other,
        "K-069",
        "https://github.com/radixark/miles/pull/1829",
    ),
    _fault(
        "stale",
        "log-probs of an earlier step",
        "when log-probs are recomputed, and which of them are kept",
        _earlier,
        "K-069",
    ),
    _fault(
        "permuted",
        "samples permuted",
        "the order in which micro-batches are put back; join by sample id",
        _permuted,
        "K-011",
        "https://github.com/verl-project/verl/pull/1440",
    ),
    _fault(
        "scaled",
        "one side scaled",
        "temperature and sign of the log-probs",
        _scaled,
        "K-031",
        "https://github.com/huggingface/trl/issues/4159",
    ),
)
