"""Captured choices of the trainer that are not the sampler's fail a gate of replayed routes."""

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.captures import record, sample
from tests.helpers.gates import HEALTHY, RUN, TRACES, beat, end, healthy_run, reserve
from tests.helpers.routed import EXPERTS, healthy
from trajreplay import Lake
from trajreplay.query.experts.sides import Generated
from trajreplay.schema import ParallelCoordinates
from trajreplay.stages.gate import CheckVerdict, GateVerdict, Policy, load_gate_policy

LENGTHS = (7, 5, 6, 8)  # as of the traces, of one token of prompt each
STEPS = 3
TRAINERS = ("old_experts", "experts")
_lakes = count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agreement")


def new_lake(folder: Path) -> Lake:
    return Lake.create(folder / str(next(_lakes)))


Routes = dict[str, list[Any]]


def replayed(seed: int) -> Routes:
    """Routes of the sampler, and the same of the trainer in both stages."""
    sampler = healthy(LENGTHS, 2, 3, seed)
    return {
        "rollout_experts": sampler,
        "old_experts": [one.copy() for one in sampler],
        "experts": [one.copy() for one in sampler],
    }


def capture(
    lake: Lake, rollout: int, routes: Routes, *, in_step: bool = True, **options: Any
) -> None:
    """The rollout with the sampler's choices, and its step with the trainer's."""
    samples = [sample(row, total - 1) for row, total in enumerate(LENGTHS)]

    def of(*names: str) -> Callable[[Any], None]:
        def use(capture: Any) -> None:
            capture.samples(samples)
            for name in names:
                if name in routes:
                    capture.routes(name, routes[name], num_experts=EXPERTS)

        return use

    sampler = ["rollout_experts"]
    place = {"run_id": RUN, "rollout_id": rollout, "stages": []}
    record(lake, of(*([] if in_step else sampler)), **place)
    record(lake, of(*TRAINERS, *(sampler if in_step else [])), **place, step_id=0, **options)


def gated(lake: Lake, **checks: Any) -> GateVerdict:
    return Lake.open(lake.path).gate(Policy(checks=checks), RUN, (0,), command_exit=0)


def agreement(lake: Lake, **stated: Any) -> CheckVerdict:
    """As it is judged where the policy names it."""
    (found,) = (
        one for one in gated(lake, route_agreement=stated).checks if one.check == "route_agreement"
    )
    return found


def run_of(folder: Path, routes: Sequence[Routes], **options: Any) -> Lake:
    lake = new_lake(folder)
    reserve(lake, 0)
    for rollout, one in enumerate(routes):
        beat(lake, 0, rollout + 1, HEALTHY)
        capture(lake, rollout, one, **options)
    end(lake, 0)
    return lake


def test_the_preset_certifies_no_run_whose_trainer_chose_other_experts(folder: Path) -> None:
    """Everything else is as it has to be, and the traces are those of a healthy run."""
    policy = load_gate_policy("router-replay").with_parameters(
        "routes", traces=str(TRACES), contract="legacy-async"
    )
    policy = Policy(checks={"routes": policy.checks["routes"], "terminal": {}})
    routes = [replayed(seed) for seed in range(STEPS)]
    assert Lake.open(run_of(folder, routes).path).gate(policy, RUN, (0,)).certifies
    for one in routes:
        one["experts"] = [(x + 1) % EXPERTS for x in one["experts"]]
    verdict = Lake.open(run_of(folder, routes).path).gate(policy, RUN, (0,))
    assert (verdict.certifies, verdict.failing) == (False, ("route_agreement",))
    (check,) = (one for one in verdict.checks if one.check == "route_agreement")
    assert check.value["agreement"] == 0.5  # of prev-logprob and train
    assert check.reason.startswith("experts of step 0:0, sample s-0, position 0, layer 0: [")


