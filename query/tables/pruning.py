"""Filters that DuckDB pushes into a scan: the columns they read, and what they say of the keys.

Arrow does not show the tree of an expression, but its serialised form lists it: one batch with
the literals, and as metadata the calls and fields in prefix order. What cannot be read that way
is kept whole: then nothing is pruned, and the filter is applied to the rows all the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

_CONNECTIVES = {"and_kleene", "or_kleene", "invert"}
_TOKEN = re.compile(r"^(call|field_ref|literal|options|end|nested_field_ref): '(.*)'$")
_METADATA = "-- schema metadata --"


@dataclass(frozen=True)
class _Node:
    """One call, field or literal, and the tokens that it spans."""

    kind: str
    name: str
    start: int
    stop: int
    children: tuple[_Node, ...] = ()

    def fields(self) -> frozenset[str]:
        if self.kind == "field_ref":
            return frozenset([self.name])
        return frozenset[str]().union(*(child.fields() for child in self.children))


class PushedFilter:
    """One filter, as a scan gets it."""

    def __init__(self, expression: pc.Expression) -> None:
        self.expression = expression
        try:
            self._batch, self._tokens = _serialised(expression)
            self._tree: _Node | None = _parse(self._tokens, 0)
        except (pa.ArrowException, ValueError, IndexError, TypeError, RecursionError):
            self._tree = None

    def fields(self) -> frozenset[str] | None:
        """The columns that it reads; None if that cannot be told."""
        return None if self._tree is None else self._tree.fields()

    def on_keys(self, known: Collection[str]) -> pc.Expression | None:
        """What the filter says of these columns alone: true wherever it may be true.

        A condition on another column counts as met; under a negation, as not met.

        Returns:
            An expression over them, or None if nothing can be said.
        """
        if self._tree is None:
            return None
        tokens: list[tuple[str, str]] = []
        self._emit(self._tree, frozenset(known), True, tokens)
        columns = [*self._batch.columns, pa.array([True]), pa.array([False])]
        fields = [pa.field(f"c{index}", column.type) for index, column in enumerate(columns)]
        schema = pa.schema(fields, metadata=pa.KeyValueMetadata(tokens))
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(batch)
        rebuild = self.expression.__reduce__()[0]
        try:
            return rebuild(sink.getvalue())
        except (pa.ArrowException, ValueError):
            return None

    def _emit(
        self, node: _Node, known: frozenset[str], wanted: bool, tokens: list[tuple[str, str]]
    ) -> None:
        """Append a node's tokens, with what makes it `wanted` in place of unknown conditions."""
        if node.fields() <= known:
            tokens.extend(self._tokens[node.start : node.stop])
        elif node.kind == "call" and node.name in _CONNECTIVES:
            tokens.append(("call", node.name))
            for child in node.children:
                self._emit(child, known, wanted != (node.name == "invert"), tokens)
            tokens.append(("end", node.name))
        else:
            literal = self._batch.num_columns + (0 if wanted else 1)
            tokens.append(("literal", str(literal)))


def rows_that_may_match(keys: pa.Table, expression: pc.Expression | None) -> pa.Table:
    """Rows for which an expression is true; all without one."""
    return keys if expression is None else keys.filter(expression)


def _serialised(expression: pc.Expression) -> tuple[pa.RecordBatch, list[tuple[str, str]]]:
    buffer = expression.__reduce__()[1][0]
    with pa.ipc.open_file(buffer) as reader:
        text = reader.schema.to_string(truncate_metadata=False, show_field_metadata=False)
        batch = reader.get_batch(0)
    lines = text.partition(_METADATA)[2].strip().splitlines()
    found = [_TOKEN.match(line) for line in lines]
    if not lines or None in found:
        raise ValueError("not the form of a serialised expression that is known")
    return batch, [(match[1], match[2]) for match in found if match is not None]


def _parse(tokens: list[tuple[str, str]], start: int) -> _Node:
    kind, name = tokens[start]
    if kind in ("field_ref", "literal"):
        return _Node(kind, name, start, start + 1)
    if kind != "call":
        raise ValueError(f"an expression does not begin with {kind}")
    children: list[_Node] = []
    at = start + 1
    while tokens[at][0] != "end":
        if tokens[at][0] == "options":
            at += 1
            continue
        children.append(_parse(tokens, at))
        at = children[-1].stop
    return _Node(kind, name, start, at + 1, tuple(children))
