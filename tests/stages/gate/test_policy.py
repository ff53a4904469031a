"""Policies: presets, files over presets, and what is malformed."""

from pathlib import Path

import pytest

from trajreplay import QueryError
from trajreplay.stages.gate import PRESETS, load_gate_policy


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_policy(name: str) -> None:
    policy = load_gate_policy(name)
    assert policy.checks
    assert not policy.allow_precision


def test_a_file_states_what_is_other_than_in_its_preset(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(
        'preset = "router-replay"\nmax_steps = 3\n[checks]\nroutes = false\n'
        "[checks.truncation]\nbelow = 0.5\n"
    )
    policy = load_gate_policy(file)
    assert (policy.max_steps, policy.checks["truncation"]) == (3, {"below": 0.5})
    assert "routes" not in policy.checks
    assert set(load_gate_policy("router-replay").checks) == {*policy.checks, "routes"}


def test_the_digest_tells_policies_apart_by_what_they_demand(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('preset = "router-replay"\n')
    assert load_gate_policy(file).digest == load_gate_policy("router-replay").digest
    assert load_gate_policy(file, max_steps=3).digest != load_gate_policy(file).digest


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_steps = ", "no policy can be read"),
        ("", "no check is named"),
        ('preset = "clean"', "expected one of router-replay"),
        ("[checks.loss]", "unknown 'loss'"),
        ("[checks.captures]\nbelow = 1", "unknown 'below'"),
        ("max_steps = 0\n[checks.complete]", "max_steps is 0"),
        ("max_steps = true\n[checks.complete]", "max_steps is True"),
        ("[checks.complete]", "max_steps is missing"),
        ("[checks.truncation]\nbelow = nan", "expected a finite number"),
        ("max_steps = 1\n[checks.learning_signal]\nshare = 1.1", "a number from 0 to 1"),
        ("[checks.mismatch_baseline]\nwindow = 0", "a whole number from 1 on"),
        ('[[sql]]\nname = "a"\nquery = "select 1"', "no bound"),
        ('[[sql]]\nname = "a"\nquery = ""\nbelow = 1', "the query ''"),
        ('[[sql]]\nname = "a"\nquery = "select 1"\nbelow = inf', "below = inf"),
        ('run = "chained"\n[checks.captures]', "expected one of direct"),
        ("allow_precision = 1\n[checks.replay]", "expected true or false"),
        ('[checks.routes]\ncontract = "guess"', "legacy-async"),
    ],
)
def test_a_malformed_policy_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    with pytest.raises(QueryError, match=reason):
        load_gate_policy(file)


def test_a_policy_that_is_not_there_names_the_presets(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="replay-clean"):
        load_gate_policy(tmp_path / "none.toml")
