"""Values as JSON and CSV: exact, and harmless where they are text."""

import csv
import datetime
import io
import json
import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.cli.terminal.values import csv_line, json_text, plain


@given(st.text())
def test_text_survives_json_and_nothing_in_it_can_steer_a_terminal(text: str) -> None:
    written = json_text({"id": text})
    assert json.loads(written) == {"id": text}
    assert not any(ord(one) < 32 or 0x7F <= ord(one) < 0xA0 for one in written)
    assert not any(0x202A <= ord(one) <= 0x202E for one in written)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_exact(value: float) -> None:
    assert json.loads(json_text([value])) == [value]
    assert float(next(csv.reader([csv_line([value])]))[0]) == value


def test_what_is_not_finite_is_a_word() -> None:
    values = [math.nan, math.inf, -math.inf]
    assert json_text(values) == '["NaN", "Infinity", "-Infinity"]'
    assert csv_line(values) == "NaN,Infinity,-Infinity\n"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (Decimal(120), 120),
        (Decimal("0.5"), 0.5),
        (Decimal("0.12345678901234567890123"), "0.12345678901234567890123"),
        (2**70, 2**70),
        (b"\x01", "01"),
        (datetime.date(2026, 3, 1), "2026-03-01"),
        (datetime.timedelta(seconds=90), "0:01:30"),
        ((1, [math.nan]), [1, ["NaN"]]),
        ({1: "x"}, {"1": "x"}),
    ],
)
def test_types_that_json_lacks_keep_their_value(value: object, written: object) -> None:
    assert plain(value) == written


def test_a_document_keeps_its_line_breaks_and_no_others() -> None:
    assert json_text({"a": "漢\x85"}, indent=2) == '{\n  "a": "漢\\u0085"\n}'


def test_null_and_empty_text_differ_in_csv() -> None:
    assert csv_line([None, "", "x"]) == ',"",x\n'


@given(st.lists(st.text(alphabet='ab",\n \t漢'), min_size=1))
def test_csv_reads_back(values: list[str]) -> None:
    assert next(csv.reader(io.StringIO(csv_line(values), newline=""))) == values


def test_csv_escapes_what_a_terminal_would_obey() -> None:
    assert csv_line(["\x1b[2J", ["\x1b"]]) == '\\x1b[2J,"[""\\u001b""]"\n'
