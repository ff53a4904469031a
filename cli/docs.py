"""The generated parts of the documents: verbs, options, columns, stages, public names."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import click

from trajreplay.cli.capability import matrix_rows
from trajreplay.cli.main import VERBS, main
from trajreplay.cli.profiles import profile_rows
from trajreplay.cli.schema import column_rows, stage_rows, tables
from trajreplay.cli.verb import EXIT_CODES, Verb

_BLOCK = re.compile(
    r"(?P<open><!-- generated: (?P<name>[a-z]+)(?: (?P<of>[\w.]+))? -->\n)"
    r".*?"
    r"(?P<close><!-- end of generated -->\n)",
    re.DOTALL,
)
_LINK = re.compile(r"https?://\S+|arXiv:(\d{4}\.\d{5})")


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table."""
    lines = [names, ["---"] * len(names), *rows]
    return "".join(
        f"| {' | '.join(one.replace('|', chr(92) + '|') for one in line)} |\n" for line in lines
    )


def verb(name: str) -> Verb:
    """One verb of the command line."""
    command = main.get_command(click.Context(main), name)
    assert isinstance(command, Verb), f"{name} is no Verb"
    return command


def verbs() -> str:
    """Each verb with its sentence and an example."""
    return table(
        ("verb", "does", "for example"),
        [(f"`{name}`", line, f"`{verb(name).example}`") for name, (_, line) in VERBS.items()],
    )


def options() -> str:
    """Each verb in full: what it does, its options, its exit codes."""
    return "\n".join(_options_of(name) for name in VERBS)


def _options_of(name: str) -> str:
    command = verb(name)
    parent = click.Context(main, info_name=main.name)
    context = click.Context(command, parent, name, **command.context_settings)
    records = [one.get_help_record(context) for one in command.get_params(context)]
    rows = [(f"`{record[0]}`", record[1]) for record in records if record]
    codes = [(f"`{code}`", text) for code, text in command.exit_codes.items() if text]
    return (
        f"### `{' '.join(command.get_usage(context).removeprefix('Usage: ').split())}`\n\n"
        f"{inspect.cleandoc(command.help or '')}\n\n"
        f"{table(('option', ''), rows)}\n"
        f"{table(('exit', ''), codes)}\n"
        f"```text\n{command.example}\n```\n"
    )


def exits() -> str:
    """The exit codes that all verbs share."""
    return table(("exit", "means"), [(f"`{code}`", text) for code, text in EXIT_CODES.items()])


def columns() -> str:
    """The columns of each table; a table that extends an earlier one lists what it adds."""
    parts: list[str] = []
    described: dict[str, set[tuple[str, ...]]] = {}
    for name, one in tables().items():
        rows = [
            (
                f"`{row['column']}`",
                row["type"] + ("" if not row["nullable"] else ", may be null"),
                row["unit"],
                row["doc"],
            )
            for row in column_rows(name)
        ]
        base = next((old for old, seen in described.items() if len(seen & set(rows)) > 20), None)
        shown = [row for row in rows if base is None or row not in described[base]]
        described[name] = set(rows)
        extends = f" It has the columns of `{base}` and these:" if base else ""
        key = ", ".join(f"`{column}`" for column in one.key)
        parts.append(
            f"### `{name}`\n\n{one.doc} Key: {key}.{extends}\n\n"
            + table(("column", "type", "unit", "what it is"), shown)
        )
    return "\n".join(parts)


def stages() -> str:
    """The stages with their equations and sources."""
    return table(
        ("stage", "reads", "writes", "equation", "source"),
        [
            (
                f"`{row['stage']}`",
                row["inputs"],
                row["outputs"],
                f"`{row['equation']}`",
                _LINK.sub(_linked, row["source"]),
            )
            for row in stage_rows()
        ],
    )


def settings() -> str:
    """The capability matrix: every setting of each stage, and what comes of its values."""
    rows = [
        (f"`{row['stage']}`", f"`{row['setting']}`", row["recomputed"], row["otherwise"])
        for row in matrix_rows()
    ]
    return table(("stage", "setting", "recomputed", "otherwise"), rows)


def profiles() -> str:
    """The profiles of the frameworks."""
    return table(
        ("profile", "is peculiar in"),
        [(f"`{row['profile']}`", row["doc"]) for row in profile_rows()],
    )


def faults() -> str:
    """The catalogue of known mistakes, with what each makes of a stage."""
    from trajreplay.stages.faults import FAULTS

    return table(
        ("fault", "known as", "recorded values equal", "look at", "reports"),
        [
            (
                f"`{one.id}`",
                one.name,
                one.says("..."),
                one.look,
                ", ".join(_reports(one.references)),
            )
            for one in FAULTS
        ],
    )


