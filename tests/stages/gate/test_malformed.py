"""Whatever a policy or a heartbeat holds: a verdict, or a policy that is refused as malformed."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.cli import run
from tests.helpers.gates import HEALTHY, RUN, healthy_run, reserve
from trajreplay import Lake, QueryError
from trajreplay.query import Catalog
from trajreplay.schema.events import HEARTBEAT, HEARTBEAT_FIELDS, TERMINAL
from trajreplay.schema.identity import make_key
from trajreplay.schema.lakefile import open_lake
from trajreplay.stages.gate import PRESETS, gate, load_gate_policy
from trajreplay.stages.gate.checks import CHECKS
from trajreplay.stages.gate.policy import MOST_STEPS, RUN_KINDS
from trajreplay.writer import Event, commit_events

HUGE = 10**400
WORDS = ["", "x", "\0", "train", "prev-logprob", "legacy-async", "route.fallback", "select 1"]
NUMBERS = [0, 1, -1, 5, 30_000_000, MOST_STEPS, 1 << 63, HUGE, -HUGE, 0x10**4000, 0.5, 1e308]
NUMBERS += [float("nan"), float("inf"), float("-inf")]
PLAIN = st.one_of(
    st.sampled_from([*WORDS, *NUMBERS]),
    st.booleans(),
    st.sampled_from([date(2000, 1, 1), datetime(2000, 1, 1, 1, 1, 1), time(1, 1)]),
)
VALUES = st.one_of(PLAIN, st.lists(PLAIN, max_size=2), st.dictionaries(st.just("a"), PLAIN))
CHECK = {
    one.name: st.fixed_dictionaries({}, optional={p.name: VALUES for p in one.parameters})
    for one in CHECKS
}
SQL = st.fixed_dictionaries(
    {"name": VALUES, "query": VALUES},
    optional=dict.fromkeys(("below", "above", "at_most", "at_least", "equals", "a"), VALUES),
)
TREES = st.fixed_dictionaries(
    {},
    optional={
        "preset": st.one_of(st.sampled_from(PRESETS), VALUES),
        "max_steps": VALUES,
        "run": st.one_of(st.sampled_from(RUN_KINDS), VALUES),
        "allow_precision": VALUES,
        "checks": st.one_of(st.fixed_dictionaries({}, optional=CHECK), VALUES),
        "sql": st.one_of(st.lists(SQL, max_size=2), VALUES),
    },
)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    lake = Lake.create(tmp_path_factory.mktemp("gate") / "lake")
    healthy_run(lake, 4)
    return Catalog.open(open_lake(lake.path))


def as_toml(value: Any) -> str:
    """A value as TOML has it; of integers also those that it has not."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return hex(value) if isinstance(value, int) and value > 1 << 64 else repr(value)


@contextmanager
def policy_file(text: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "policy.toml")
        file.write_text(text)
        yield file


