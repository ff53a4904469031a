"""Conditions of rules: three values, no surprises, nothing that runs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.query.preflight.evaluation import Undecided
from trajreplay.query.preflight.expressions import Expression
from trajreplay.schema import QueryError

OPEN = Undecided(text="${oc.env:N}")
CONFIG: dict[str, Any] = {
    "a": {
        "n": 4,
        "on": True,
        "word": "train:loss",
        "text": "8",
        "switch": "false",
        "open": OPEN,
        "many": ["y", OPEN],
    },
    "none": None,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.n == 4", True),
        ("a.n * 2 - 1 > 6 and not a.off", True),
        ("2 < a.n < 4", False),
        ("a.word in ['x', 'train:loss']", True),
        ("starts(a.word, 'train:')", True),
        ("given(a.n) and not given(none) and not given(b.c)", True),
        ("first(b.c, none, a.n) == 4", True),
        ("b.c", None),
        ("a.n.deeper", None),
        ("b.c != 3", True),
        ("-a.n < 0", True),
    ],
)
def test_values_are_those_of_the_configuration(text: str, value: object) -> None:
    assert Expression(text).value(CONFIG, {}) == value


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("b.c > 3", ()),
        ("a.n / none > 1", ()),
        ("a.open > b.c", ()),
        ("a.word > 3", ("a.word",)),
        ("a.n * a.word > 3", ("a.word",)),
        ("a.n % 0 == 1", ("a.n",)),
        ("3 in a.n", ("a.n",)),
        ("a.text > 3", ("a.text",)),
        ("a.text == 8 or a.n == 3", ("a.text",)),
        ("8 in [a.n, a.text]", ("a.text",)),
        ("a.n in ['4', '5']", ("a.n",)),
        ("a.switch == False", ("a.switch",)),
        ("not a.switch", ("a.switch",)),
        ("a.n == 4 and a.switch", ("a.switch",)),
        ("a.on > 0", ("a.on",)),
        ("a.open < a.n", ("a.open",)),
        ("a.open.deeper == 1", ("a.open.deeper",)),
        ("'x' in a.many", ("a.many",)),
        ("given(a.open)", ("a.open",)),
        ("starts(a.open, 'x') or a.text < 2", ("a.open", "a.text")),
    ],
)
def test_what_is_written_so_that_it_does_not_tell_is_named(
    text: str, paths: tuple[str, ...]
) -> None:
    found = Expression(text).holds(CONFIG, {})
    assert isinstance(found, Undecided)
    assert (found.paths, found.facts) == (frozenset(paths), frozenset())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.n != 5 or a.text > 3", True),
        ("a.n == 5 and a.switch", False),
        ("a.word == 3", False),
        ("a.n == 'auto'", False),
        ("a.text == '8'", True),
        ("a.word", True),
        ("none", False),
    ],
)
def test_what_settles_it_counts_whatever_else_is_written(text: str, value: bool) -> None:
    assert Expression(text).holds(CONFIG, {}) is value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("fact.x > 1", Undecided(frozenset({"x"}))),
        ("fact.x and fact.y", Undecided(frozenset({"x", "y"}))),
        ("a.n == 5 and fact.x", False),
        ("fact.x and a.n == 5", False),
        ("fact.x or a.n == 4", True),
        ("not fact.x", Undecided(frozenset({"x"}))),
        ("fact.z == 1", True),
    ],
)
def test_a_fact_that_was_not_stated_leaves_open_only_what_hangs_on_it(
    text: str, value: object
) -> None:
    assert Expression(text).value(CONFIG, {"z": 1}) == value


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(),
    st.sampled_from(["8", "%999999999999d", "true", OPEN]),
    st.lists(st.integers() | st.just(OPEN)),
    st.dictionaries(st.text(), st.integers()),
)


@given(st.dictionaries(st.sampled_from(["a", "b"]), VALUES))
def test_no_configuration_makes_a_condition_raise(config: dict[str, Any]) -> None:
    conditions = ("a < b", "a % b == 0", "a * b > 3 or not b", "a in b", "starts(a, b)", "-a > b")
    for text in (*conditions, "first(a, b) == b", "a", "a / b + a - b != a", "a == [b]"):
        found = Expression(text).holds(config, {})
        assert isinstance(found, bool | Undecided)


@given(st.integers() | st.floats(), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]))
def test_a_number_in_quotes_decides_nothing(value: float, sign: str) -> None:
    for text in (
        f"a {sign} 3",
        f"3 {sign} a",
        f"a * 2 {sign} 3",
        f"-a {sign} 3",
        f"3 % a {sign} 1",
    ):
        found = Expression(text).holds({"a": str(value)}, {})
        assert found == Undecided(paths=frozenset({"a"})), text


@pytest.mark.parametrize(
    "text",
    [
        *("starts()", "starts(a)", "starts(a, 'b', 'c')", "given()", "first()", "fact > 3"),
        *("not " * 300 + "a", "-" * 900 + "a > 1"),
    ],
)
def test_what_could_not_be_worked_out_is_refused_when_it_is_made(text: str) -> None:
    with pytest.raises(QueryError, match="condition"):
        Expression(text)
    assert Expression("not " * 60 + "a").holds({"a": 1}, {}) is True
