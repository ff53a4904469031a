"""Traces of another job certify nothing, however well they fit the time of an attempt."""

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.captures import record, sample
from tests.helpers.gates import HEALTHY, RUN, beat, end, reserve
from tests.helpers.r3_traces import Layout, make_trace
from trajreplay import Lake
from trajreplay.schema import ParallelCoordinates, ProducerInfo
from trajreplay.schema.process import TrainingProcess, process_digest, told_process
from trajreplay.stages.gate import CheckVerdict, Policy

_lakes = count()
LENGTHS = (7, 5, 6, 8)
NODE = "node.example"  # where the traces of the tests are made, by processes 1001, 1002, ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whose")


def process(rank: int, world: int, *, host: str = NODE, pid: int = 1001) -> ProducerInfo:
    digest = process_digest(host, pid + rank)
    return ProducerInfo(extra=TrainingProcess(digest, rank, world).to_extra())


def trained(
    folder: Path,
    ranks: int,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    steps: int = 1,
    producers: Any = None,
    parallel: Any = None,
    captured: bool = True,
) -> Lake:
    """Steps of which each rank captured a part."""
    lake = Lake.create(folder / str(next(_lakes)))
    reserve(lake, 0)
    for rollout in range(steps):
        beat(lake, 0, rollout + 1, HEALTHY)
        for rank in range(ranks if captured else 0):
            mine = [
                sample(number, total - 1, total_length=total)
                for number, total in enumerate(lengths)
                if number % ranks == rank
            ]
            record(
                lake,
                partial(_hand_over, mine),
                run_id=RUN,
                rollout_id=rollout,
                step_id=0,
                rank=rank,
                stages=[],
                expected_ranks=list(range(ranks)),
                producer=producers(rank) if producers else None,
                parallel=parallel(rank) if parallel else None,
            )
    end(lake, 0)
    return lake


def _hand_over(samples: list[Any], capture: Any) -> None:
    capture.samples(samples)


def traced(folder: Path, layout: Layout) -> Path:
    return make_trace(layout).write(folder / str(next(_lakes)))


def judged(lake: Lake, traces: Path, *, queue: bool = True, **stated: Any) -> CheckVerdict:
    contract = "transfer-queue" if queue else "legacy-async"
    policy = Policy(checks={"routes": {"traces": str(traces), "contract": contract, **stated}})
    verdict = Lake.open(lake.path).gate(policy, RUN, (0,))
    (check,) = (one for one in verdict.checks if one.check == "routes")
    return check


@given(
    ranks=st.sampled_from([1, 2, 4]),
    queue=st.booleans(),
    change=st.sampled_from(["none", "host", "pid", "world", "one"]),
)
def test_processes_that_captured_are_those_of_the_traces(
    folder: Path, ranks: int, queue: bool, change: str
) -> None:
    def producer(rank: int) -> ProducerInfo:
        host = "node.other" if change == "host" else NODE
        other = change == "pid" or (change == "one" and rank == ranks - 1)
        world = ranks + 1 if change == "world" else ranks
        return process(rank, world, host=host, pid=2001 if other else 1001)

    lake = trained(folder, ranks, producers=producer, lengths=LENGTHS * ranks)
    check = judged(lake, traced(folder, Layout(data=ranks, queue=queue)), queue=queue)
    assert check.verdict == ("pass" if change == "none" else "fail"), check.reason
    if change == "none":
        assert check.reason == "no choices of experts are captured"
    elif change == "world":
        told = f"they are of a job of {ranks} ranks, and the attempt is one of {ranks + 1}"
        assert check.reason == f"attempt 0: trace.attempt: {told}"
    else:
        rank = ranks - 1 if change == "one" else 0
        assert check.reason == (
            f"attempt 0: trace.attempt: rank {rank} is process {NODE}:{1001 + rank}, and another "
            "one captured as that rank of the attempt: they are of another job"
        )


@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.parametrize(
    ("layout", "place", "told"),
    [
        ({"context": 2}, {"context_size": 2}, ""),
        ({"data": 4}, {"data_size": 4}, ""),
        ({"data": 4}, {"data_size": 2}, ""),  # as of one dimension alone
        ({"data": 4}, {"data_size": 3}, "job of 4 ranks, and the parallel dimensions of the att"),
        ({"data": 2}, {"context_size": 2}, "context is divided by 1, and in the attempt's captur"),
        ({"data": 2}, {"data_size": 4}, "job of 2 ranks, and the parallel dimensions of the atte"),
    ],
)
def test_ranks_are_those_that_the_captures_have_room_for(
    folder: Path, queue: bool, layout: dict[str, Any], place: dict[str, int], told: str
) -> None:
    lake = trained(
        folder,
        1,
        parallel=lambda rank: ParallelCoordinates(**place),
        lengths=LENGTHS * 4,
    )
    check = judged(lake, traced(folder, Layout(**layout, queue=queue)), queue=queue)
    assert check.verdict == ("fail" if told else "pass"), check.reason
    assert told in check.reason


