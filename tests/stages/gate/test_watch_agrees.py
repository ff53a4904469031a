"""A watch says of a run of one step what a gate of it says, wherever its values were captured."""

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.captures import record, sample
from tests.helpers.gates import HEALTHY, RUN, beat, end, reserve
from tests.helpers.routed import EXPERTS, healthy
from trajreplay import Lake
from trajreplay.stages.gate import Policy

LENGTHS = (4, 6)
PLACES = ("rollout", "step", "nowhere")
SIDES = ("rollout_experts", "old_experts", "experts")


def run_of(folder: Path, where: dict[str, str], changed: str = "") -> Lake:
    """A rollout and its step, with the choices of each side where they are said to be."""
    lake = Lake.create(folder / "lake")
    reserve(lake, 0)
    beat(lake, 0, 1, HEALTHY)
    samples = [sample(row, total - 1) for row, total in enumerate(LENGTHS)]
    routes = {name: healthy(LENGTHS, 2, 3, 0) for name in SIDES}
    if changed:
        one = routes[changed][1]
        one[2, 1, 0] = next(x for x in range(EXPERTS) if x not in one[2, 1])

    def of(names: Iterable[str]) -> Callable[[Any], None]:
        def use(capture: Any) -> None:
            capture.samples(samples)
            for name in names:
                capture.routes(name, routes[name], num_experts=EXPERTS)

        return use

    for kind, more in (("rollout", {}), ("step", {"step_id": 0})):
        names = [name for name in SIDES if where[name] == kind]
        record(lake, of(names), run_id=RUN, rollout_id=0, stages=[], **more)
    end(lake, 0)
    return lake


def verdicts(lake: Lake, policy: Policy) -> tuple[bool, bool]:
    """Whether a gate fails the run, and whether a watch fails any cohort of it."""
    gate = Lake.open(lake.path).gate(policy, RUN, (0,)).verdict == "fail"
    watch = Lake.open(lake.path).watch(RUN, policy=policy, wait=0)
    checks = [check for one in watch.poll() for check in watch.gate(one)]
    assert checks
    return gate, any(one.verdict == "fail" for one in checks)


@pytest.mark.parametrize("places", [*product(PLACES, repeat=3)], ids="-".join)
def test_experts_that_were_not_captured_of_both_sides_fail_both(
    places: tuple[str, ...], tmp_path: Path
) -> None:
    lake = run_of(tmp_path, dict(zip(SIDES, places, strict=True)))
    gate, watch = verdicts(lake, Policy(checks={"route_agreement": {}}))
    beside = places[0] == "rollout" or "rollout" not in places[1:]  # a rollout reads no step
    assert gate == ("nowhere" in places or not beside)
    assert watch == gate


@pytest.mark.parametrize("place", ["rollout", "step"])
@pytest.mark.parametrize("changed", SIDES)
def test_experts_that_differ_fail_both(place: str, changed: str, tmp_path: Path) -> None:
    lake = run_of(tmp_path, dict.fromkeys(SIDES, place), changed)
    assert verdicts(lake, Policy(checks={"route_agreement": {}})) == (True, True)


@pytest.mark.parametrize("check", ["truncation", "delta_tail", "delta_fraction", "generation_kl"])
def test_values_that_nobody_recorded_fail_both(check: str, tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    reserve(lake, 0)
    record(
        lake,
        lambda capture: capture.samples([sample(0, 3)]),
        run_id=RUN,
        rollout_id=0,
        step_id=0,
        stages=[],
    )
    end(lake, 0)
    assert verdicts(lake, Policy(checks={check: {}})) == (True, True)
