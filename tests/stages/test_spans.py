"""Spans of weights: one reading of them, and of what each rank says of its own."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.queried import catalog_of
from tests.helpers.scenes import drawn, halves, write_whole
from trajreplay import Lake
from trajreplay.query import Selection, select
from trajreplay.schema import StageError
from trajreplay.schema.tables import STEPS
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.spans import UNKNOWN, Spans
from trajreplay.stages.contract_checks.columns import Together
from trajreplay.stages.losses.proximal import current_versions
from trajreplay.stages.replaying.whole import WholeCohorts

SPAN = st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 4))
FIELDS = ("start", "stop", "version")
ROWS = st.lists(st.tuples(st.integers(0, 6), st.none() | st.lists(SPAN, max_size=4)), max_size=5)


@given(ROWS, st.booleans())
def test_versions_of_tokens_equal_a_loop(
    rows: list[tuple[int, list[tuple[int, int, int]] | None]], chunked: bool
) -> None:
    lists = [
        None if spans is None else [dict(zip(FIELDS, one, strict=True)) for one in spans]
        for _, spans in rows
    ]
    kind = STEPS["weight_versions"].type
    cut = len(lists) // 2 if chunked else 0
    column = pa.chunked_array([pa.array(lists[:cut], kind), pa.array(lists[cut:], kind)])
    expected = []
    for length, spans in rows:
        for token in range(length):
            found = [v for start, stop, v in spans or [] if start <= token < stop]
            expected.append(found[0] if len(found) == 1 else UNKNOWN)
    offsets = np.cumsum([0, *(length for length, _ in rows)])
    found_spans = Spans.of(column)
    assert found_spans.by_token(offsets).tolist() == expected
    assert len(found_spans.owner) == sum(len(spans or []) for _, spans in rows)


def _loaded(lake: Lake, versions: dict[int, int | None], *, empty: bool) -> LoadedCohort:
    samples = drawn()
    for one in samples:
        one.weight_versions = [(0, one.length, 3)]
    shares = {0: samples, 1: []} if empty else halves(samples)
    for rank, version in versions.items():
        told = {} if version is None else {"log_probs": version}
        write_whole(
            lake,
            {rank: shares[rank]},
            ranks=[0, 1],
            expected={},
            stages=["sample"],
            versions=told,
        )
    whole = WholeCohorts(catalog_of(lake), select(catalog_of(lake), Selection()))
    ((place, _),) = whole.turns()
    found = whole.load(place)
    assert isinstance(found, LoadedCohort), found
    return found


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("silent", [False, True])
def test_every_reader_is_told_the_same_of_a_rank(lake: Lake, silent: bool, empty: bool) -> None:
    """A rank without samples has nothing to say; a silent one with samples is never passed over."""
    cohort = _loaded(lake, {0: 2, 1: None if silent else 5}, empty=empty)
    block = Block([cohort])
    found = cohort.versions("log_probs").tolist()
    ranks = block.packed.ranks.tolist()
    assert found == [2 if rank == 0 else UNKNOWN if silent else 5 for rank in ranks]
    known = Together(block).of(0).version_of("log_probs")
    if silent and not empty:
        assert known is None
        with pytest.raises(StageError, match="rank 1 does not say"):
            current_versions(block)
    else:
        assert known is not None
        assert known.tolist() == current_versions(block).tolist() == found
    newer = [one for one in cohort.report.findings if one.check == "weights.newer"]
    assert len(newer) == 1
    assert newer[0].message.startswith(f"{ranks.count(0)} of 8 spans")
