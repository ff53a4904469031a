"""Documents as tests see them: their code blocks, run in order, and what those printed."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+?) -->\s*\Z")
# What may not be run by a test: it trains, builds an environment, or runs the tests.
STARTS_WORK = re.compile(r"^\$ (make|pip|python -m pip|trajreplay demo|git clone)\b", re.MULTILINE)
# A document with this remark finds the lake of the README's first example in its folder.
_NEEDS_LAKE = "<!-- its blocks read the lake of the README's first example -->"
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_DURATION = re.compile(r"\b\d+(\.\d+)? ?(ms|s)\b")


@dataclass(frozen=True)
class Block:
    """One fenced block of a document.

    Args:
        language: Word after the fence.
        body: Text inside.
        line: Line of the fence.
        start, stop: Where the body stands in the document.
        not_run: Why it is not run; empty where it is.
    """

    language: str
    body: str
    line: int
    start: int
    stop: int
    not_run: str


def documents() -> list[Path]:
    """The README, that of each folder, and that of the importers."""
    importers = ROOT / "capture" / "importers" / "README.md"
    return sorted([ROOT / "README.md", *ROOT.glob("[a-z]*/README.md"), importers])


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a document in order."""
    for found in _FENCE.finditer(text):
        marked = NOT_RUN.search(text, 0, found.start())
        yield Block(
            found["language"],
            found["body"],
            text.count("\n", 0, found.start()) + 1,
            found.start("body"),
            found.end("body"),
            marked["reason"] if marked else "",
        )


def commands(block: Block) -> list[tuple[str, str]]:
    """Each command of a console block, continued lines joined, and the output below it."""
    parts = re.split(r"^\$ ", block.body, flags=re.MULTILINE)
    assert not parts[0].strip(), f"line {block.line}: output before the first command"
    found = []
    for part in parts[1:]:
        command, _, output = re.sub(r"\\\n> ", "\\\n", part).partition("\n")
        while command.endswith("\\"):
            more, _, output = output.partition("\n")
            command += f"\n{more}"
        found.append((command, output))
    return found


class Session:
    """Runs the blocks of one document in one folder, one after the other."""

    def __init__(self, folder: Path, text: str) -> None:
        self._folder = folder
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._code = 0
        if _NEEDS_LAKE in text:
            readme = (ROOT / "README.md").read_text(encoding="utf-8")
            self.python(next(one.body for one in blocks(readme) if one.language == "python"))
            self._names = {"__name__": "__main__"}

    def shell(self, command: str) -> str:
        """Run one command and return all that it printed."""
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "COLUMNS": "80",
        }
        environment.pop("TRAJREPLAY_LAKE", None)
        done = subprocess.run(
            ["bash", "-c", f"(exit {self._code}); {command}"],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        self._code = done.returncode
        return done.stdout.replace(str(self._folder), "...")

    def python(self, body: str) -> str:
        """Run Python with the names of the earlier blocks; return what failed of its examples."""
        before = Path.cwd()
        os.chdir(self._folder)
        try:
            if ">>>" not in body:
                exec(compile(body, "<block>", "exec"), self._names)  # noqa: S102 - our own text
                return ""
            failures: list[str] = []
            test = doctest.DocTestParser().get_doctest(body, self._names, "block", None, 0)
            doctest.DocTestRunner(verbose=False).run(test, out=failures.append, clear_globs=False)
            self._names.update(test.globs)
            return "".join(failures)
        finally:
            os.chdir(before)


def comparable(output: str) -> str:
    """Output without what differs from run to run: durations, and spaces at the end of lines."""
    return "\n".join(line.rstrip() for line in _DURATION.sub("N s", output).strip().splitlines())


def rewritten(text: str, folder: Path) -> str:
    """A document with the outputs of its console blocks made anew in `folder`."""
    session = Session(folder, text)
    parts, at = [], 0
    for block in blocks(text):
        if block.not_run:
            continue
        if block.language == "python":
            session.python(block.body)
        if block.language != "console":
            continue
        parts.append(text[at : block.start])
        for command, _ in commands(block):
            output = session.shell(command).rstrip("\n")
            parts.append(f"$ {command}\n" + (f"{output}\n" if output else ""))
        at = block.stop
    return "".join([*parts, text[at:]])


if __name__ == "__main__":
    import tempfile

    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as work:
            document = Path(name)
            document.write_text(rewritten(document.read_text(encoding="utf-8"), Path(work)))
