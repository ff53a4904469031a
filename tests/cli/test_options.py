"""Options that several verbs share."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests.helpers.cli import run
from trajreplay.cli.docs_verbs import verb
from trajreplay.cli.main import VERBS
from trajreplay.cli.options.shared import output_options
from trajreplay.cli.options.types import Size, StageName, StepIdentity
from trajreplay.cli.terminal.output import Output
from trajreplay.schema import STAGES


@click.command()
@output_options
def show(output: Output) -> None:
    """Say what the options came to."""
    click.echo(f"{output.format} {output.path} {output.quiet} {output.verbose}")


def shown(*args: str) -> str:
    return CliRunner().invoke(show, list(args)).output


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), "table None False False"),
        (("--format", "csv"), "csv None False False"),
        (("-o", "x.parquet"), "parquet x.parquet False False"),
        (("-o", "x.JSON", "-q"), "json x.JSON True False"),
        (("-o", "x.txt", "-v"), "table x.txt False True"),
        (("-o", "x.json", "--format", "ndjson"), "ndjson x.json False False"),
    ],
)
def test_the_format_is_named_or_follows_the_file(args: tuple[str, ...], expected: str) -> None:
    assert shown(*args) == f"{expected}\n"


def test_a_file_in_a_folder_that_is_not_there_is_refused_before_any_work(tmp_path: Path) -> None:
    result = CliRunner().invoke(show, ["-o", str(tmp_path / "no" / "x.csv")])
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def convert(kind: click.ParamType[Any], text: str) -> Any:
    return kind.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000000", 1_000_000),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("2G", 2 << 30),
        ("2GB", 2_000_000_000),
        ("1.5 KiB", 1536),
        ("7B", 7),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert convert(Size(), text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "2XB", "GiB", "1e9", "nan", "٢GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected a number such as 2GiB"):
        convert(Size(), text)


@pytest.mark.parametrize("text", ["99999999999999T", "2000TiB", "9" * 400, "9" * 5000])
def test_what_no_machine_has_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is too large, expected at most 1024TiB"):
        convert(Size(), text)


def test_a_step_is_a_rollout_and_a_number() -> None:
    assert convert(StepIdentity(), "120:0") == (120, 0)
    assert StepIdentity().convert((1, 2), None, None) == (1, 2)


@pytest.mark.parametrize(
    "text",
    ["120", "120:", ":0", "-1:0", "1:2:3", "a:b", "\u0661:\u0662", "1:0\n", "9" * 5000 + ":0"],
)
def test_what_is_no_step_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected ROLLOUT:STEP such as 120:0"):
        convert(StepIdentity(), text)


def test_an_unknown_stage_is_answered_with_those_there_are() -> None:
    assert convert(StageName(), "loss.policy") == "loss.policy"
    with pytest.raises(click.BadParameter, match="unknown stage 'loss'") as caught:
        convert(StageName(), "loss")
    assert all(stage.name in caught.value.message for stage in STAGES)


_NAMED_PLACES = ("PATH", "[PATH]", "FOLDER", "FILE", "POLICY")
PLACES = [
    (name, one)
    for name in VERBS
    for one in verb(name).params
    if one.metavar in _NAMED_PLACES or isinstance(one.type, click.Path)
]


def _flag(one: click.Parameter) -> str:
    return max(one.opts, key=len)


@pytest.mark.parametrize(
    ("name", "one"), PLACES, ids=[f"{name} {_flag(one)}" for name, one in PLACES]
)
def test_no_verb_takes_an_empty_text_for_a_place(name: str, one: click.Parameter) -> None:
    context = click.Context(verb(name), info_name=name)
    with pytest.raises(click.BadParameter, match=r"is empty|No such file"):
        one.type.convert("", one, context)


def test_an_empty_lake_is_not_taken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("init", "lake")
    for words in (("info", "--lake="), ("--lake=", "info"), ("init", "")):
        outcome = run(*words)
        assert (outcome.code, outcome.out) == (2, "")
        assert "is empty; is a variable of the shell not set?" in outcome.err
    assert run("info", TRAJREPLAY_LAKE="").code == 0, "an empty variable is as none"