def test_without_captured_choices_the_preset_makes_its_eleven_checks(folder: Path) -> None:
    lake = new_lake(folder)
    healthy_run(lake)
    policy = load_gate_policy("router-replay").with_parameters(
        "routes", traces=str(TRACES), contract="legacy-async"
    )
    verdict = lake.gate(policy, RUN, (0,), command_exit=0)
    assert {one.check for one in verdict.checks} == set(policy.checks)
    assert (len(verdict.checks), verdict.certifies) == (11, True)
    (routes,) = (one for one in verdict.checks if one.check == "routes")
    assert "no choices of experts are captured" in routes.reason


@given(
    seed=st.integers(0, 9),
    name=st.sampled_from(TRAINERS),
    step=st.integers(0, STEPS - 1),
    row=st.integers(0, len(LENGTHS) - 1),
    place=st.tuples(st.integers(0, 7), st.integers(0, 1)),
    change=st.sampled_from(["other", "order", "last", "none"]),
    in_step=st.booleans(),
)
def test_one_row_of_any_place_decides(
    folder: Path,
    seed: int,
    name: str,
    step: int,
    row: int,
    place: tuple[int, int],
    change: str,
    in_step: bool,
) -> None:
    """Another expert fails; another order does not, nor the last token, nor a row without route."""
    routes = [replayed(seed + number) for number in range(STEPS)]
    token = LENGTHS[row] - 1 if change == "last" else place[0] % (LENGTHS[row] - 1)
    found = routes[step][name][row][token, place[1]]
    found[:] = {"order": found[::-1], "none": -1}.get(change, (found + 1) % EXPERTS)
    check = agreement(run_of(folder, routes, in_step=in_step))
    assert check.verdict == ("fail" if change == "other" else "pass"), check
    rows = 2 * STEPS * 2 * sum(one - 1 for one in LENGTHS)
    without = change == "none"
    assert check.value["rows"] == rows - without
    assert check.value["without_route"] == without / rows
    assert check.value["agreement"] == (1 - 1 / rows if change == "other" else 1.0)
    if change == "other":
        assert f"{name} of step {step}:0, sample s-{row}, position {token}, layer" in check.reason
    agreeing = 1 - 1 / rows
    lake = run_of(folder, routes)
    assert agreement(lake, at_least=agreeing).verdict == "pass"
    stage = {"old_experts": "train", "experts": "prev-logprob"}[name]
    assert agreement(lake, stages=[stage]).value["agreement"] == 1.0


@pytest.mark.parametrize("missing", ["step", "sampler", "trainer", "rows", "sample", "rank"])
def test_what_is_not_captured_of_both_sides_fails_where_it_is_demanded(
    folder: Path, missing: str
) -> None:
    routes = [replayed(seed) for seed in range(STEPS)]
    options: dict[str, Any] = {}
    if missing == "step":
        del routes[1]["experts"]
    elif missing in ("sampler", "trainer"):
        for one in routes:
            for name in ["rollout_experts"] if missing == "sampler" else TRAINERS:
                del one[name]
    elif missing == "rows":
        for one in routes:
            one["rollout_experts"] = [np.full_like(x, -1) for x in one["rollout_experts"]]
    elif missing == "sample":
        routes[2]["old_experts"][1] = None
    else:
        options = {"expected_ranks": [0, 1]}
    lake = run_of(folder, routes, **options)
    if missing == "rank":
        for rollout in range(STEPS):
            capture_of_rank_1(lake, rollout)
    check = agreement(lake)
    told = {
        "step": "experts of step 1:0 not captured beside the sampler's",
        "sampler": "of no token are the choices of both sides captured: 24 samples lack those of",
        "trainer": "of no token are the choices of both sides captured",
        "rows": "of no token do both sides have a route: each of ",
        "sample": "old_experts or the sampler's choices of 1 samples not captured",
        "rank": "old_experts or the sampler's choices of 3 samples not captured",
    }[missing]
    assert check.verdict == "fail"
    assert check.reason.startswith(told)
    nothing = missing in ("sampler", "trainer", "rows")
    assert agreement(lake, chosen=True).verdict == (
        "fail" if missing == "rows" else "not-judged" if nothing else "pass"
    )


