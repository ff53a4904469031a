"""Traces of every layout: none that is healthy is refused, and every single defect is named."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.r3_checked import LAYOUTS, checked, failed
from tests.helpers.r3_defects import DEFECTS
from tests.helpers.r3_layouts import layouts
from tests.helpers.r3_traces import Layout, Trace, make_shard, make_trace, samples_of, tensor_record

FAULTS = json.loads((Path(__file__).parents[2] / "cases" / "fault_cases.json").read_text())
WHOLE = ("context", "sequence", "pipeline")
TRIED = [
    *LAYOUTS.values(),
    *(
        replace(LAYOUTS[name], queue=False)
        for name in ("context", "rows", "fallback", "long", "steps", "tensor")
    ),
]


@given(layouts(), st.integers(0, 99))
def test_no_healthy_trace_is_refused(layout: Layout, seed: int) -> None:
    report = checked(make_trace(layout, seed))
    assert report.verdict == "pass", [one.message for one in report.findings]
    assert report.layers == layout.layers
    assert report.ranks == tuple(range(layout.world))
    assert (report.fallback_rows > 0) == (layout.fallback > 0 and max(layout.lengths) > 1)


@pytest.mark.parametrize("of", TRIED, ids=lambda of: f"{of.contract}, {of.world} ranks")
def test_every_single_defect_is_named_and_nothing_else(of: Layout) -> None:
    wrong = {}
    for defect in [one for one in DEFECTS if one.needs(of)]:
        trace = make_trace(of, seed=3)
        defect.apply(trace)
        found = failed(checked(trace))
        if not found or not found <= defect.rules:
            wrong[defect.name] = found
    assert wrong == {}


def test_every_defect_is_tried_somewhere() -> None:
    assert [one.name for one in DEFECTS if not any(one.needs(of) for of in TRIED)] == []
    assert len({one.name for one in DEFECTS}) == len(DEFECTS)


@pytest.mark.parametrize("layout", WHOLE)
@pytest.mark.parametrize("queue", [True, False])
def test_where_previews_hold_whole_layers_everything_is_decided(layout: str, queue: bool) -> None:
    report = checked(make_trace(replace(LAYOUTS[layout], queue=queue)))
    assert "unverified" not in report.statuses.values()


def test_what_hashes_cannot_decide_fails_only_where_it_is_required() -> None:
    trace = make_trace(LAYOUTS["long"])
    assert checked(trace).statuses["installed.payload"] == "unverified"
    assert checked(trace).verdict == "pass"
    required = checked(trace, require=("installed.payload",))
    assert (required.verdict, required.undecided) == ("fail", ("installed.payload",))


def test_rows_without_a_route_are_counted_and_bounded_by_the_policy() -> None:
    trace = make_trace(LAYOUTS["fallback"])
    report = checked(trace)
    assert (report.verdict, report.statuses["route.fallback"]) == ("pass", "unverified")
    share = report.fallback_rows / report.verified_rows
    bounded = checked(trace, max_fallback_share=share)
    assert (bounded.verdict, bounded.statuses["route.fallback"]) == ("pass", "pass")
    remarks = [one for one in bounded.findings if one.rule == "route.fallback"]
    assert [one.severity for one in remarks] == ["remark"]
    assert failed(checked(trace, max_fallback_share=share * 0.999)) == {"route.fallback"}


def test_a_share_that_nothing_counts_is_not_within_its_bound() -> None:
    trace = make_trace(LAYOUTS["context"])
    trace.remove(event="router_replay_forward_verify")
    assert checked(trace).statuses["route.fallback"] == "unverified"
    assert checked(trace).undecided == ()
    assert checked(trace, max_fallback_share=1.0).undecided == ("route.fallback",)


@given(layouts(), st.integers(0, 99), st.data())
def test_no_verification_is_believed_that_was_against_routes_nobody_installed(
    layout: Layout, seed: int, data: st.DataObject
) -> None:
    """Any one, forward or backward, instead of the one that was or beside it."""
    trace = make_trace(layout, seed)
    name, number = data.draw(
        st.sampled_from(
            [
                (name, number)
                for name, records in trace.files.items()
                for number, one in enumerate(records)
                if one["event"] == "router_replay_forward_verify"
            ]
        )
    )
    stranger = copy.deepcopy(trace.files[name][number])
    for side in ("actual", "expected"):
        stranger[side]["sha256"] = "f" * 64
    beside = data.draw(st.booleans())
    trace.files[name][number + beside : number + 1] = [stranger]
    found = failed(checked(trace))
    assert "verify.expected" in found
    # What a backward repeats of a forward with fallback rows is known by its verification alone.
    assert found <= {"verify.expected", "installed.action"}


def test_verifications_that_cannot_be_paired_leave_open_which_is_of_which() -> None:
    trace = make_trace(LAYOUTS["context"])
    for name, records in trace.files.items():
        twice = [[one] * (1 + ("matches_expected" in one)) for one in records]
        trace.files[name] = [dict(one) for many in twice for one in many]
    assert checked(trace).verdict == "pass"
    assert checked(trace, require=("verify.expected",)).undecided == ("verify.expected",)


ORDERS = {"crossed": (0, 1, 1, 0), "halves": (0, 0, 0, 1, 1, 1, 0, 1)}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("queue", [True, False])
def test_where_no_order_of_ranks_is_known_identities_are_counted_all_the_same(
    order: tuple[int, ...], queue: bool
) -> None:
    def trace(count: int | None, of: tuple[int, ...] = order) -> Trace:
        made = make_trace(Layout(context=2, data=len(order) // 2, queue=queue))
        for one in made.records(event="cp_routed_experts"):
            one["cp_rank"] = order[one["rank"]]
            if one["rank"] in of and one["microbatch_idx"] == 1:
                one["cp_token_identity_verified_count"] = count
        return made

    ranks = tuple(range(len(order)))
    healthy = checked(trace(None, ()))
    assert "fail" not in healthy.statuses.values()
    for rule in ("layer.coverage", "cp.identity", "installed.payload", "cp.reassembly"):
        assert healthy.statuses[rule] == "unverified"
        assert checked(trace(None, ()), require=(rule,)).verdict == "fail"
    assert "cp.identity" in failed(checked(trace(0, ranks)))
    assert "cp.identity" in failed(checked(trace(None, ranks)))
    assert "cp.identity" in failed(checked(trace(None, (1,))))


def test_dense_layers_and_missing_ones_are_told_apart_by_the_policy() -> None:
    of = replace(LAYOUTS["context"], full=True)
    assert checked(make_trace(of)).statuses["layer.coverage"] == "unverified"
    assert checked(make_trace(of), layers=(2, 3, 4)).statuses["layer.coverage"] == "pass"
    trace = make_trace(of)
    trace.remove(layer_number=3)
    assert failed(checked(trace, layers=(2, 3, 4))) == {"layer.coverage"}


def test_a_pipeline_stage_without_moe_layers_is_no_defect() -> None:
    trace = make_trace(Layout(pipeline=2, layers=(4,), context=2))
    report = checked(trace)
    assert report.verdict == "pass"
    assert {one.rule for one in report.findings} == {"layer.coverage"}


def test_a_policy_states_experts_where_no_forward_shows_them() -> None:
    trace = make_trace(LAYOUTS["context"])
    assert failed(checked(trace, experts=4)) == {"route.values"}


def test_the_finding_says_which_stage_rank_and_layer(tmp_path: Path) -> None:
    trace = make_trace(LAYOUTS["pipeline"])
    trace.remove(rank=5, layer_number=4, stage="train")
    trace.files.pop("r3_trace_node_pid1001.jsonl")
    found = {one.rule: one.where for one in checked(trace).findings if one.severity == "failure"}
    assert found["rank.coverage"]["rank"] == 0
    assert found["layer.coverage"] == {"stage": "train", "trace_step": 1, "rank": 5, "layer": 4}


def test_ranks_are_not_covered_where_no_record_says_how_many_there_are() -> None:
    trace = make_trace(LAYOUTS["context"])
    assert checked(trace, require=("rank.coverage",)).verdict == "pass"
    for record in trace.records():
        record.pop("world_size", None)
    report = checked(trace)
    assert (report.verdict, report.statuses["rank.coverage"]) == ("pass", "unverified")
    assert checked(trace, require=("rank.coverage",)).verdict == "fail"


def test_producers_of_the_first_group_alone_are_enough() -> None:
    """As a single controller traces it, which commits prompt by prompt."""
    trace = make_trace(LAYOUTS["context"])
    first = next(trace.records(event="rollout_payload_sample"))["key"]
    name = next(iter(trace.files))
    trace.files[name] = [one for one in trace.files[name] if one["key"] == first]
    report = checked(trace)
    assert report.verdict == "pass"
    assert [one.severity for one in report.findings] == ["remark"]


@pytest.mark.parametrize("queue", [True, False])
def test_a_shard_that_is_cut_elsewhere_leaves_positions_out(queue: bool) -> None:
    whole = Layout(context=2, lengths=(16,), microbatch=1, queue=queue)
    trace = make_trace(whole)
    shard = make_shard(replace(whole, context=1), samples_of(whole)[:1], 0)
    for one in trace.records(event="cp_routed_experts", cp_rank=1):
        one["token_identity"] = tensor_record(shard["identity"][:, 3:11])
        one["cp_token_identity_verified_count"] = 8
    assert failed(checked(trace)) == {"cp.reassembly"}


def test_events_of_another_version_are_refused_unless_they_are_named() -> None:
    trace = make_trace(LAYOUTS["context"])
    name = list(trace.files)[-1]
    trace.files[name].append(trace.files[name][0] | {"event": "policy_payload_sample"})
    assert failed(checked(trace)) == {"trace.record"}
    report = checked(trace, ignore=("policy_payload_sample",))
    assert (report.verdict, report.left_out) == ("pass", 1)


def test_ranks_that_all_say_they_are_the_first_leave_the_others_out() -> None:
    trace = make_trace(Layout(context=2, lengths=(8,), stages=("train",)))
    for one in trace.records(event="cp_routed_experts"):
        one["cp_rank"] = 0
    report = checked(trace)
    assert failed(report) == {"cp.coverage"}
    assert [one.where for one in report.findings if one.rule == "cp.coverage"] == [{"cp_rank": 1}]


def test_a_search_that_is_too_large_leaves_it_open() -> None:
    of = Layout(context=4, lengths=(300, 250), microbatch=2, queue=False)
    assert checked(make_trace(of)).statuses["cp.reassembly"] == "unverified"
    assert checked(make_trace(replace(of, queue=True))).statuses["cp.reassembly"] == "pass"


def test_defects_have_names_for_people() -> None:
    assert all(one.rules for one in DEFECTS)


@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.parametrize("side", ["right", "wrong"])
def test_zeros_that_a_cache_gave_for_prompt_tokens_are_no_routes(queue: bool, side: str) -> None:
    """K-049: all that follows agrees with them, so that nothing but the rows themselves tells."""
    (case,) = (one for one in FAULTS if one["id"] == "K-049")
    rows = case["inputs"]["reference" if side == "right" else "recorded"]
    layout = Layout(
        lengths=(len(rows) + 2, len(rows) + 1),
        top_k=case["config"]["top_k"],
        experts=16,
        queue=queue,
        microbatch=1,
    )
    report = checked(make_trace(layout, restored=rows))
    if side == "right":
        assert (report.verdict, failed(report)) == ("pass", set())
        return
    assert report.verdict == "fail"
    assert failed(report) == {"route.values"}
    first = next(one for one in report.findings if one.rule == "route.values")
    zeros = rows.index([0, 0])
    assert f"row {zeros}: [0, 0] names an expert twice" in first.message
