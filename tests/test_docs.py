"""The documents: blocks run, generated parts are fresh, and nothing public is missing."""

import importlib
import re
from pathlib import Path

import click
import pytest

import trajreplay
from tests.helpers.documents import (
    ROOT,
    STARTS_WORK,
    Session,
    blocks,
    commands,
    comparable,
    documents,
)
from trajreplay.cli.docs import GENERATORS, regenerated
from trajreplay.cli.docs_verbs import verb
from trajreplay.cli.main import VERBS, main
from trajreplay.cli.verbs.schema import tables
from trajreplay.schema import STAGES

FOLDERS = ("schema", "writer", "query", "stages", "capture", "cli")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", documents(), ids=named)
def test_every_block_runs_and_prints_what_the_document_says(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    session = Session(tmp_path, text)
    wrong = []
    for block in blocks(text):
        if block.not_run or block.language not in ("python", "console"):
            continue
        if block.language == "python":
            wrong.append(session.python(block.body))
            continue
        for command, output in commands(block):
            found = comparable(session.shell(command))
            if found != comparable(output):
                wrong.append(f"line {block.line}: $ {command}\n{found}")
    assert not [one for one in wrong if one], "\n".join(wrong)


@pytest.mark.parametrize("path", documents(), ids=named)
def test_only_what_trains_installs_or_tests_is_not_run(path: Path) -> None:
    skipped = [one for one in blocks(path.read_text(encoding="utf-8")) if one.not_run]
    assert [one.line for one in skipped if not STARTS_WORK.search(one.body)] == []


@pytest.mark.parametrize(
    ("command", "shape"),
    [
        (
            "make demo",
            r"Trained a policy .*Injected: physical-batch: .*Found: exactly that\. .*Next:",
        ),
        ("make test", r"\n=+ \d+ passed.* in [\d.]+s"),
    ],
)
def test_what_is_not_run_was_recorded_from_a_real_run(command: str, shape: str) -> None:
    (body,) = (one.body for one in blocks(read("README.md")) if one.body.startswith(f"$ {command}"))
    assert re.search(shape, body, re.DOTALL)


@pytest.mark.parametrize("path", documents(), ids=named)
def test_every_block_says_what_it_is(path: Path) -> None:
    known = ("python", "console", "text", "sql", "json")
    odd = [
        one.line for one in blocks(path.read_text(encoding="utf-8")) if one.language not in known
    ]
    assert odd == []


@pytest.mark.parametrize("path", documents(), ids=named)
def test_generated_parts_are_fresh(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert regenerated(text) == text, "python -m trajreplay.cli.docs --write"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_says_what_it_is_for_how_to_reference_and_why(folder: str) -> None:
    headings = [line for line in read(f"{folder}/README.md").splitlines() if line.startswith("## ")]
    assert headings == ["## What it is for", "## How to", "## Reference", "## Why"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_public_name_of_a_folder_is_missing(folder: str) -> None:
    text = read(f"{folder}/README.md")
    public = getattr(importlib.import_module(f"trajreplay.{folder}"), "__all__", [])
    assert [name for name in public if f"`{name}`" not in text] == []


def test_no_name_of_the_package_is_missing() -> None:
    text = read("README.md")
    assert [name for name in trajreplay.__all__ if f"`{name}`" not in text] == []
    methods = [name for name in vars(trajreplay.Lake) if not name.startswith("_")]
    assert [name for name in methods if name != "path" and f"`Lake.{name}`" not in text] == []


def test_no_verb_or_option_is_missing() -> None:
    reference, first = read("cli/README.md"), read("README.md")
    missing = []
    for name in VERBS:
        section = reference.partition(f"### `trajreplay {name} ")[2].partition("\n### ")[0]
        missing += [name] * (f"| `{name}` |" not in first or not section)
        missing += [
            f"{name} {flag}"
            for one in verb(name).params
            if isinstance(one, click.Option)
            for flag in one.opts
            if flag not in section
        ]
    assert missing == []


def test_no_table_column_or_stage_is_missing() -> None:
    text = read("README.md")
    missing = [name for name in tables() if f"### `{name}`" not in text]
    missing += [
        f"{table.name}.{column.name}"
        for table in tables().values()
        for column in table.columns
        if f"| `{column.name}` |" not in text
    ]
    missing += [stage.name for stage in STAGES if f"| `{stage.name}` |" not in text]
    assert missing == []


def test_the_line_of_a_verb_in_help_is_its_own_first_sentence() -> None:
    wrong = {
        name: line
        for name, (_, line) in VERBS.items()
        if line != (verb(name).help or "").partition("\n\n")[0].replace("\n", " ")
    }
    assert wrong == {}
    assert list(VERBS) == main.list_commands(click.Context(main))


def test_every_generator_is_used_somewhere() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in documents())
    assert [name for name in GENERATORS if f"<!-- generated: {name}" not in texts] == []


def test_every_link_to_a_file_leads_somewhere() -> None:
    dead = [
        f"{named(path)}: {target}"
        for path in documents()
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert dead == []
