"""Steps that were never replayed, and tokens whose routes were lost on the way."""

from dataclasses import replace

import pytest

from tests.helpers.r3_checked import LAYOUTS, checked, failed
from tests.helpers.r3_defects import remove_replays
from tests.helpers.r3_traces import Layout, make_trace


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
    of = Layout(layers=(2,), total_layers=2, lengths=(6,), top_k=1)
    assert checked(make_trace(of, seed=5)).statuses["route.values"] == "pass"
    report = checked(make_trace(replace(of, dummy=True)))
    assert (report.verdict, report.statuses["route.values"]) == ("pass", "unverified")
