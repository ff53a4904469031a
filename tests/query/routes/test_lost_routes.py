"""Steps that were never replayed, and tokens whose routes were lost on the way."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.r3_checked import LAYOUTS, checked, failed
from tests.helpers.r3_defects import batches, remove_microbatch, remove_replays
from tests.helpers.r3_traces import Layout, coordinates, make_trace


def test_a_rule_of_two_stages_is_not_decided_by_one() -> None:
    layout = replace(LAYOUTS["context"], stages=("train",))
    trace = make_trace(layout)
    assert checked(trace).statuses["stage.routes"] == "not-applicable"
    report = checked(trace, require=("stage.routes",))
    assert (report.verdict, report.undecided) == ("fail", ("stage.routes",))
    both = checked(make_trace(LAYOUTS["context"]), require=("stage.routes",))
    assert (both.verdict, both.statuses["stage.routes"]) == ("pass", "pass")


@pytest.mark.parametrize("queue", [True, False])
def test_train_may_have_more_steps_than_prev_logprob(queue: bool) -> None:
    """As where several optimizer steps are taken of the log-probs of one rollout."""
    trace = make_trace(replace(LAYOUTS["context"], steps=2, queue=queue))
    remove_replays(trace, "prev-logprob", 2)
    report = checked(trace)
    assert (failed(report), report.steps) == (set(), {"prev-logprob": [1], "train": [1, 2]})


def test_traces_of_a_later_time_begin_with_a_later_step() -> None:
    trace = make_trace(replace(LAYOUTS["context"], steps=3, queue=False))
    for stage in ("prev-logprob", "train"):
        remove_replays(trace, stage, 1)
    assert checked(trace).verdict == "pass"


@pytest.mark.parametrize("share", [None, 0.01])
@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.parametrize("name", ["context", "sequence", "rows", "pipeline", "long"])
def test_routes_that_were_lost_are_the_dummy_route_of_tokens_that_have_one(
    name: str, queue: bool, share: float | None
) -> None:
    """Also where a pipeline stage replays one layer, which chance alone can make a dummy."""
    of = replace(LAYOUTS[name], queue=queue)
    assert checked(make_trace(of), max_fallback_share=share).verdict == "pass"
    report = checked(make_trace(replace(of, dummy=True)), max_fallback_share=share)
    assert failed(report) == {"route.values"}


def test_dummies_that_chance_may_have_made_are_not_decided() -> None:
    of = Layout(layers=(2,), total_layers=2, lengths=(4,), top_k=1)
    assert checked(make_trace(of, seed=5)).statuses["route.values"] == "pass"
    report = checked(make_trace(replace(of, dummy=True)))
    assert (report.verdict, report.statuses["route.values"]) == ("pass", "unverified")


@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.parametrize(
    "of",
    [
        Layout(layers=(2, 3), total_layers=3, top_k=1),
        Layout(layers=(2,), total_layers=2, lengths=(20, 20, 18, 16), microbatch=1),
    ],
    ids=["two layers", "one layer"],
)
def test_in_one_or_two_layers_it_is_left_open_whether_all_of_a_sample_is_lost(
    of: Layout, queue: bool
) -> None:
    of = replace(of, queue=queue)
    assert failed(checked(make_trace(of))) == set()
    report = checked(make_trace(replace(of, dummy=True)))
    assert (failed(report), report.statuses["route.values"]) == (set(), "unverified")
    assert checked(make_trace(replace(of, dummy=True)), require=("route.values",)).undecided


@given(
    layers=st.integers(1, 5),
    preferred=st.floats(0, 0.9),
    top_k=st.sampled_from([1, 2]),
    queue=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_router_that_prefers_the_first_experts_is_not_refused(
    layers: int, preferred: float, top_k: int, queue: bool, seed: int
) -> None:
    of = Layout(
        context=2,
        layers=tuple(range(2, 2 + layers)),
        total_layers=1 + layers,
        lengths=(8, 6, 7, 8),
        top_k=top_k,
        preferred=preferred,
        queue=queue,
    )
    assert failed(checked(make_trace(of, seed))) == set()


def replica(layout: Layout, number: int) -> list[int]:
    """The ranks of one data-parallel replica."""
    return [rank for rank in range(layout.world) if coordinates(layout, rank)[2] == number]


@pytest.mark.parametrize("name", ["context", "sequence", "rows", "pipeline", "steps", "long"])
@pytest.mark.parametrize("part", ["all", "one replica"])
def test_without_fetches_a_micro_batch_that_train_leaves_out_is_left_open(
    name: str, part: str
) -> None:
    """Also one beyond those whose shards are recorded: rows are counted of all."""
    of = replace(LAYOUTS[name], queue=False)
    assert checked(make_trace(of)).statuses["stage.routes"] == "pass"
    for number in range(1, batches(of) + 1):
        trace = make_trace(of)
        ranks = range(of.world) if part == "all" else replica(of, 0)
        remove_microbatch(trace, "train", number, ranks)
        report = checked(trace)
        assert report.statuses["stage.routes"] == "unverified" or failed(report), number
        assert checked(trace, require=("stage.routes",)).verdict == "fail"


@given(
    name=st.sampled_from(["context", "sequence", "pipeline", "rows", "long"]),
    stage=st.sampled_from(["prev-logprob", "train"]),
    capped=st.integers(1, 3),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_a_micro_batch_that_was_fetched_and_not_replayed_is_missed(
    name: str, stage: str, capped: int, seed: int, data: st.DataObject
) -> None:
    """The last of a pass: of those before it the shards may be recorded, or only its rows known."""
    of = replace(LAYOUTS[name], lengths=(14, 9, 12, 16, 13, 9), capped=capped)
    trace = make_trace(of, seed)
    ranks = replica(of, data.draw(st.integers(0, of.data - 1)))
    remove_microbatch(trace, stage, batches(of), ranks)
    assert failed(checked(trace)) == {"assign.coverage"}


def test_what_was_fetched_is_left_open_where_no_order_of_ranks_is_known() -> None:
    trace = make_trace(Layout(context=2, data=2))
    for one in trace.records(event="cp_routed_experts"):
        one["cp_rank"] = (0, 1, 1, 0)[one["rank"]]
    assert checked(trace).statuses["assign.coverage"] == "unverified"


@pytest.mark.parametrize(
    ("before", "train", "status"),
    [
        ([2, 3], [2, 3], "pass"),
        ([3], [2, 3], "pass"),
        ([2, 3], [3], "fail"),
        ([2, 3], [2], "fail"),
        ([2], [3, 4], "unverified"),
        ([2, 3], [3, 4], "unverified"),
    ],
)
def test_in_a_later_time_train_begins_no_later_than_prev_logprob(
    before: list[int], train: list[int], status: str
) -> None:
    """Unless it counts further, as where it takes several steps for each of prev-logprob."""
    trace = make_trace(replace(LAYOUTS["context"], steps=4, queue=False))
    for stage, kept in (("prev-logprob", before), ("train", train)):
        for step in {1, 2, 3, 4} - set(kept):
            remove_replays(trace, stage, step)
    assert checked(trace).statuses["assign.coverage"] == status