def metrics() -> str:
    """The metrics that are recomputed where a training logs them."""
    from trajreplay.stages.contract_checks.definitions import METRICS

    return table(
        ("metric", "is", "reads"),
        [
            (f"`{name}`", one.doc, ", ".join(f"`{need}`" for need in one.needs))
            for name, one in METRICS.items()
        ],
    )


def _reports(references: Sequence[str]) -> Iterator[str]:
    """Links to what a fault refers to, each once."""
    from trajreplay.stages.faults import REPORTS

    links = (REPORTS[one].url if one in REPORTS else one for one in references)
    for link in dict.fromkeys(links):
        owner, name, *_, number = link.removeprefix("https://github.com/").split("/")
        known = link.startswith("https://github.com/")
        yield f"[{owner}/{name}#{number[:8]}]({link})" if known else link


def routes() -> str:
    """The rules of router-replay traces."""
    from trajreplay.query.routes import RULES

    return table(
        ("rule", "demands", "under"),
        [
            (
                f"`{rule.name}`",
                rule.demand + (" As far as previews go." if rule.by_previews else ""),
                "both" if len(rule.contracts) > 1 else rule.contracts[0],
            )
            for rule in RULES
        ],
    )


def gates() -> str:
    """The checks of a gate."""
    from trajreplay.stages.gate import CHECKS

    return table(
        ("check", "demands", "of the", "takes"),
        [
            (
                f"`{check.name}`",
                check.demand,
                check.phase,
                ", ".join(f"`{one.name}`" for one in check.parameters),
            )
            for check in CHECKS
        ],
    )


def statistics() -> str:
    """The statistics of a mismatch."""
    from trajreplay.query.mismatch import statistic_rows

    rows = [
        (f"`{row['statistic']}`", f"`{row['formula']}`", row["level"], row["origin"])
        for row in statistic_rows()
    ]
    return table(("statistic", "is", "over", "named as"), rows)


def kinds() -> str:
    """The kinds of files that can be imported."""
    from trajreplay.capture.importers.registry import BUILT_IN, importer_of

    return table(
        ("kind", "reads"), [(f"`{name}`", importer_of(name).doc) for name in sorted(BUILT_IN)]
    )


def _linked(found: re.Match[str]) -> str:
    return f"[{found[0]}](https://arxiv.org/abs/{found[1]})" if found[1] else found[0]


def names(module_name: str) -> str:
    """The public names of a module and the first sentence of each."""
    module = importlib.import_module(module_name)
    return table(
        ("name", "is"),
        [(f"`{name}`", _first_sentence(getattr(module, name))) for name in sorted(module.__all__)],
    )


def methods(dotted: str) -> str:
    """The public methods of a class and the first sentence of each."""
    module_name, _, name = dotted.rpartition(".")
    owner = getattr(importlib.import_module(module_name), name)
    return table(
        ("method", "does"),
        [
            (f"`{name}.{key}`", _first_sentence(getattr(owner, key)))
            for kind in reversed(owner.__mro__[:-1])
            for key, value in vars(kind).items()
            if not key.startswith("_") and (callable(value) or isinstance(value, classmethod))
        ],
    )


def _first_sentence(value: object) -> str:
    if not callable(value):
        text: str = getattr(value, "doc", "") or f"The value {value!r}."
        return text if len(text) <= _LONGEST_VALUE else f"A constant {type(value).__name__}."
    paragraph = inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


_LONGEST_VALUE = 100
GENERATORS: dict[str, Callable[..., str]] = {
    "verbs": verbs,
    "options": options,
    "exits": exits,
    "columns": columns,
    "stages": stages,
    "settings": settings,
    "profiles": profiles,
    "faults": faults,
    "metrics": metrics,
    "routes": routes,
    "gates": gates,
    "statistics": statistics,
    "kinds": kinds,
    "methods": methods,
    "names": names,
}


def regenerated(text: str) -> str:
    """A document with its generated parts made anew."""

    def fill(found: re.Match[str]) -> str:
        generator = GENERATORS[found["name"]]
        body = generator(found["of"]) if found["of"] else generator()
        return f"{found['open']}\n{body}\n{found['close']}"

    return _BLOCK.sub(fill, text)


@click.command()
@click.argument(
    "root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    help="Folder of the repository. Default: the current one.",
)
@click.option("--write", is_flag=True, help="Write them. Default: only say which are stale.")
def docs(root: Path, write: bool) -> None:
    """Regenerate the README of ROOT and of each folder in it."""
    stale = []
    for path in sorted(
        [*root.glob("README.md"), *root.glob("*/README.md"), *root.glob("*/*/README.md")]
    ):
        text = path.read_text(encoding="utf-8")
        new = regenerated(text)
        if new != text:
            stale.append(path)
            if write:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        click.echo(f"{'written' if write else 'stale'}: {path}")
    click.get_current_context().exit(1 if stale and not write else 0)


if __name__ == "__main__":
    docs()
