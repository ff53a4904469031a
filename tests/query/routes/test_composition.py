"""Compositions of a micro-batch: what is tried, in which order, and that it ends."""

import time
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.r3_traces import Layout, Sample, make_shard
from trajreplay.query.routes.composition import Composition, candidates


def test_a_row_that_no_run_of_many_samples_fits_is_given_up_at_once() -> None:
    lengths = tuple(500 + number % 500 for number in range(3000))
    start = time.process_time()
    tried, whole = candidates(1, 506, 2, lengths, 1009)
    assert sum(len(one.lengths) == 1 for one in tried) > 0
    assert not whole
    assert time.process_time() - start < 10


def test_runs_of_as_many_tokens_as_were_counted_come_first() -> None:
    tried = [one.lengths for one in candidates(1, 64, 2, (9, 30, 20, 31, 19, 40), 50)[0]]
    first = list(dict.fromkeys(tried))[:3]
    assert first == [(30, 20), (31, 19), (9,)]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    context=st.sampled_from([1, 2, 4]),
    packed=st.booleans(),
)
def test_a_composition_gives_the_identities_of_its_shards(
    lengths: list[int], context: int, packed: bool
) -> None:
    layout = Layout(context=context if packed else 1, packed=packed)
    routes = np.zeros((1, 1, 2), np.int8)
    batch = [Sample(np.ones(one, np.int64), np.repeat(routes, one, 0), "") for one in lengths]
    multiple = 2 * context if layout.context > 1 else 1
    rooms = [-(-one // multiple) * multiple if packed else max(lengths) for one in lengths]
    made = Composition(tuple(lengths), tuple(rooms), packed)
    for rank in range(layout.context):
        identity = make_shard(layout, batch, rank)["identity"].reshape(-1, 3)
        flat = identity.reshape(-1).tolist()
        assert made.values(rank, layout.context).tolist() == flat
        for most, more in pairwise(range(len(identity) + 1)):
            shown = made.values(rank, layout.context, more)
            assert shown.tolist() == flat[: 3 * more], most
        assert list(made.rows(rank, layout.context)) == [tuple(row) for row in identity.tolist()]
