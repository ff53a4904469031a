"""What was fetched held against what was replayed: all of it, a part of it, or nothing."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.r3_checked import LAYOUTS, checked, failed
from tests.helpers.r3_defects import replay_again
from tests.helpers.r3_layouts import layouts
from tests.helpers.r3_traces import FETCH, Layout, Record, Trace, make_trace

REPLAYED = ("installed.payload", "cp.reassembly", "assign.coverage", "fetch.hash")


def keep(trace: Trace, keys: set[str]) -> Trace:
    """Leave out producers and fetches of other samples, as where not all are traced."""
    for name, records in trace.files.items():
        trace.files[name] = [one for one in records if one.get("key", "") in {*keys, ""}]
    return trace


def is_fetch(record: Record) -> bool:
    return bool(record["event"] == "tq_fetch_sample")


def keys_of(trace: Trace) -> list[str]:
    return [one["key"] for one in trace.records(event="rollout_payload_sample")]


def batches_of(trace: Trace) -> list[list[str]]:
    """Keys of each batch, of one step and replica."""
    keys, size = keys_of(trace), len(trace.layout.lengths)
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def with_other_replays(trace: Trace, other: Trace) -> Trace:
    """What a trace fetched, and what another replayed, each in its place."""
    fetches = {after: before for before, after in FETCH.items()}
    for name, records in trace.files.items():
        found = []
        for stage in FETCH.values():
            found += [one for one in records if is_fetch(one) and one["stage"] == stage]
            found += [
                one
                for one in other.files[name]
                if not is_fetch(one) and one.get("stage") == fetches[stage]
            ]
        trace.files[name] = found or records
    return trace


@given(layouts(queue=True), st.integers(0, 99), st.data())
def test_no_healthy_trace_is_refused_of_which_a_part_of_the_fetches_is_there(
    layout: Layout, seed: int, data: st.DataObject
) -> None:
    trace = make_trace(layout, seed)
    kept = [data.draw(st.sets(st.sampled_from(keys), min_size=1)) for keys in batches_of(trace)]
    report = checked(keep(trace, set().union(*kept)))
    assert report.verdict == "pass", [one.message for one in report.findings]


@pytest.mark.parametrize("lengths", [(4, 4, 4, 4), (7, 5, 6, 8), (64, 64, 64, 64)])
@pytest.mark.parametrize("first", [True, False])
def test_samples_without_a_fetch_are_counted_and_refused_where_it_is_required(
    lengths: tuple[int, ...], first: bool
) -> None:
    """Also where the first micro-batch has others of the lengths that were fetched."""
    trace = make_trace(Layout(context=2, lengths=lengths, capped=1))
    keys = keys_of(trace)
    report = checked(keep(trace, set(keys[:2] if first else keys[2:])))
    assert report.verdict == "pass"
    told = [one for one in report.findings if one.rule == "installed.payload"]
    told = [one for one in told if "shards are not recorded" not in one.message]
    if first and max(lengths) < 10:  # their samples are put together, each with its partner
        assert told == []
    else:
        assert len(told) == 1
        assert checked(trace, require=("installed.payload",)).undecided == ("installed.payload",)


@given(
    name=st.sampled_from(["context", "sequence", "pipeline", "rows", "long"]),
    count=st.integers(1, 2),
    capped=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_other_samples_than_those_fetched_do_not_pass_as_theirs(
    name: str, count: int, capped: int, seed: int
) -> None:
    of = replace(LAYOUTS[name], capped=capped)
    trace, other = make_trace(of, seed), make_trace(of, seed + 1000)
    pick = random.Random(seed)
    keep(trace, {key for keys in batches_of(trace) for key in pick.sample(keys, count)})
    report = checked(with_other_replays(trace, other), require=REPLAYED)
    assert report.verdict == "fail"
    assert failed(report) <= {"assign.coverage", "cp.reassembly", "installed.payload"}


def test_nothing_fetched_for_a_step_leaves_its_samples_open() -> None:
    trace = make_trace(replace(LAYOUTS["context"], steps=2))
    assert checked(trace, require=REPLAYED).verdict == "pass"
    for name, records in trace.files.items():
        trace.files[name] = [
            one for one in records if one["event"] != "tq_fetch_sample" or one["trace_step"] == 1
        ]
    second = [one["key"] for one in trace.records(event="rollout_payload_sample", trace_step=2)]
    keep(trace, set(keys_of(trace)) - set(second))
    report = checked(trace)
    assert report.verdict == "pass"
    assert report.statuses["installed.payload"] == "unverified"
    assert report.statuses["cp.reassembly"] == "unverified"


@pytest.mark.parametrize("part", [2, 3])
def test_a_sample_of_a_part_that_is_replayed_with_other_routes_is_refused(part: int) -> None:
    of = LAYOUTS["context"]
    trace, other = make_trace(of, 3), make_trace(replace(of, fallback=1), 3)
    keep(trace, set(keys_of(trace)[:part]))
    found = failed(checked(with_other_replays(trace, other)))
    assert "installed.payload" in found


@pytest.mark.parametrize("equal", [True, False])
def test_equal_samples_are_replayed_as_often_as_they_were_fetched(equal: bool) -> None:
    of = Layout(context=2, lengths=(4, 4), microbatch=1, previewed=2)
    trace = make_trace(of, 3)
    replay_again(trace, *of.stages)
    if equal:
        for name, records in trace.files.items():
            first = {one.get("stage"): one for one in records if one.get("sample_idx") == 0}
            trace.files[name] = [
                {**first[one.get("stage")], **{key: one[key] for key in ("sample_idx", "key")}}
                if one.get("sample_idx") == 1
                else one
                for one in records
            ]
    report = checked(trace, require=REPLAYED)
    assert failed(report) == (set() if equal else {"assign.coverage"})


def test_tensor_ranks_that_nothing_tells_from_replicas_fetch_and_replay_the_same() -> None:
    of = Layout(tensor=2, data=2, lengths=(4, 4, 3, 5))
    assert checked(make_trace(of), require=REPLAYED).verdict == "pass"
    trace = make_trace(of)
    replay_again(trace, *of.stages)
    assert failed(checked(trace)) == {"assign.coverage"}


def shared(whole: Layout, parts: tuple[int, int] = (0, 1)) -> Trace:
    """Two replicas that fetch all samples, and replay one of two halves of the micro-batches."""
    half = len(whole.lengths) // 2
    count = half // whole.microbatch
    made = make_trace(replace(whole, data=2, lengths=whole.lengths[:half]), 5)
    one_replica = make_trace(replace(whole, capped=len(whole.lengths)), 5)
    producer, *workers = made.files
    made.files[producer] = one_replica.files[producer]
    for rank, name in enumerate(workers):
        replica, peer = divmod(rank, whole.context)
        seen: dict[object, int] = {}
        found = []
        for one in one_replica.files[workers[peer]]:
            place = {"rank": rank, "pid": 1001 + rank, "world_size": 2 * whole.context}
            if not is_fetch(one):
                fields = ("stage", "event", "action", "layer_number")
                kind = tuple(one.get(key) for key in fields)
                number = seen[kind] = seen.get(kind, 0) + 1
                if (number - 1) // count != parts[replica]:
                    continue
                if "microbatch_idx" in one:
                    place["microbatch_idx"] = (number - 1) % count + 1
            found.append(one | place)
        made.files[name] = found
    for name, records in made.files.items():
        made.files[name] = [one for one in records if one.get("microbatch_idx", 0) <= whole.capped]
    return made


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("context", [1, 2])
def test_replicas_that_fetched_the_same_share_it(context: int, alike: bool) -> None:
    """As where every replica fetches all and replays its part; twice the same part is not all."""
    of = Layout(context=context, lengths=(4, 6, 3, 5), recompute=True, alike=alike)
    assert failed(checked(shared(of), require=REPLAYED)) == set()
    assert failed(checked(shared(of, parts=(0, 0)))) == {"assign.coverage"}


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize(
    ("lengths", "microbatch", "capped"),
    [
        ((4, 4), 1, 1),
        ((4, 4, 4, 4), 2, 1),
        ((4, 6, 4, 6), 1, 2),
        ((4, 6, 4, 5), 1, 1),
        ((4, 6, 6, 4, 6, 4), 1, 2),
    ],
)
def test_replicas_may_replay_equal_samples_that_were_fetched_for_each(
    lengths: tuple[int, ...], microbatch: int, capped: int, context: int
) -> None:
    """Of the last two, what follows the recorded micro-batches differs or is not known."""
    of = Layout(
        context=context, lengths=lengths, microbatch=microbatch, capped=capped, recompute=True
    )
    report = checked(shared(replace(of, alike=True)))
    assert failed(report) == set()
    # Without context parallelism the replicas might be tensor ranks, which replay the same; and
    # what follows the recorded micro-batches might be the same too.
    is_known = context > 1 and capped * microbatch * 2 >= len(lengths)
    status = "pass" if is_known else "unverified"
    assert report.statuses["assign.coverage"] == status
    assert failed(checked(shared(of, parts=(0, 0)))) == {"assign.coverage"}


@pytest.mark.parametrize("context", [1, 2])
def test_equal_samples_do_not_stand_for_another_that_was_fetched(context: int) -> None:
    """Two of three equal ones are replayed twice; the third and one of seven tokens are not."""
    of = Layout(context=context, lengths=(4, 4, 4, 7), recompute=True, alike=True)
    assert failed(checked(shared(of))) == set()
    assert failed(checked(shared(of, parts=(0, 0)))) == {"assign.coverage"}
