"""`trajreplay preflight` and `trajreplay rules`: findings, exit codes, what is not decided."""

import json
from pathlib import Path

import pytest

from tests.helpers.cli import run
from trajreplay.cli.verbs.preflight import FRAMEWORK_NAMES
from trajreplay.query.preflight import FRAMEWORKS, built_in
from trajreplay.query.preflight.check import shown
from trajreplay.query.preflight.evaluation import Undecided


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "grpo.yaml"
    path.write_text("num_generations: 8\nloss_type: cispo\nepsilon_high: 0.28\n")
    return path


def test_a_finding_has_path_value_why_and_what_to_write_instead(config: Path) -> None:
    outcome = run("preflight", config, "--framework", "trl", "num_generations=1")
    assert outcome.code == 1
    lines = outcome.out.splitlines()
    assert lines[0] == "error trl/group-of-one: num_generations is 1"
    assert lines[1].startswith("  why: The advantage is the distance from the mean")
    assert lines[2] == "  instead: 2 or more"
    assert lines[3] == "error trl/cispo-bound: epsilon_high is 0.28"
    assert lines[-1].startswith("refused: ")


def test_warnings_refuse_nothing(config: Path) -> None:
    outcome = run("preflight", config, "--framework", "trl", "loss_type=grpo", "epsilon=0.3")
    assert outcome.code == 0
    assert outcome.out.startswith("warning trl/clip-order: epsilon_high is 0.28\n")
    assert "1 warning" in outcome.out.splitlines()[-1]


def test_what_is_not_decided_is_said_on_stderr_and_facts_decide_it(config: Path) -> None:
    fixed = ("epsilon_high=5.0",)
    outcome = run("preflight", config, "--framework", "trl@1.16", *fixed)
    assert outcome.code == 0
    assert "not decided without --fact processes=...: trl/batch-of-groups" in outcome.err
    facts = ("--fact", "processes=1", "--fact", "dataset_size=9000")
    outcome = run("preflight", config, "--framework", "trl@1.16", *fixed, *facts)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == "ok: 7 rules of trl 1.16: nothing found\n"


def test_a_setting_that_does_not_tell_is_said_on_stderr_with_its_value(config: Path) -> None:
    for written, told in (('"1"', '"1"'), ("${oc.env:N}", "${oc.env:N}")):
        config.write_text(f"num_generations: {written}\n")
        outcome = run("preflight", config, "--framework", "trl@1.16")
        assert outcome.code == 0
        assert f"not decided since num_generations is {told}: trl/group-of-one" in outcome.err
        assert outcome.out.endswith("3 not decided\n")


def test_a_list_is_shown_as_it_is_written() -> None:
    assert shown([1, Undecided(text="${x}"), True, None]) == "[1, ${x}, true, not set]"


def test_rules_of_another_framework_are_refused(config: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('framework = "verl"\nversion = 1\n')
    outcome = run("preflight", config, "--framework", "trl", "--rules", own)
    assert (outcome.code, outcome.out) == (2, "")
    assert "these rules are for verl, the configuration is of trl" in outcome.err


def test_rules_of_users_count(config: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        'framework = "trl"\nversion = 1\n[[rule]]\nname = "house"\nwhen = "beta > 0"\n'
        'path = "beta"\nwhy = "Ours."\ninstead = "0"\n'
    )
    chosen = ("--framework", "trl", "--rules", own, "--format", "json")
    rows = json.loads(run("preflight", config, *chosen, "beta=1").out)
    assert [row["rule"] for row in rows] == ["trl/cispo-bound", "trl/house"]
    listed = json.loads(run("rules", "--framework", "trl", "--rules", own, "--format", "json").out)
    assert listed[-1]["rule"] == "trl/house"


def test_all_rules_are_listed() -> None:
    listed = json.loads(run("rules", "--format", "json").out)
    assert len(listed) == sum(len(built_in(one).rules) for one in FRAMEWORKS)
    assert FRAMEWORK_NAMES == FRAMEWORKS


@pytest.mark.parametrize(
    "args",
    [
        ("--framework", "trlx"),
        ("--framework", "trl@main"),
        ("--framework", "trl@1.16rc1"),
        ("--framework", "trl", "--fact", "nothing"),
        ("--framework", "trl", "--fact", "nothing=1"),
        ("--framework", "trl", "num_generations"),
        (),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(config: Path, args: tuple[str, ...]) -> None:
    outcome = run("preflight", config, *args)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err


def test_a_file_of_another_framework_is_unverified_and_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text("algorithm:\n  adv_estimator: grpo\nactor_rollout_ref:\n  rollout:\n    n: 8\n")
    outcome = run("preflight", path, "--framework", "trl")
    assert outcome.code == 3
    last = outcome.out.splitlines()[-1]
    assert last.startswith("unverified: ")
    assert "none of the" in last
    assert "it looks like one of verl: actor_rollout_ref" in last
    assert run("preflight", path, "--framework", "verl").code == 0


def test_a_version_that_no_rule_was_read_from_is_unverified(config: Path, tmp_path: Path) -> None:
    fine = ("loss_type=grpo", "epsilon_high=0.3")
    outcome = run("preflight", config, "--framework", "trl@9.9", *fine)
    assert outcome.code == 3
    last = outcome.out.splitlines()[-1]
    assert last.startswith("unverified: ")
    assert "nothing is known of version 9.9: the rules are of >=0.22,<1.17" in last
    assert run("preflight", config, "--framework", "trl@9.9").code == 1, "what is wrong stays so"
    own = tmp_path / "own.toml"
    own.write_text('framework = "trl"\nversion = 1\nreleases = ">=9,<10"\n')
    assert run("preflight", config, "--framework", "trl@9.9", "--rules", own, *fine).code == 0
    own.write_text('framework = "trl"\nversion = 1\nreleases = "9.x"\n')
    outcome = run("preflight", config, "--framework", "trl@9.9", "--rules", own, *fine)
    assert outcome.code == 2
    assert "releases are '9.x', expected as >=0.22,<1.10" in outcome.err


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_framework_takes_any_version(framework: str) -> None:
    assert not built_in(framework).knows("99")
