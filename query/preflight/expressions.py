"""Conditions of rules: comparisons and arithmetic over paths of a configuration, nothing else."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from trajreplay.query.preflight.evaluation import (
    COMPARISONS,
    FACT,
    OPERATORS,
    Evaluation,
    Undecided,
    path_of,
    paths_of,
)
from trajreplay.schema.errors import QueryError

_MOST_CHARACTERS = 2000
_DEEPEST = 100
# Arguments that a function takes, at least and at most.
_FUNCTIONS = {"given": (1, None), "first": (1, None), "starts": (2, 2)}


class Expression:
    """A condition, checked when it is made.

    Args:
        text: Paths, numbers, strings, lists, comparisons, arithmetic, and, or, not, and the
            functions given(path), first(a, b, ...) of those that are given, starts(text, prefix).

    Raises:
        QueryError: It holds anything else.

    >>> Expression("rollout.n < 2 or fact.dataset_size < 8").holds({"rollout": {"n": 4}}, {}).facts
    frozenset({'dataset_size'})
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"more than {_MOST_CHARACTERS} characters")
            self._tree = ast.parse(text, mode="eval").body
            _check_depth(self._tree)
            self._check(self._tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise QueryError(f"condition {text[:80]!r}: {error}") from error

    @property
    def paths(self) -> frozenset[str]:
        """The settings that it reads."""
        calls = {one.func for one in ast.walk(self._tree) if isinstance(one, ast.Call)}
        inner = {one.value for one in ast.walk(self._tree) if isinstance(one, ast.Attribute)}
        names = (one for one in ast.walk(self._tree) if isinstance(one, ast.Name | ast.Attribute))
        found = {path_of(one) for one in names if one not in calls | inner}
        return frozenset(one for one in found if one.partition(".")[0] != FACT)

    def value(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> Any:
        """Its value, `Undecided` where it is not known."""
        return Evaluation(config, facts).of(self._tree)

    def holds(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> bool | Undecided:
        """Whether it is true."""
        return Evaluation(config, facts).truth(self._tree)

    @property
    def facts(self) -> frozenset[str]:
        """The facts that it asks for."""
        heads = (path.partition(".") for path in paths_of(self._tree))
        return frozenset(name for head, _, name in heads if head == FACT)

    def _check(self, node: ast.AST) -> None:
        allowed = (
            ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Call, ast.Constant, ast.Name,
            ast.Attribute, ast.List, ast.Tuple, ast.expr_context, ast.boolop, ast.cmpop,
            ast.operator, ast.unaryop,
        )  # fmt: skip
        for one in ast.walk(node):
            if not isinstance(one, allowed):
                raise ValueError(f"{type(one).__name__} is not allowed")
            if isinstance(one, ast.operator) and type(one) not in OPERATORS:
                raise ValueError(f"operator {type(one).__name__} is not allowed")
            if isinstance(one, ast.cmpop) and type(one) not in COMPARISONS:
                raise ValueError(f"comparison {type(one).__name__} is not allowed")
            if isinstance(one, ast.Call):
                known = isinstance(one.func, ast.Name) and one.func.id in _FUNCTIONS
                if not known or one.keywords:
                    raise ValueError(f"functions are {', '.join(_FUNCTIONS)}")
                _check_arity(one)
            if isinstance(one, ast.Attribute):
                path_of(one)
        if any(path == FACT for path in paths_of(node)):
            raise ValueError(f"{FACT} alone is no path, expected {FACT}.NAME")


def _check_depth(tree: ast.AST) -> None:
    """Refuse what could not be worked out without running out of stack."""
    level, depth = [tree], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise ValueError(f"nested deeper than {_DEEPEST}")
        level = [one for node in level for one in ast.iter_child_nodes(node)]


def _check_arity(call: ast.Call) -> None:
    assert isinstance(call.func, ast.Name)
    least, most = _FUNCTIONS[call.func.id]
    if len(call.args) < least or (most is not None and len(call.args) > most):
        wanted = str(least) if most == least else f"{least} or more"
        raise ValueError(f"{call.func.id} has {len(call.args)} arguments, expected {wanted}")
