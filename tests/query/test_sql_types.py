"""Columns and values that Arrow or Polars cannot hold are refused by name."""

import pytest

from trajreplay import Lake, QueryError


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return Lake.create(tmp_path_factory.mktemp("types") / "lake")


REFUSED = {
    "340282366920938463463374607431768211455::uhugeint": "UHUGEINT, which Arrow does not have",
    "'12:30:00+05'::timetz": "TIME WITH TIME ZONE, which Arrow does not have",
    "'0101'::bit": "BIT, which Arrow does not have",
    "10000000000000000000000000000000000000000::bignum": "BIGNUM, which Arrow does not have",
    "'{}'::variant": "VARIANT, which Arrow does not have",
    "[1::uhugeint]": "UHUGEINT[], which Arrow does not have",
    "['1'::bit]::bit[1]": "BIT[1], which Arrow does not have",
    "{'a': {'b': '1'::bit}}": "STRUCT(a STRUCT(b BIT)), which Arrow does not have",
    "map {1: '1'::bit}": "MAP(INTEGER, BIT), which Arrow does not have",
    "union_value(a := '1'::bit)": "UNION(a BIT), which Arrow does not have",
    "'infinity'::date": "date32[day] and holds infinity",
    "'-infinity'::date": "date32[day] and holds infinity",
    "'infinity'::timestamp": "timestamp[us] and holds infinity",
    "'-infinity'::timestamptz": "and holds infinity",
    "'infinity'::timestamp_s": "timestamp[s] and holds infinity",
    "'infinity'::timestamp_ms": "timestamp[ms] and holds infinity",
    "'infinity'::timestamp_ns": "timestamp[ns] and holds infinity",
    "time '24:00:00'": "time64[us] and holds the time 24:00:00",
    "170141183460469231731687303715884105727": "and holds integers of more than 38 digits",
    "[{'a': 'infinity'::timestamp}]": "and holds infinity",
    "map {'a': time '24:00:00'}": "and holds the time 24:00:00",
    "union_value(a := 'infinity'::date)": "and holds infinity",
    "['infinity'::date, null]::date[2]": "and holds infinity",
}


@pytest.mark.parametrize("value", REFUSED)
def test_what_arrow_would_hold_as_something_else_is_refused_by_column(
    lake: Lake, value: str
) -> None:
    query = lake.sql(f"select 1 as fine, {value} as odd from range(3)")
    with pytest.raises(QueryError) as caught:
        query.arrow()
    assert caught.value.message.startswith("column odd is of type ")
    assert REFUSED[value] in caught.value.message
    assert caught.value.hint == "Cast it to text in the statement: odd::varchar"
    assert caught.value.facts["column"] == "odd"
    with pytest.raises(QueryError, match="column odd"), query.stream() as (rows, _):
        list(rows)
    assert lake.sql(f"select ({value})::varchar as odd").arrow().num_rows == 1


@pytest.mark.parametrize(
    "value",
    [
        "date '290000-01-01'",
        "timestamp '290000-01-01'",
        "timestamp_ns '2020-01-01 00:00:00.123456789'",
        "time '23:59:59.999999'",
        "null::date",
        "interval '3 months 2 days'",
        "union_value(a := 1)",
        "{'a': {'b': union_value(k := interval '1 day')}}",
        "map {'a': [1, null]}",
        "'a'::enum('a', 'b')",
        "uuid()",
        "99999999999999999999999999999999999999::hugeint",
        "-99999999999999999999999999999999999999::decimal(38, 0)",
        "0.5::decimal(38, 38)",
        "sum(i)",
        "{}",
        "[]",
        "null",
    ],
)
def test_what_arrow_can_hold_passes(lake: Lake, value: str) -> None:
    assert lake.sql(f"select {value} as fine from range(3) t(i)").arrow().num_rows > 0


@pytest.mark.parametrize(
    "value", ["interval '1 day'", "union_value(a := 1)", "[{'a': interval '1 day'}]"]
)
def test_what_polars_lacks_is_refused_by_column(lake: Lake, value: str) -> None:
    query = lake.sql(f"select 1 as fine, {value} as odd")
    with pytest.raises(QueryError, match=r"column odd is of type .*, which Polars does not have"):
        query.polars()
    assert query.arrow().num_rows == 1