def test_a_rank_that_captured_is_one_of_the_job(folder: Path) -> None:
    lake = trained(folder, 4, lengths=LENGTHS * 4)
    assert judged(lake, traced(folder, Layout(data=4))).verdict == "pass"
    check = judged(lake, traced(folder, Layout(data=2)))
    assert (check.verdict, check.reason) == (
        "fail",
        "attempt 0: trace.attempt: they are of a job of 2 ranks, and rank 3 captured",
    )


@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_no_more_passes_are_traced_than_the_attempt_told_of_steps(
    folder: Path, queue: bool, steps: int
) -> None:
    lake = trained(folder, 1, steps=steps, captured=False)
    check = judged(lake, traced(folder, Layout(steps=2, queue=queue)), queue=queue)
    assert check.verdict == ("fail" if steps < 2 else "pass")
    if steps < 2:
        assert check.reason.endswith(
            "train is traced up to its pass 2, and the attempt told of 1 steps"
        )


@given(
    queue=st.booleans(),
    lengths=st.lists(st.integers(2, 9), min_size=4, max_size=6).map(tuple),
)
def test_the_samples_that_are_trained_on_are_those_that_were_consumed(
    folder: Path, queue: bool, lengths: tuple[int, ...]
) -> None:
    """Two jobs whose samples differ in length are told apart without any process."""
    lake = trained(folder, 1, lengths=lengths)
    check = judged(lake, traced(folder, Layout(lengths=LENGTHS, queue=queue)), queue=queue)
    there = set(LENGTHS) <= set(lengths)
    assert check.verdict == ("pass" if there else "fail"), check.reason
    assert ("times and lengths of samples alone say whose" in check.reason) == there
    if there:
        check = judged(lake, traced(folder, Layout(queue=queue)), require=["trace.attempt"])
        assert check.verdict == "fail"
    else:
        missing = min(set(LENGTHS) - set(lengths))
        assert check.reason.endswith(f"1 samples of {missing} tokens, and the attempt consumed 0")


def test_of_samples_of_one_length_as_many_are_trained_on_as_were_consumed(folder: Path) -> None:
    traces = traced(folder, Layout(lengths=(7, 7, 5, 6)))
    assert judged(trained(folder, 1, lengths=(7, 7, 5, 6)), traces).verdict == "pass"
    check = judged(trained(folder, 1, lengths=(7, 8, 5, 6)), traces)
    assert check.reason.endswith("2 samples of 7 tokens, and the attempt consumed 1")


@pytest.mark.parametrize("left_out", ["captures", "a step"])
def test_what_cannot_be_compared_is_said_and_fails_where_it_has_to_be_decided(
    folder: Path, left_out: str
) -> None:
    lake = trained(folder, 1, captured=left_out != "captures", lengths=(9, 9))
    if left_out == "a step":
        beat(lake, 0, 2, HEALTHY)  # it may have consumed what is traced
    traces = traced(folder, Layout())
    check = judged(lake, traces)
    assert check.verdict == "pass"
    assert "attempt 0: time alone says whose traces they are" in check.reason
    check = judged(lake, traces, require=["trace.attempt"])
    assert check.verdict == "fail"
    assert "trace.attempt is unverified, and has to be decided: time alone says" in check.reason


@pytest.mark.parametrize("role", ["driver", "rollout"])
def test_a_process_beside_the_trainer_is_none_of_its_ranks(folder: Path, role: str) -> None:
    def producer(rank: int) -> ProducerInfo:
        return ProducerInfo(role=role, extra=process(rank, 1, pid=7).extra)

    lake = trained(folder, 1, producers=producer)
    assert judged(lake, traced(folder, Layout(context=2))).verdict == "pass"


@pytest.mark.parametrize(
    "extra", [{}, {"process": "ab"}, {"process": "a", "process_rank": "x", "process_world": "2"}]
)
def test_a_producer_that_says_no_process_is_none(extra: dict[str, str]) -> None:
    assert told_process({"extra": extra}) is None
    assert told_process({}) is None
    assert told_process({"extra": process(3, 8).extra}) == TrainingProcess(
        process_digest(NODE, 1004), 3, 8
    )