def capture_of_rank_1(lake: Lake, rollout: int) -> None:
    """One more sample of the step, without any choices."""
    record(
        lake,
        lambda capture: capture.samples([sample(7, 3)]),
        run_id=RUN,
        rollout_id=rollout,
        step_id=0,
        rank=1,
        stages=[],
        expected_ranks=[0, 1],
    )


def test_rows_without_a_route_are_as_many_as_the_policy_of_routes_allows(folder: Path) -> None:
    routes = [replayed(seed) for seed in range(STEPS)]
    routes[0]["rollout_experts"][1][:3] = -1
    lake = run_of(folder, routes)
    rows = 2 * STEPS * 2 * sum(one - 1 for one in LENGTHS)
    check = agreement(lake)
    assert (check.verdict, check.value["without_route"]) == ("pass", 12 / rows)
    assert agreement(lake, max_fallback_share=12 / rows).verdict == "pass"
    check = agreement(lake, max_fallback_share=11 / rows)
    assert (check.verdict, check.reason) == (
        "fail",
        f"12 of {rows} rows have no route on one of the sides",
    )
    stated = {"traces": str(TRACES), "contract": "legacy-async", "max_fallback_share": 0.01}
    assert "route_agreement" in gated(lake, routes=stated).failing


def test_layers_that_are_not_the_samplers_are_not_compared(folder: Path) -> None:
    lake = new_lake(folder)
    reserve(lake, 0)
    beat(lake, 0, 1, HEALTHY)
    routes = replayed(0)
    samples = [sample(row, total - 1) for row, total in enumerate(LENGTHS)]

    def use(names: Sequence[str], numbers: Sequence[int]) -> Callable[[Any], None]:
        def hand(capture: Any) -> None:
            capture.samples(samples)
            for name in names:
                capture.routes(name, routes[name], layer_numbers=numbers)

        return hand

    place = {"run_id": RUN, "rollout_id": 0, "stages": []}
    record(lake, use(["rollout_experts"], [3, 4]), **place)
    record(lake, use(["old_experts"], [4, 5]), **place, step_id=0)
    check = agreement(lake, stages=["prev-logprob"], chosen=True)
    assert check.verdict == "fail"  # their layer 4 is our layer 3
    assert "layer 4: [" in check.reason
    check = agreement(lake, stages=["prev-logprob"], at_least=0.0)
    assert check.verdict == "fail"
    assert check.reason.endswith(
        "layer 5 of old_experts none of the sampler's, layer 3 of the sampler's in no old_experts "
        "of step 0:0"
    )


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize(
    ("wrong", "check"),
    [("zeros", "route.duplicate"), ("partly", "route.partial"), ("beyond", "route.range")],
)
def test_what_no_router_chooses_is_no_agreement(
    folder: Path, wrong: str, check: str, in_step: bool
) -> None:
    """However alike both sides are."""
    routes = [replayed(seed) for seed in range(STEPS)]
    for values in routes[1].values():
        values[2] = values[2].copy()
        if wrong == "zeros":
            values[2][:] = 0
        elif wrong == "partly":
            values[2][:, 1, 0] = -1
        else:
            values[2][3, 1, 0] = EXPERTS + 1
    found = agreement(run_of(folder, routes, in_step=in_step), chosen=True)
    assert found.verdict == "fail"
    assert found.reason.startswith(f"{check}: step 1:0, sample s-2: ")


def test_the_routes_of_lost_tokens_are_no_agreement(folder: Path) -> None:
    sampler = [np.tile(np.arange(3, dtype=np.int8), (total, 4, 1)) for total in LENGTHS]
    routes: Routes = {"rollout_experts": sampler, "old_experts": sampler, "experts": sampler}
    found = agreement(run_of(folder, [routes]))
    assert (found.verdict, found.reason.startswith("route.dummy: step 0:0")) == ("fail", True)


