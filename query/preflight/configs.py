"""Configurations as files have them: YAML, JSON or TOML, their parents, and dotted overrides."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trajreplay.query.preflight.evaluation import Undecided
from trajreplay.schema.errors import QueryError
from trajreplay.schema.toml_files import is_wide

_MOST_BYTES = 4 << 20
_MOST_NODES = 200_000
_MOST_PARENTS = 16
_WIDE = "an integer has more than 64 bits"
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
# YAML 1.1 takes 1e-6 for text; the frameworks' readers take it for a number, as people mean it.
_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*)(?:\.[\d_]*)?[eE][-+]?\d+\Z|[-+]?\.\d+(?:[eE][-+]?\d+)?\Z")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without a key twice; tags that would make objects are refused by the base."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        seen: set[str] = set()
        for key in keys:
            if repr(key) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} twice", node.start_mark
                )
            seen.add(repr(key))
        return dict(super().construct_mapping(node, deep=deep))

    def construct_yaml_int(self, node: Any) -> int:
        value: int = super().construct_yaml_int(node)
        if is_wide(value):
            raise yaml.constructor.ConstructorError(None, None, _WIDE, node.start_mark)
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a configuration and resolve what it refers to.

    Args:
        path: A YAML, JSON or TOML file. `defaults`, a file or list of files beside it, are read
            first, as NeMo-RL does; entries of other kinds, which Hydra composes, are left alone.
        overrides: `a.b=value` each, the value as in YAML; a leading `+` or `++` is dropped, and
            `~a.b` removes.

    Returns:
        The tree; `${a.b}` is replaced, and what cannot be is `Undecided` with its text.

    Raises:
        QueryError: It cannot be read, or an override is none.
    """
    tree = _with_parents(Path(path), ())
    for one in overrides:
        _override(tree, one)
    resolved = _resolved(tree, tree, [_MOST_NODES], ())
    assert isinstance(resolved, dict)
    return resolved


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The tree that overrides alone make.

    Raises:
        QueryError: One is none.

    >>> parse_overrides(["grpo.async_grpo.enabled=true", "policy.precision=bfloat16"])
    {'grpo': {'async_grpo': {'enabled': True}}, 'policy': {'precision': 'bfloat16'}}
    """
    tree: dict[str, Any] = {}
    for one in overrides:
        _override(tree, one)
    return tree


def with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a configuration with what a framework takes where nothing is written.

    Args:
        config: The configuration.
        defaults: Values by dotted path.
    """
    tree: dict[str, Any] = _copied(config)
    for path, value in defaults.items():
        *names, last = path.split(".")
        inner: Any = tree
        for name in names:
            inner = inner.setdefault(name, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.setdefault(last, value)
    return tree


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    return value


def parse_value(text: str) -> Any:
    """A value as YAML reads it.

    Raises:
        ValueError: It is no YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text[:60]!r} is no value: {error}") from error


def _with_parents(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    where = path.resolve()
    if where in children or len(children) >= _MOST_PARENTS:
        chain = " -> ".join(one.name for one in (*children, where))
        raise QueryError(f"{path}: defaults lead in a circle or too far: {chain}")
    own = _read(path)
    parents = own.get("defaults")
    names = [parents] if isinstance(parents, str) else parents
    if not isinstance(names, list) or not all(
        isinstance(one, str) and one.endswith((".yaml", ".yml", ".json")) for one in names
    ):
        return own
    tree: dict[str, Any] = {}
    for name in names:
        _merge(tree, _with_parents(path.parent / name, (*children, where)))
    _merge(tree, {key: value for key, value in own.items() if key != "defaults"})
    return tree


def _read(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise QueryError(f"{path}: no file, expected a configuration")
        if path.stat().st_size > _MOST_BYTES:
            raise QueryError(f"{path}: more than {_MOST_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        ending = path.suffix.lower()
        if ending == ".toml":
            tree: Any = tomllib.loads(text)
            if is_wide(tree):
                raise ValueError(_WIDE)
        elif ending == ".json":
            tree = json.loads(text, parse_int=_json_int)
        else:
            tree = yaml.load(text, Loader=_Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            mark = error.problem_mark
            reason = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
        raise QueryError(f"{path}: not to be read as a configuration: {reason}") from error
    if not isinstance(tree, dict):
        raise QueryError(f"{path}: holds no settings, expected a mapping at the top")
    return tree


def _json_int(text: str) -> int:
    value = int(text)
    if is_wide(value):
        raise ValueError(_WIDE)
    return value


def _merge(tree: dict[str, Any], later: dict[str, Any]) -> None:
    for key, value in later.items():
        before = tree.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            _merge(before, value)
        else:
            tree[key] = value


def _override(tree: dict[str, Any], text: str) -> None:
    name, sign, value = text.partition("=")
    path = name.removeprefix("++").removeprefix("+")
    removes = path.startswith("~") and not sign
    names = path.removeprefix("~").split(".")
    if not all(names) or not (sign or removes):
        raise QueryError(f"override {text!r}: expected path=value such as grpo.max_num_steps=10")
    for one in names[:-1]:
        inner = tree.setdefault(one, {})
        if not isinstance(inner, dict):
            inner = tree[one] = {}
        tree = inner
    if removes:
        tree.pop(names[-1], None)
        return
    try:
        tree[names[-1]] = parse_value(value)
    except ValueError as error:
        raise QueryError(f"override {text!r}: {error}") from error


def _resolved(value: Any, root: dict[str, Any], left: list[int], inside: tuple[str, ...]) -> Any:
    """Replace references; aliases are expanded, so that nodes are counted."""
    left[0] -= 1
    if left[0] < 0:
        raise QueryError(f"the configuration has more than {_MOST_NODES} values")
    if len(inside) > 64:
        raise QueryError("the configuration is nested or refers to itself too deep")
    if isinstance(value, dict):
        return {str(key): _resolved(one, root, left, (*inside, "")) for key, one in value.items()}
    if isinstance(value, list):
        return [_resolved(one, root, left, (*inside, "")) for one in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole is None or whole[1] in inside:
        return Undecided(text=value)
    found: Any = root
    for name in whole[1].split("."):
        if not isinstance(found, dict) or name not in found:
            return Undecided(text=value)
        found = found[name]
    return _resolved(found, root, left, (*inside, whole[1]))
