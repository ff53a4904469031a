"""Conditions of rules: comparisons and arithmetic over the paths of a configuration, nothing else.

A path that is not in the configuration is None. What hangs on a fact that was not stated, on an
interpolation, or on a comparison that values of these types do not have, is undecided: never true.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trajreplay.schema.errors import QueryError

_MOST_CHARACTERS = 2000
FACT = "fact"


@dataclass(frozen=True)
class Undecided:
    """The value of what is not known; `facts` names the facts that would tell."""

    facts: frozenset[str] = frozenset()


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_FUNCTIONS = ("given", "first", "starts")


class Expression:
    """A condition, checked when it is made.

    Args:
        text: Paths, numbers, strings, lists, comparisons, arithmetic, and, or, not, and the
            functions given(path), first(a, b, ...) of those that are given, starts(text, prefix).

    Raises:
        QueryError: It holds anything else.

    >>> Expression("rollout.n < 2 or fact.dataset_size < 8").value({"rollout": {"n": 4}}, {})
    Undecided(facts=frozenset({'dataset_size'}))
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"more than {_MOST_CHARACTERS} characters")
            self._tree = ast.parse(text, mode="eval").body
            self._check(self._tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise QueryError(f"condition {text[:80]!r}: {error}") from error

    def value(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> Any:
        """Its value, `Undecided` where it is not known."""
        return _Evaluation(config, facts).of(self._tree)

    def _check(self, node: ast.AST) -> None:
        allowed = (
            ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Call, ast.Constant, ast.Name,
            ast.Attribute, ast.List, ast.Tuple, ast.expr_context, ast.boolop, ast.cmpop,
            ast.operator, ast.unaryop,
        )  # fmt: skip
        for one in ast.walk(node):
            if not isinstance(one, allowed):
                raise ValueError(f"{type(one).__name__} is not allowed")
            if isinstance(one, ast.operator) and type(one) not in _OPERATORS:
                raise ValueError(f"operator {type(one).__name__} is not allowed")
            if isinstance(one, ast.cmpop) and type(one) not in _COMPARISONS:
                raise ValueError(f"comparison {type(one).__name__} is not allowed")
            if isinstance(one, ast.Call):
                known = isinstance(one.func, ast.Name) and one.func.id in _FUNCTIONS
                if not known or one.keywords:
                    raise ValueError(f"functions are {', '.join(_FUNCTIONS)}")
            if isinstance(one, ast.Attribute):
                path_of(one)


def path_of(node: ast.AST) -> str:
    """The dotted path that names spell."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{path_of(node.value)}.{node.attr}"
    raise ValueError("a path is made of names and dots")


def look_up(config: Mapping[str, Any], path: str) -> Any:
    """What is at a path, None where nothing is."""
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


class _Evaluation:
    def __init__(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self._config = config
        self._facts = facts

    def of(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name | ast.Attribute):
            return self._path(path_of(node))
        if isinstance(node, ast.List | ast.Tuple):
            return [self.of(one) for one in node.elts]
        if isinstance(node, ast.BoolOp):
            return self._either(node, stop=isinstance(node.op, ast.Or))
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.BinOp):
            return self._apply(_OPERATORS[type(node.op)], self.of(node.left), self.of(node.right))
        if isinstance(node, ast.Compare):
            return self._compare(node)
        assert isinstance(node, ast.Call)
        return self._call(node)

    def _path(self, path: str) -> Any:
        head, _, name = path.partition(".")
        if head == FACT:
            return self._facts[name] if name in self._facts else Undecided(frozenset({name}))
        return look_up(self._config, path)

    def _either(self, node: ast.BoolOp, *, stop: bool) -> Any:
        """`and` and `or` of three values: one that settles it does, whatever is not known."""
        unknown: list[Undecided] = []
        for one in node.values:
            found = self.of(one)
            if isinstance(found, Undecided):
                unknown.append(found)
            elif bool(found) is stop:
                return stop
        if unknown:
            return Undecided(frozenset().union(*(one.facts for one in unknown)))
        return not stop

    def _unary(self, node: ast.UnaryOp) -> Any:
        found = self.of(node.operand)
        if isinstance(found, Undecided):
            return found
        if isinstance(node.op, ast.Not):
            return not found
        return self._apply(operator.mul, -1 if isinstance(node.op, ast.USub) else 1, found)

    def _compare(self, node: ast.Compare) -> Any:
        left = self.of(node.left)
        result: Any = True
        for sign, other in zip(node.ops, node.comparators, strict=True):
            right = self.of(other)
            result = self._apply(_COMPARISONS[type(sign)], left, right)
            if result is not True:
                return result
            left = right
        return result

    def _apply(self, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        unknown = [one for one in (left, right) if isinstance(one, Undecided)]
        if unknown:
            return Undecided(frozenset().union(*(one.facts for one in unknown)))
        compares = operation in (operator.eq, operator.ne)
        if not compares and (left is None or right is None):
            return Undecided()
        try:
            return operation(left, right)
        except (TypeError, ZeroDivisionError, OverflowError):
            return Undecided()

    def _call(self, node: ast.Call) -> Any:
        assert isinstance(node.func, ast.Name)
        values = [self.of(one) for one in node.args]
        if node.func.id == "first":
            return next((one for one in values if one is not None), None)
        if unknown := [one for one in values if isinstance(one, Undecided)]:
            return unknown[0]
        if node.func.id == "given":
            return all(one is not None for one in values)
        return isinstance(values[0], str) and values[0].startswith(str(values[-1]))
