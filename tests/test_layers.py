"""Who may import what: the table of the import order, held against the imports of every module."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("schema", "writer", "query", "stages", "capture", "cli")


@dataclass(frozen=True)
class Rule:
    """What a part may import, of the project and from outside, at the top and lazily.

    `*` is anything. Lazy is what no start pays for: in a function, or under `if TYPE_CHECKING:`.
    """

    parts: str
    packages: str
    lazy_parts: str = ""
    lazy_packages: str = ""

    def allows(self, imported: "Import") -> bool:
        """Say whether one import keeps to the rule; a part may always import itself."""
        top, lazy = self.parts, self.lazy_parts
        name = imported.part
        if name is None:
            top, lazy = self.packages, self.lazy_packages
            name = imported.module.partition(".")[0]
            if name in sys.stdlib_module_names:
                return True
        words = {*top.split(), *(lazy.split() if imported.lazy else ())}
        return "*" in words or name in words


# The nearest enclosing part rules: stages/kernels/kl.py is of stages/kernels, not of stages.
RULES = {
    "schema": Rule("", "pyarrow numpy blake3 obstore"),
    "schema/bundles": Rule("schema", "pyarrow numpy blake3 obstore", "", "torch"),
    "writer": Rule("schema", "pyarrow numpy", "", "torch"),
    "query": Rule(
        "schema schema/bundles query/experts query/mismatch query/differences",
        "duckdb pyarrow polars",
    ),
    # Expert choices, sixty times as many as log-probs, are compared in arrays without a copy.
    "query/experts": Rule("schema query query/mismatch", "duckdb pyarrow numpy"),
    # So are routes of two runs, and log-probs, which DuckDB unnests one by one.
    "query/differences": Rule("schema query query/experts", "duckdb pyarrow numpy"),
    "query/mismatch": Rule("schema query", "duckdb pyarrow numpy"),
    # Configurations of trainers are read without a lake.
    "query/preflight": Rule("schema", "pyarrow yaml"),
    "stages/kernels": Rule("schema", "torch"),
    # numpy is the way of a buffer from Arrow to torch without a copy.
    "stages": Rule(
        "schema query query/experts query/mismatch stages/kernels", "torch pyarrow numpy"
    ),
    "capture": Rule("schema schema/bundles writer", "torch pyarrow numpy msgpack", "", "*"),
    "cli": Rule("schema writer query stages capture lake __init__", "click rich", "*", "*"),
    # A training, loaded by the command that runs it: it may hold torch at the top.
    "cli/demo": Rule("schema writer capture lake __init__ cli", "click rich torch", "*", "*"),
    "lake": Rule("", "", "*", "*"),
    "testing": Rule("", "hypothesis", "*", "*"),
    "__init__": Rule("", "", "schema lake"),
    "__main__": Rule("cli", ""),
}


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name, its part if it is ours, and where it stands."""

    module: str
    part: str | None
    line: int
    lazy: bool


def package_modules() -> list[Path]:
    """List every module of the package, by the path of the file itself rather than of its link."""
    modules = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    own = ROOT / "src" / "trajreplay"
    return sorted([*modules, *own.glob("*.py"), *own.glob("lake/*.py")])


def part_of(path: Path) -> str:
    """Name the part that a module belongs to, the nearest enclosing one."""
    where = path.relative_to(ROOT).with_suffix("")
    if where.parts[0] == "src":
        where = where.relative_to("src/trajreplay")
    while where.as_posix() not in RULES:
        assert where != where.parent, f"{path} belongs to no part of the table"
        where = where.parent
    return where.as_posix()


def find_module(dotted: str) -> Path | None:
    """Find the file of a module of the package, or None if there is no such module."""
    inner = dotted.split(".")[1:]
    base = ROOT.joinpath(*inner) if inner and inner[0] in FOLDERS else None
    base = base or ROOT.joinpath("src", "trajreplay", *inner)
    found = [path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()]
    return found[0] if found else None


def imports_of(path: Path) -> Iterator[Import]:
    """Yield the imports of a module, each resolved to the module that it really loads."""
    stack: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), False)]
    while stack:
        node, lazy = stack.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in imported_modules(node):
                file = find_module(module) if module.partition(".")[0] == "trajreplay" else None
                yield Import(module, part_of(file) if file else None, node.lineno, lazy)
        waits = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        children = ast.iter_child_nodes(node)
        stack += [(child, lazy or waits or typing_only) for child in children]


def imported_modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """List the modules that one statement names: `from trajreplay import schema` is one too."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = "." * node.level + (node.module or "")
    if base.partition(".")[0] != "trajreplay":
        return [base]
    inner = [f"{base}.{alias.name}" for alias in node.names]
    return [name if find_module(name) else base for name in inner]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", package_modules(), ids=named)
def test_a_module_imports_only_what_its_part_may(path: Path) -> None:
    part = part_of(path)
    broken = [
        f"{named(path)}:{one.line}: {part} may not import {one.module}"
        + ("" if one.lazy else " when it is loaded")
        for one in imports_of(path)
        if one.part != part and not RULES[part].allows(one)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("path", package_modules(), ids=named)
def test_every_module_says_in_its_first_line_what_is_in_it(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False)
    assert docstring, named(path)
    assert docstring.partition("\n")[0].strip(), f"{named(path)}: the first line is empty"


def test_the_demo_is_loaded_only_by_the_command_that_runs_it() -> None:
    eager = [
        f"{named(path)}:{one.line}"
        for path in package_modules()
        for one in imports_of(path)
        if one.part == "cli/demo" and part_of(path) != "cli/demo" and not one.lazy
    ]
    assert not eager


@pytest.mark.parametrize(
    ("part", "source", "allowed"),
    [
        ("writer", "import torch", False),
        ("writer", "def f():\n    import torch", True),
        ("writer", "from trajreplay.query import Catalog", False),
        ("writer", "def f():\n    from trajreplay.query import Catalog", False),
        ("stages/kernels", "from trajreplay.schema import StageError", True),
        ("stages/kernels", "import pyarrow", False),
        ("capture", "from trajreplay import stages", False),
        ("lake", "from trajreplay.schema import Settings", False),
        ("lake", "def f():\n    from trajreplay.writer import Capture", True),
        ("schema", "from .errors import SchemaError", False),
        ("schema", "import schema", False),
        ("cli", "if TYPE_CHECKING:\n    import torch", True),
    ],
)
def test_the_table_means_what_it_says(
    part: str, source: str, allowed: bool, tmp_path: Path
) -> None:
    module = tmp_path / "module.py"
    module.write_text(source, encoding="utf-8")
    imports = list(imports_of(module))
    assert imports
    assert all(RULES[part].allows(one) for one in imports) is allowed
