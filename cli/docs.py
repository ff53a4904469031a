"""The generated parts of the documents, made anew where they stand."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import click

from trajreplay.cli import docs_data as data
from trajreplay.cli import docs_verbs as verbs
from trajreplay.cli.docs_verbs import table

_BLOCK = re.compile(
    r"(?P<open><!-- generated: (?P<name>[a-z]+)(?: (?P<of>[\w.]+))? -->\n)"
    r".*?"
    r"(?P<close><!-- end of generated -->\n)",
    re.DOTALL,
)
_LONGEST_VALUE = 100


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


GENERATORS: dict[str, Callable[..., str]] = {
    "verbs": verbs.verbs,
    "options": verbs.options,
    "exits": verbs.exits,
    "columns": data.columns,
    "stages": data.stages,
    "settings": data.settings,
    "profiles": data.profiles,
    "faults": data.faults,
    "metrics": data.metrics,
    "routes": data.routes,
    "gates": data.gates,
    "statistics": data.statistics,
    "kinds": data.kinds,
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
