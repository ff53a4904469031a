"""`trajreplay certify` refused before the command runs: no attempt used up, no verdict passes."""

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import Outcome, run
from trajreplay import Lake
from trajreplay.schema.lakefile import open_lake
from trajreplay.stages.gate import Policy, check_meetable, load_gate_policy
from trajreplay.writer.attempts import reserve_next_attempt

PASSED = {"verdict": "pass", "certifies": True, "run_id": "r", "attempts": [0]}
OK = (sys.executable, "-c", "import pathlib; pathlib.Path('ran').touch()")
REFUSED: list[tuple[str, tuple[str, ...], tuple[str, ...], int, str]] = [
    ("no such program", (), ("no-such-program",), 127, "there is no such program in any folder"),
    ("no such file", (), ("./train.sh",), 127, "./train.sh: there is no such program"),
    ("an empty name", (), ("",), 127, "'': there is no such program"),
    ("a file of text", (), ("./notes",), 126, "notes: may not be executed"),
    ("a folder", (), ("./here",), 126, "./here: is a folder"),
    ("an unknown policy", ("--policy", "replay-claen"), OK, 2, "replay-claen: no such file"),
    ("no traces", ("--policy", "router-replay"), OK, 2, "no folder of traces is named"),
    (
        "no contract",
        ("--policy", "router-replay", "--traces", "here"),
        OK,
        2,
        "no contract is stated: legacy-async or transfer-queue, as checks.routes.contract",
    ),
    (
        "traces that are a file",
        ("--policy", "router-replay", "--traces", "notes", "--contract", "legacy-async"),
        OK,
        2,
        "traces is 'notes', a file, expected a folder",
    ),
    (
        "a run that is all warm-up",
        ("--policy", "mismatch-baseline", "--max-steps", "3"),
        OK,
        2,
        "max_steps is 3, expected 4 or more: 3 steps of warm-up, and 1 on end that can be above",
    ),
    ("a misspelt column", ("--policy", "column.toml"), OK, 2, "did you mean response_length"),
    ("no max_steps", ("--policy", "steps.toml"), OK, 2, "max_steps is missing"),
    ("a run that is no id", ("--run", ".."), OK, 2, "'--run'"),
    ("an unknown kind", ("--kind", "dirct"), OK, 2, "'dirct' is not one of"),
    ("an unknown option", ("--max-step", "3"), OK, 2, "No such option"),
    ("no command", (), (), 2, "COMMAND"),
    ("both resumes", ("--resume-rollout", "1", "--no-resume"), OK, 2, "expected one of them"),
    ("nothing to resume", ("--resume-rollout", "4"), OK, 2, "has no attempt in"),
    ("an empty lake", ("--lake", ""), OK, 2, "is a variable of the shell not set?"),
    ("a lake that is a file", ("--lake", "notes"), OK, 3, "notes: cannot make this folder"),
    ("traces unasked", ("--traces", "here"), OK, 2, "traces given, and the policy makes no check"),
    ("an output without folder", ("-o", "gone/out.csv"), OK, 2, "the folder 'gone' does not exist"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the verdict of an earlier run, a file, a folder and policies."""
    monkeypatch.chdir(tmp_path)
    Path("verdict.json").write_text(json.dumps(PASSED))
    Path("notes").write_text("of no use")
    Path("here").mkdir()
    query = 'query = "select max(response_lenght) from steps"'
    Path("column.toml").write_text(f'[[sql]]\nname = "x"\n{query}\nat_most = 1\n')
    Path("steps.toml").write_text("[checks.complete]\n")
    return tmp_path


def certify(*more: str, command: tuple[str, ...] = OK) -> Outcome:
    base = ("certify", "--lake", "lake", "--policy", "replay-clean", "--run", "r")
    return run(*base, *more, "--", *command)


@pytest.mark.parametrize(
    ("options", "command", "code", "told"),
    [one[1:] for one in REFUSED],
    ids=[one[0] for one in REFUSED],
)
def test_what_is_refused_uses_up_no_attempt_and_leaves_no_pass(
    here: Path, options: tuple[str, ...], command: tuple[str, ...], code: int, told: str
) -> None:
    outcome = certify(*options, command=command)
    assert (outcome.code, outcome.out) == (code, "")
    assert told in outcome.err
    assert not Path("ran").exists()
    verdict = json.loads(Path("verdict.json").read_text())
    assert (verdict["verdict"], verdict["certifies"]) == ("fail", False)
    assert verdict["reason"].startswith("nothing is judged: ")
    assert not (here / "lake").exists() or Lake.open("lake").attempts().num_rows == 0


@pytest.mark.parametrize(
    ("place", "code", "told"),
    [
        ("gone/verdict.json", 2, "the folder 'gone' does not exist"),
        ("here", 2, "'here' is a directory"),
        ("link.json", 2, "is a link, folder or device"),
        ("x" * 300, 3, "x: File name too long"),
        ("lake/verdict.json", 2, "the folder 'lake' does not exist"),
    ],
)
def test_a_verdict_that_cannot_be_written_is_told_before_there_is_a_lake(
    here: Path, place: str, code: int, told: str
) -> None:
    (here / "link.json").symlink_to("notes")
    outcome = certify("--verdict", place)
    assert (outcome.code, outcome.out) == (code, "")
    assert told in outcome.err
    assert not (here / "lake").exists()
    assert not Path("ran").exists()


def test_a_verdict_inside_the_lake_uses_up_no_attempt(here: Path) -> None:
    (here / "lake").mkdir()
    outcome = certify("--verdict", "lake/verdict.json")
    assert outcome.code == 2
    assert "is inside a lake" in outcome.err
    assert Lake.open("lake").attempts().num_rows == 0


def test_a_second_attempt_says_what_it_begins_with(here: Path) -> None:
    store = open_lake(Lake.create("lake").path)
    reserve_next_attempt(store, "r")
    outcome = certify()
    assert outcome.code == 2
    assert "--resume-rollout R  where the trainer loads what attempt 0 saved" in outcome.err
    assert "--no-resume         where it starts anew" in outcome.err
    assert Lake.open("lake").attempts()["attempt"].to_pylist() == [0]


def test_a_command_line_that_is_wrong_replaces_nothing_but_a_verdict(here: Path) -> None:
    for text in ("", "[]", '{"verdict": "pass"}', "not json", "[" * 100_000):
        Path("mine.json").write_text(text)
        assert certify("--kind", "dirct", "--verdict", "mine.json").code == 2
        assert Path("mine.json").read_text() == text
    assert json.loads(Path("verdict.json").read_text()) == PASSED, "another was named"


@pytest.mark.parametrize(
    "wrong",
    [
        ("--attempt", "x"),
        ("--attempt", "7"),
        ("--attempt", "0", "--run", "other"),
        ("--attempt", "0", "--max-steps", "0"),
    ],
)
def test_a_gate_that_is_refused_leaves_no_older_pass(here: Path, wrong: tuple[str, ...]) -> None:
    store = open_lake(Lake.create("lake").path)
    reserve_next_attempt(store, "r")
    gate = ("gate", "replay-clean", "--lake", "lake", "--verdict", "verdict.json")
    assert run(*gate, *wrong).code == 2
    told = json.loads(Path("verdict.json").read_text())
    assert (told["verdict"], told["certifies"]) == ("fail", False)


@pytest.mark.parametrize("folder", ["here", "gone"])
def test_a_folder_of_traces_that_is_not_there_yet_is_told(here: Path, folder: str) -> None:
    stated = ("--policy", "router-replay", "--traces", folder, "--contract", "legacy-async")
    outcome = certify(*stated)
    assert Path("ran").exists()
    assert ("gone is not there yet" in outcome.err) == (folder == "gone")


def test_traces_that_end_before_the_run_begins_are_told() -> None:
    from trajreplay.schema import QueryError

    policy = load_gate_policy("router-replay").with_parameters(
        "routes", traces="t", contract="legacy-async"
    )
    check_meetable(policy, "p")
    with pytest.raises(QueryError, match="every trace that is to come is later"):
        check_meetable(policy.with_parameters("routes", until=1.5), "p")
    check_meetable(Policy(checks={"mismatch_baseline": {}}, max_steps=4), "p")
    check_meetable(Policy(checks={"mismatch_baseline": {}}), "p")
