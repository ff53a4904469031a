"""What reaches a terminal: harmless text, numbers, cells and columns."""

import pytest

from trajreplay.cli.terminal.text import aligned, cell, counted, folded, number, printable, width


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("漢字 ünï", "漢字 ünï"),
        ("run [/x] [link=evil]", "run [/x] [link=evil]"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x1b]8;;http://x\x07", "\\x1b]8;;http://x\\x07"),
        ("c1 \x9b31m", "c1 \\x9b31m"),
        ("bell\a back\b return\r", "bell\\x07 back\\x08 return\\x0d"),
        ("turned \u202egnp.exe", "turned \\u202egnp.exe"),
        ("lone \udc80", "lone \\udc80"),
        ("\u2028line", "\\u2028line"),
        ("two\nlines", "two\\x0alines"),
    ],
)
def test_whatever_a_terminal_would_obey_is_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_line_breaks_of_a_message_may_stay() -> None:
    assert printable("two\nlines\x1b", keep="\n") == "two\nlines\\x1b"


def test_a_float_is_recognisable_as_one() -> None:
    assert [number(one) for one in (1.0, -5.5, 1e-7, 0.1, 1e20)] == [
        "1.0",
        "-5.5",
        "1e-07",
        "0.1",
        "1e+20",
    ]
    assert [number(one) for one in (float("nan"), float("inf"), -float("inf"))] == [
        "NaN",
        "Infinity",
        "-Infinity",
    ]


def test_neighbouring_float32_values_are_told_apart() -> None:
    assert number(0.10000000149011612) != number(0.10000000894069672)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (7, "7"),
        (0.1, "0.1"),
        ("", ""),
        (b"\x00\xff", "00ff"),
        ([1, 2], "[1, 2]"),
        ([1.0, None, 2.0, 3.0, 4.0, 5.0], "[1.0, null, 2.0, 3.0, … 2 more]"),
        ({"start": 0, "stop": 3}, "{start: 0, stop: 3}"),
        (["\x1b"], "[\\x1b]"),
        ("x" * 70, "x" * 59 + "…"),
    ],
)
def test_a_cell_is_one_short_line(value: object, shown: str) -> None:
    assert cell(value) == shown


def test_a_cell_without_limit_is_whole() -> None:
    assert cell("x" * 70, None) == "x" * 70


def test_columns_are_aligned_by_their_width_on_the_terminal() -> None:
    assert width("漢e\u0301") == 3
    assert aligned(["id", "n"], [["漢", "1"], ["a", "20"]], [False, True]) == (
        "id   n\n"
        "--  --\n"
        "漢   1\n"
        "a   20\n"
    )  # fmt: skip


def test_a_table_without_rows_still_names_its_columns() -> None:
    assert aligned(["a", "bc"], []) == "a  bc\n-  --\n"


def test_counts_take_the_right_noun() -> None:
    assert [counted(one, "row") for one in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]


def test_notes_that_say_the_same_are_told_once() -> None:
    notes = [
        ("in/a", "in/a/index.json: no column: not taken"),
        ("in/b", "in/b/rank-0/index.json: no column: not taken"),
        ("in/b", "in/b/rank-1/index.json: no column: not taken"),
        ("in/b", "in/b/index.json: something else"),
        ("in/c", "in/c/rank-0: odd"),
        ("in/c", "in/c/rank-1: odd"),
        ("c", "of nothing in particular"),
    ]
    assert folded(notes) == [
        "2 alike, the first in/a: index.json: no column: not taken",
        "in/b/index.json: something else",
        "in/c: 2 times: odd",
        "of nothing in particular",
    ]
    assert folded([]) == []
