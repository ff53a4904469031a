"""Hypothesis strategies of what a trainer may hand over, for tests of one's own recorder.

They are derived from the declared tables and draw every legal value: NaN with any payload,
infinities, empty responses, no samples at all, ids of any script.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hypothesis import strategies as st

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trajreplay.schema import Column, SampleRecord, Table
    from trajreplay.writer import CaptureBuilder

_MAX_ID_BYTES = 128
_TEXTS = ("a", "b/c d", "50%", "..x", "\u8bad\u7ec3", "\u00e9" * 20)  # awkward ids and texts


_NAMES = st.sampled_from([None, *_TEXTS])


@dataclass(frozen=True)
class CaptureData:
    """What one rank hands over in one capture.

    Args:
        records: Its samples.
        tensors: Per-token values by column, one array per sample; None for a sample without.
    """

    records: Sequence[SampleRecord]
    tensors: Mapping[str, Sequence[NDArray[Any] | None]]

    def hand_over(self, capture: CaptureBuilder) -> None:
        """Call the capture as a trainer would."""
        capture.samples(self.records)
        for name, values in self.tensors.items():
            capture.tensor(name, values)


def ids(max_size: int = 16) -> st.SearchStrategy[str]:
    """Ids that a lake takes: any script, spaces, slashes, percent signs."""
    characters = st.characters(exclude_categories=["Cc", "Cs"])
    return (
        st.text(characters, min_size=1, max_size=max_size)
        .map(lambda text: unicodedata.normalize("NFC", text))
        .filter(lambda text: text not in ("", ".", ".."))
        .filter(lambda text: len(quote(text, safe="")) <= _MAX_ID_BYTES)
    )


@st.composite
def captures(
    draw: st.DrawFn,
    kind: str = "rollout",
    *,
    lengths: st.SearchStrategy[int] | None = None,
    rewards: st.SearchStrategy[float | None] | None = None,
    values: st.SearchStrategy[float] | None = None,
    max_samples: int = 5,
) -> CaptureData:
    """One capture.

    Args:
        draw: Given by hypothesis.
        kind: rollout or step.
        lengths: Response lengths.
        rewards: Raw rewards and rewards.
        values: Per-token floats; by default every bit pattern of float32.
        max_samples: At most so many samples.
    """
    from trajreplay.schema import TABLES
    from trajreplay.schema.tables import OWN_LENGTH

    table = TABLES[f"{kind}s"]
    sample_ids = draw(st.lists(ids(), unique=True, max_size=max_samples))
    lengths = st.integers(0, 6) if lengths is None else lengths
    rewards = st.none() | st.floats() if rewards is None else rewards
    records = [draw(_records(table, one, lengths, rewards)) for one in sample_ids]
    tensors = {}
    given = {"loss_mask", *OWN_LENGTH}  # with the records
    for column in table.having("input", "output"):
        if column.is_list and column.name not in given and draw(st.booleans()):
            tensors[column.name] = [draw(_tokens(column, one, values)) for one in records]
    return CaptureData(records, tensors)


@st.composite
def _records(
    draw: st.DrawFn,
    table: Table,
    sample_id: str,
    lengths: st.SearchStrategy[int],
    rewards: st.SearchStrategy[float | None],
) -> SampleRecord:
    from trajreplay.schema import SampleRecord

    length = draw(lengths)
    values: dict[str, Any] = {
        "loss_mask": draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)),
        "weight_versions": draw(st.none() | st.lists(_spans(length), max_size=2)),
        "truncated": draw(st.none() | st.booleans()),
        "group_size": draw(st.none() | st.integers(1, 8)),
        "fragment_index": draw(st.none() | st.integers(0, 8)),
        "turns": draw(st.none() | st.integers(0, 8)),
        "first_message_length": draw(st.none() | st.integers(0, length)),
        "greedy_reward": draw(rewards),
        "kept_baseline": draw(rewards),
        "last_value": draw(rewards),
        "raw_reward": draw(rewards),
        "reward": draw(rewards),
    }
    for column in table.having("identity", "provenance"):
        if column.is_text and column.nullable:
            values[column.name] = draw(_NAMES)
    for column in table.having("text"):
        values[column.name] = draw(_NAMES)
    if table.name == "steps":
        values["source_attempt"] = draw(st.none() | st.just(0))
        values["source_rollout_id"] = draw(st.none() | st.integers(0, 3))
    total = length + draw(st.integers(0, 3))
    return SampleRecord(sample_id, response_length=length, total_length=total, **values)


def _spans(length: int) -> st.SearchStrategy[tuple[int, int, int]]:
    return st.tuples(st.integers(0, length), st.integers(0, length), st.integers(0, 9))


@st.composite
def _tokens(
    draw: st.DrawFn, column: Column, record: SampleRecord, values: st.SearchStrategy[float] | None
) -> NDArray[Any] | None:
    import numpy as np

    from trajreplay.schema.tables import length_column

    if draw(st.integers(0, 9)) == 9:
        return None
    size = int(getattr(record, length_column(column.name)))
    if not column.is_floating:
        kind = np.dtype(column.type.value_type.to_pandas_dtype())
        tokens = st.lists(st.integers(0, np.iinfo(kind).max), min_size=size, max_size=size)
        return np.array(draw(tokens), kind)
    if values is None:
        return _float32(draw(st.binary(min_size=4 * size, max_size=4 * size)))
    return np.array(draw(st.lists(values, min_size=size, max_size=size)), np.float32)


def _float32(data: bytes) -> NDArray[np.float32]:
    import numpy as np

    return np.frombuffer(data, np.float32)