@example({"checks": {"truncation": {"below": HUGE}}})
@example({"checks": {"routes": {"experts": date(2000, 1, 1)}}})
@example({"checks": {"routes": {"stages": ["bogus"]}}})
@example({"max_steps": HUGE, "checks": {"learning_signal": {}}})
@example({"max_steps": MOST_STEPS, "checks": {"complete": {}, "learning_signal": {}}})
@example({"sql": [{"name": "a", "query": "select 1", "at_most": HUGE}]})
@given(TREES)
def test_a_policy_gives_a_verdict_or_is_refused(catalog: Catalog, tree: dict[str, Any]) -> None:
    lines = "\n".join(f"{name} = {as_toml(one)}" for name, one in tree.items())
    with policy_file(lines) as file:
        try:
            policy = load_gate_policy(file)
        except QueryError:
            return
    verdict = gate(catalog, policy, RUN, [0], command_exit=0)
    assert json.loads(json.dumps(verdict.to_json()))["policy_digest"] == policy.digest


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[checks.truncation]\nbelow = 1" + "0" * 400, "more than 64 bits"),
        ("[checks.routes]\nexperts = 2000-01-01", "experts is datetime.date"),
        ('[checks.routes]\nstages = ["bogus"]', "stages has 'bogus'"),
        ("[checks.routes]\nexperts = -1", "experts is -1"),
        ("[checks.routes]\nlayers = [0]", "layers has 0"),
        ("[checks.routes]\nsince = nan", "since is"),
        ("max_steps = 10000000000\n[checks]\ncomplete = {}", "from 1 to 1000000000"),
        ('[[sql]]\nname = "a"\nquery = "SELEC 1"\nbelow = 1', "sql 'a': Parser Error"),
        ('[[sql]]\nname = "a"\nquery = "DROP TABLE steps"\nbelow = 1', "of kind DROP"),
        ('[[sql]]\nname = "a"\nquery = "select 1"\nat_most = 0x1' + "0" * 5000, "64 bits"),
    ],
)
def test_a_malformed_policy_ends_the_command_with_2(
    catalog: Catalog, text: str, reason: str
) -> None:
    with policy_file(text) as file:
        found = run(
            "gate", file, "--lake", str(catalog.store), "--attempt", "0", "--command-exit", "0"
        )
    assert (found.code, found.out) == (2, "")
    assert reason in found.err


def test_far_more_steps_than_were_recorded_are_not_gone_through(catalog: Catalog) -> None:
    """A list of all of them would be gigabytes; the first few that are missing are told."""
    policy = load_gate_policy("router-replay", max_steps=MOST_STEPS)
    (check,) = [one for one in gate(catalog, policy, RUN, [0]).checks if one.check == "complete"]
    assert check.reason == "step number 5, 6, 7, 8, 9 ... has no loss"


DETAIL = st.recursive(
    st.one_of(st.none(), st.booleans(), st.sampled_from([*WORDS, "NaN", "Infinity", "-Infinity"]))
    | st.sampled_from([0, 1, 2, 3, -1, 1 << 63, HUGE, -HUGE, 0.1, 1e308, -1e308, 5e-324]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner),
    max_leaves=3,
)
HEARTBEATS = st.lists(
    st.fixed_dictionaries(
        {"step": st.one_of(st.integers(1, 5), DETAIL)},
        optional={one.name: DETAIL for one in HEARTBEAT_FIELDS if one.name != "step"},
    ).map(lambda told: HEALTHY | told),
    min_size=1,
    max_size=4,
)


@example([{**HEALTHY, "step": 1, "loss": HUGE}], {})
@example([{**HEALTHY, "step": 1, "rollout_id": "x"}], {})
@example([{**HEALTHY, "step": HUGE}], {})
@example([{**HEALTHY, "step": 1, "valid_tokens": one} for one in (5, -5)], {})
@example([{**HEALTHY, "step": one, "abs_delta": 1e308} for one in (1, 2, 3, 4)], {})
@given(HEARTBEATS, st.dictionaries(st.sampled_from(["status", "reason", "steps"]), DETAIL))
def test_whatever_heartbeats_and_ends_hold_there_is_a_verdict(
    told: list[dict[str, Any]], ended: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder, "lake"))
        reserve(lake, 0)
        store = open_lake(lake.path)
        for place, values in enumerate(told):
            key = make_key(RUN, 0, "events", place // 2, 0, place % 2)
            commit_events(store, key, [Event(HEARTBEAT, json.dumps(values))])
        end = [Event(TERMINAL, json.dumps(ended))]
        commit_events(store, make_key(RUN, 0, "events", None, None, 0), end)
        for preset in PRESETS:
            policy = load_gate_policy(preset, max_steps=4)
            verdict = gate(Catalog.open(store), policy, RUN, [0], command_exit=0)
            assert verdict.verdict == "fail"  # routes and captures lack, and steps for a warm-up
            json.dumps(verdict.to_json())
