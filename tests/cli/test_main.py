"""How a run of the command line begins and ends, whatever the verb."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import program, run
from tests.helpers.small_lakes import healthy_lake
from trajreplay import __version__
from trajreplay.cli import main as main_module
from trajreplay.cli.main import VERBS, main
from trajreplay.cli.options.shared import LAKE_FILE, find_lake
from trajreplay.cli.options.verb import Verb
from trajreplay.schema import layout


def test_help_lists_the_verbs_and_the_exit_codes() -> None:
    outcome = run("--help")
    assert outcome.code == 0
    assert outcome.err == ""
    assert all(f"  {name} " in outcome.out for name in VERBS)
    assert "Exit codes:\n  0    Done, and nothing differs.\n" in outcome.out


def test_help_loads_no_library_that_the_lake_needs() -> None:
    listing = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules))))\n"
        "from trajreplay.cli.main import main\n"
        "main(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", listing], capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not loaded & {"torch", "duckdb", "polars", "pyarrow", "numpy", "rich"}


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").out == f"trajreplay {__version__}\n"


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_the_form_of_the_house(name: str) -> None:
    command = main.get_command(
        main.make_context("trajreplay", ["--help"], resilient_parsing=True), name
    )
    assert isinstance(command, Verb)
    assert command.name == name
    assert command.example.startswith(f"trajreplay {name}")
    assert all(one.help for one in command.params)
    outcome = run(name, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"Example:\n  {command.example}\n" in outcome.out


def test_an_unknown_verb_is_a_usage_error() -> None:
    outcome = run("explode")
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.endswith("Error: no verb 'explode'\n")


def test_not_a_lake_is_refused_with_what_to_do(tmp_path: Path) -> None:
    outcome = run("info", "--lake", tmp_path)
    assert outcome.code == 3
    assert outcome.out == ""
    assert outcome.err == (
        f"Error: {tmp_path} is not a lake: nothing named lake.json there\n"
        "\n"
        f"To make it one: trajreplay init {tmp_path}\n"
    )


def test_an_error_message_cannot_steer_the_terminal(tmp_path: Path) -> None:
    outcome = run("info", "--lake", tmp_path / "\x1b[31m[bold]x")
    assert outcome.code == 3
    assert "\\x1b[31m[bold]x" in outcome.err
    assert "\x1b" not in outcome.err


def test_the_lake_may_stand_before_or_after_the_verb_or_in_the_environment(tmp_path: Path) -> None:
    lake, other = tmp_path / "lake", tmp_path / "other"
    assert run("init", lake).code == 0
    told = run("info", "--lake", lake)
    assert told.code == 0
    assert run("--lake", lake, "info") == told
    assert run("info", TRAJREPLAY_LAKE=str(lake)) == told
    assert run("--lake", other, "info", "--lake", lake, TRAJREPLAY_LAKE=str(other)) == told
    assert run("--lake", lake, "info", TRAJREPLAY_LAKE=str(other)) == told


def test_the_nearest_lake_upward_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "lake" / "deep" / "inside"
    run("init", tmp_path / "lake")
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert find_lake(None) == str(tmp_path / "lake")
    monkeypatch.chdir(tmp_path)
    assert find_lake(None) == "lake"
    assert find_lake("s3://bucket/prefix") == "s3://bucket/prefix"
    assert LAKE_FILE == layout.LAKE_FILE


VERBS_OF_A_LAKE = [
    ("info",),
    ("inspect", "--rollout", "0"),
    ("validate",),
    ("replay",),
    ("sql", "select count(*) from rollouts"),
]


@pytest.mark.parametrize("args", VERBS_OF_A_LAKE)
def test_a_path_that_is_no_text_is_a_lake_like_any_other(
    args: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "lake-\udcff"
    outcome = run(args[0], "--lake", path, *args[1:])
    assert (outcome.code, outcome.out) == (3, "")
    assert "lake-\\udcff is not a lake: no folder" in outcome.err
    healthy_lake(path)
    target = tmp_path / "out-\udcff"
    outcome = run(args[0], "--lake", path, *args[1:], "-o", target)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    assert target.stat().st_size > 0


@pytest.mark.parametrize("args", VERBS_OF_A_LAKE)
def test_where_a_lake_was_looked_for_is_said(
    args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lake").mkdir()
    monkeypatch.chdir(tmp_path)
    outcome = run(*args)
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err == (
        f"Error: no lake found: looked for lake.json in {tmp_path} and the folders above it, and "
        "in ./lake\n"
        "\n"
        "Name one with --lake PATH or TRAJREPLAY_LAKE, or make one: trajreplay init\n"
    )


def test_a_wrong_option_is_said_before_a_lake_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is no step" in run("replay", "--step", "1").err


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def find(_: str | None) -> Path:
        raise error

    monkeypatch.setattr("trajreplay.cli.options.shared.find_lake", find)


def test_an_unexpected_error_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyError("reward\x1b"))
    outcome = run("info")
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err == (
        "Error: unexpected KeyError: 'reward\\x1b'\n"
        "\n"
        "This is a mistake in trajreplay, not in your data: please report the command and what it\n"
        "printed with -v, which adds where the error came from.\n"
    )
    detailed = run("info", "-v")
    assert detailed.code == 3
    assert detailed.err.startswith("Traceback (most recent call last):\n")
    assert detailed.err.endswith(outcome.err)


FULL = """\
Error: input or output: No space left on device

Make room there, or write to another place.
"""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            PermissionError(13, "Permission denied", "/lake/x"),
            "Error: /lake/x: Permission denied\n",
        ),
        (
            OSError(28, "No space left on device"),
            FULL,
        ),
    ],
)
def test_a_failing_machine_is_no_mistake_of_the_program(
    error: OSError, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, error)
    outcome = run("info")
    assert (outcome.code, outcome.out, outcome.err) == (3, "", message)


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    outcome = run("info")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "\nInterrupted.\n")


def test_an_interrupt_while_a_library_is_loaded_ends_with_130(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = ImportError("Encountered an error while initializing the extension.")
    error.__cause__ = KeyboardInterrupt()
    fail_with(monkeypatch, error)
    outcome = run("info")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "Interrupted.\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "trajreplay", "schema"], stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_program_is_the_package() -> None:
    assert program("--version") == run("--version")
    assert main_module.main is main


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("replya", "; did you mean replay?"),
        ("pre-flight", "; did you mean preflight?"),
        ("val", "; did you mean validate?"),
        ("REPLAY", "; did you mean replay?"),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_a_misspelt_verb_is_answered_with_the_nearest(word: str, told: str) -> None:
    outcome = run(word)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.endswith(f"Error: no verb {word!r}{told}\n")
