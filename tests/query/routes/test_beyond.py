"""Micro-batches whose shards are not recorded: nothing that was compared with nothing passes."""

import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.r3_checked import LAYOUTS, checked
from tests.helpers.r3_defects import batches, replay_again, spoil
from tests.helpers.r3_layouts import layouts
from tests.helpers.r3_traces import Layout, Trace, make_trace

OF = Layout(context=2, lengths=(7, 5, 6, 8, 9, 4), capped=1, recompute=True)


def replay_others(trace: Trace, number: int) -> None:
    """Replay other routes in one micro-batch of train, on every rank and in every record of it."""
    seen: dict[object, int] = {}
    for one in trace.records(stage="train"):
        if one["event"] in ("tq_fetch_sample", "cp_routed_experts"):
            continue
        kind = tuple(one.get(name) for name in ("event", "action", "rank", "layer_number"))
        seen[kind] = seen.get(kind, 0) + 1
        for name in ("tensor", "actual", "expected") if seen[kind] == number else ():
            if name in one:
                one[name] = copy.deepcopy(one[name])
                spoil(one[name])
                one[name]["preview"] = []


@pytest.mark.parametrize("queue", [True, False])
def test_train_is_compared_with_prev_logprob_beyond_recorded_shards(queue: bool) -> None:
    of = replace(OF, queue=queue)
    healthy = checked(make_trace(of), require=("stage.routes",))
    assert (healthy.verdict, healthy.statuses["stage.routes"]) == ("pass", "pass")
    for number in range(of.capped + 1, batches(of) + 1):
        trace = make_trace(of)
        replay_others(trace, number)
        report = checked(trace)
        assert report.statuses["stage.routes"] == "unverified"
        assert checked(trace, require=("stage.routes",)).verdict == "fail"


def test_other_micro_batches_of_the_same_tokens_are_left_open() -> None:
    report = checked(make_trace(replace(OF, apart=True)))
    assert (report.verdict, report.statuses["stage.routes"]) == ("pass", "unverified")


@given(layouts(), st.integers(0, 99))
def test_routes_are_those_of_the_payload_only_where_all_shards_are_recorded(
    layout: Layout, seed: int
) -> None:
    report = checked(make_trace(layout, seed))
    hidden = [one for one in report.findings if "shards are not recorded" in one.message]
    most = max(batches(layout), -(-len(layout.lengths) // max(1, layout.microbatch // 2)))
    if batches(layout) > layout.capped:
        assert report.statuses["installed.payload"] == "unverified"
    if most <= layout.capped:
        assert hidden == []


def test_one_stage_alone_has_nothing_to_be_compared_with() -> None:
    report = checked(make_trace(replace(LAYOUTS["long"], stages=("train",))))
    assert report.statuses["stage.routes"] == "not-applicable"


@pytest.mark.parametrize("of", [Layout(), Layout(context=2), Layout(pipeline=2, data=2)])
def test_without_fetches_a_micro_batch_that_is_replayed_twice_is_left_open(of: Layout) -> None:
    of = replace(of, queue=False)
    assert checked(make_trace(of), require=("assign.coverage",)).verdict == "pass"
    trace = make_trace(of)
    replay_again(trace, *of.stages)
    assert checked(trace).verdict == "pass"
    assert checked(trace, require=("assign.coverage",)).undecided == ("assign.coverage",)


@pytest.mark.parametrize(("context", "status"), [(1, "pass"), (2, "unverified")])
def test_replicas_of_the_same_samples_are_left_open_where_they_are_no_tensor_ranks(
    context: int, status: str
) -> None:
    of = Layout(context=context, data=2, queue=False)
    trace = make_trace(of)
    names = list(trace.files)
    for replica, other in zip(names[context:], names[:context], strict=True):
        ranks = {name: trace.files[replica][0][name] for name in ("rank", "pid")}
        trace.files[replica] = [one | ranks for one in trace.files[other]]
    report = checked(trace)
    assert (report.verdict, report.statuses["assign.coverage"]) == ("pass", status)