def staged(folder: Path, numbers: Sequence[Any], sampled: Any = None) -> Lake:
    """A step whose pipeline ranks captured the layers of these numbers, of eight."""
    lake = new_lake(folder)
    reserve(lake, 0)
    beat(lake, 0, 1, HEALTHY)
    sampler = healthy(LENGTHS, 8, 3, 1)
    samples = [sample(row, total - 1) for row, total in enumerate(LENGTHS)]
    place: dict[str, Any] = {"run_id": RUN, "rollout_id": 0, "stages": []}

    def use(name: str, routes: Sequence[Any], mine: Any) -> Callable[[Any], None]:
        def hand(capture: Any) -> None:
            capture.samples(samples)
            capture.routes(name, routes, layer_numbers=mine)

        return hand

    record(lake, use("rollout_experts", sampler, sampled), **place)
    size = len(numbers)
    for rank, mine in enumerate(numbers):
        held = list(range(2)) if mine is None else list(mine)
        record(
            lake,
            use("old_experts", [one[:, held] for one in sampler], mine),
            **place,
            step_id=0,
            rank=rank,
            expected_ranks=list(range(size)),
            parallel=ParallelCoordinates(pipeline_rank=rank, pipeline_size=size),
        )
    return lake


def test_every_layer_of_the_sampler_is_the_trainers_on_some_pipeline_rank(folder: Path) -> None:
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]
    check = agreement(staged(folder, whole, range(8)), stages=["prev-logprob"])
    assert (check.verdict, check.value["agreement"]) == ("pass", 1.0), check.reason
    lake = staged(folder, whole[2:], range(8))
    check = agreement(lake, stages=["prev-logprob"])
    told = "layer 0, 1, 2, 3 of the sampler's in no old_experts of step 0:0"
    assert (check.verdict, check.reason) == ("fail", told)
    check = agreement(lake, stages=["prev-logprob"], chosen=True)
    assert (check.verdict, check.reason) == ("pass", told)


@pytest.mark.parametrize("unnumbered", ["old_experts", "rollout_experts"])
def test_layers_that_nobody_numbered_are_not_compared(folder: Path, unnumbered: str) -> None:
    numbers = [None] if unnumbered == "old_experts" else [[3, 4]]
    lake = staged(folder, numbers, range(8) if unnumbered == "old_experts" else None)
    check = agreement(lake, stages=["prev-logprob"])
    assert check.verdict == "fail"
    assert f"layer_numbers of {unnumbered} are not recorded" in check.reason


def test_a_capture_of_a_rollout_is_read_once_whatever_the_order_of_its_samples(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes its samples from several rollouts by turns."""
    lake = new_lake(folder)
    reserve(lake, 0)
    routes = healthy([4] * 36, 2, 3, 5)
    for rollout in range(6):

        def of_rollout(capture: Any, rollout: int = rollout) -> None:
            capture.samples([sample(row, 3) for row in range(6)])
            capture.routes("rollout_experts", routes[6 * rollout : 6 * rollout + 6])

        record(lake, of_rollout, run_id=RUN, rollout_id=rollout, stages=[])

    def of_step(capture: Any) -> None:
        order = [(rollout, row) for row in range(6) for rollout in range(6)]
        capture.samples([sample(row, 3, source_rollout_id=rollout) for rollout, row in order])
        capture.routes("experts", [routes[6 * rollout + row] for rollout, row in order])

    record(lake, of_step, run_id=RUN, rollout_id=6, step_id=0, stages=[])
    beat(lake, 0, 7, HEALTHY)
    read: list[Any] = []
    whole = Generated._read_sides

    def counted(self: Generated, key: Any) -> list[Any]:
        read.append(key)
        return whole(self, key)

    monkeypatch.setattr(Generated, "_read_sides", counted)
    check = agreement(lake, stages=["train"])
    assert (check.verdict, check.value["agreement"]) == ("pass", 1.0), check.reason
    assert len(read) == len(set(read)) == 6
