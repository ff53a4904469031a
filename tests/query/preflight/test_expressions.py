"""Conditions of rules: three values, no surprises, nothing that runs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.query.preflight.expressions import Expression, Undecided

CONFIG: dict[str, Any] = {"a": {"n": 4, "on": True, "word": "train:loss"}, "none": None}


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
    "text", ["b.c > 3", "a.word > 3", "a.n % 0 == 1", "a.n / none > 1", "3 in a.n"]
)
def test_what_values_of_these_types_do_not_have_is_undecided(text: str) -> None:
    assert Expression(text).value(CONFIG, {}) == Undecided()


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
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())
)


@given(st.dictionaries(st.sampled_from(["a", "b"]), VALUES))
def test_no_configuration_makes_a_condition_raise(config: dict[str, Any]) -> None:
    for text in ("a < b", "a % b == 0", "a * b > 3 or not b", "a in b", "starts(a, b)", "-a > b"):
        Expression(text).value(config, {})
