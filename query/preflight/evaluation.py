"""What a condition is worth: three values, and for the third what it hangs on.

A path that is not in the configuration is None. What hangs on a fact that was not stated, on an
interpolation, or on a comparison that values of these types do not have, is undecided: never true.
Numbers and switches that are written as text are such values: what a framework makes of them is
its own affair.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FACT = "fact"
_SWITCHES = ("true", "false", "yes", "no", "on", "off")


@dataclass(frozen=True)
class Undecided:
    """The value of what is not known.

    Args:
        facts: Facts that would tell.
        paths: Settings that are written so that they do not tell: interpolations, and values of
            another type than the condition takes.
        text: Of a setting, what is written there.
    """

    facts: frozenset[str] = frozenset()
    paths: frozenset[str] = frozenset()
    text: str = ""


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}


def paths_of(node: ast.AST) -> Iterator[str]:
    """The paths that a condition reads."""
    if isinstance(node, ast.Name | ast.Attribute):
        yield path_of(node)
        return
    for one in node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node):
        yield from paths_of(one)


def path_of(node: ast.AST) -> str:
    """The dotted path that names spell."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{path_of(node.value)}.{node.attr}"
    raise ValueError("a path is made of names and dots")


def look_up(config: Mapping[str, Any], path: str) -> Any:
    """What is at a path, None where nothing is, `Undecided` below what is not known."""
    found: Any = config
    for name in path.split("."):
        if not isinstance(found, Undecided):
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


class Evaluation:
    """One condition over one configuration.

    Args:
        config: The resolved configuration.
        facts: What no configuration says, where it was stated.
    """

    def __init__(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self._config = config
        self._facts = facts

    def of(self, node: ast.expr) -> Any:
        """The value of a part of the condition."""
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
            values = self.of(node.left), self.of(node.right)
            return self._apply(OPERATORS[type(node.op)], *values, node)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        assert isinstance(node, ast.Call)
        return self._call(node)

    def truth(self, node: ast.expr) -> bool | Undecided:
        """Whether a part of the condition is true; a switch written as text is not known."""
        found = self.of(node)
        if isinstance(found, Undecided):
            return found
        return self._odd(node) if _is_quoted(found) else bool(found)

    def _path(self, path: str) -> Any:
        head, _, name = path.partition(".")
        if head == FACT:
            return self._facts[name] if name in self._facts else Undecided(frozenset({name}))
        return _at(look_up(self._config, path), Undecided(paths=frozenset({path})))

    def _either(self, node: ast.BoolOp, *, stop: bool) -> bool | Undecided:
        """`and` and `or` of three values: one that settles it does, whatever is not known."""
        unknown: list[Undecided] = []
        for one in node.values:
            found = self.truth(one)
            if isinstance(found, Undecided):
                unknown.append(found)
            elif found is stop:
                return stop
        return _all_of(unknown) if unknown else not stop

    def _unary(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            found = self.truth(node.operand)
            return found if isinstance(found, Undecided) else not found
        sign = -1 if isinstance(node.op, ast.USub) else 1
        return self._apply(operator.mul, sign, self.of(node.operand), node)

    def _compare(self, node: ast.Compare) -> Any:
        left = self.of(node.left)
        result: Any = True
        for sign, other in zip(node.ops, node.comparators, strict=True):
            right = self.of(other)
            result = self._apply(COMPARISONS[type(sign)], left, right, node)
            if result is not True:
                return result
            left = right
        return result

    def _apply(
        self, operation: Callable[[Any, Any], Any], left: Any, right: Any, node: ast.expr
    ) -> Any:
        compares = operation in (operator.eq, operator.ne)
        absent = not compares and (left is None or right is None)
        if unknown := [*_unknown(left), *_unknown(right)]:
            known = _all_of(unknown)
            return Undecided(known.facts) if absent else known
        if absent:
            return Undecided()
        try:
            return operation(left, right) if _fits(operation, left, right) else self._odd(node)
        except (TypeError, ZeroDivisionError, OverflowError):
            return self._odd(node)

    def _odd(self, node: ast.expr) -> Undecided:
        """What is written is not of the type that the condition takes: which of its paths."""
        found = {path: self._path(path) for path in paths_of(node)}
        there = [path for path, value in found.items() if value is not None]
        odd = [path for path in there if not _is_number(found[path])]
        return Undecided(paths=frozenset(odd or there))

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


def _at(value: Any, unknown: Undecided) -> Any:
    """A value with whatever is not known in it said to be so of this path."""
    if isinstance(value, Undecided):
        return unknown
    return [_at(one, unknown) for one in value] if isinstance(value, list) else value


def _unknown(value: Any) -> Iterator[Undecided]:
    if isinstance(value, Undecided):
        yield value
    for one in value if isinstance(value, list) else ():
        yield from _unknown(one)


def _all_of(unknown: list[Undecided]) -> Undecided:
    return Undecided(
        frozenset().union(*(one.facts for one in unknown)),
        frozenset().union(*(one.paths for one in unknown)),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_quoted(value: Any) -> bool:
    """Whether it is text that spells a number or a switch."""
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return value.strip().lower() in _SWITCHES
    return True


def _fits(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> bool:
    """Whether values of these types can be told apart by it: text is neither added nor ordered."""
    if operation in (operator.eq, operator.ne):
        return not (_is_quoted(left) and isinstance(right, int | float)) and not (
            _is_quoted(right) and isinstance(left, int | float)
        )
    if operation in (COMPARISONS[ast.In], COMPARISONS[ast.NotIn]):
        many = right if isinstance(right, list) else []
        return left in many or all(_fits(operator.eq, left, one) for one in many)
    return _is_number(left) and _is_number(right)
