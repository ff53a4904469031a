"""Small TOML files that people write: policies and rules."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from trajreplay.schema.errors import QueryError

_MOST_BYTES = 1 << 20


def read_toml(path: str | os.PathLike[str], kind: str, hint: str = "") -> dict[str, Any]:
    """Read a file.

    Args:
        path: The file.
        kind: What it should hold, as messages say it: policy, or rules.
        hint: What else might have been meant where there is no such file.

    Raises:
        QueryError: It is no regular file of at most 1 MiB, no TOML, or holds an integer that TOML
            does not have.

    Source:
        TOML 1.0.0, Integer: 64 bits, and an error where a number needs more.
    """
    file = Path(path)
    try:
        if not file.is_file():
            raise QueryError(f"{path}: no such file, expected {kind} in TOML", hint=hint)
        if file.stat().st_size > _MOST_BYTES:
            raise QueryError(f"{path}: more than {_MOST_BYTES} bytes, expected {kind}")
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise QueryError(f"{path}: no {kind} can be read: {error}") from error
    if is_wide(tree):
        raise QueryError(f"{path}: no {kind} can be read: an integer has more than 64 bits")
    return tree


def is_wide(value: Any) -> bool:
    """Whether an integer in a tree has more than 64 bits: a text of it may be refused by Python.

    >>> is_wide({"a": [1, -(2**63)]}), is_wide([2**63])
    (False, True)
    """
    if isinstance(value, dict):
        return any(map(is_wide, value.values()))
    if isinstance(value, list):
        return any(map(is_wide, value))
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
