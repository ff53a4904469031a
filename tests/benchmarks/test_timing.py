"""The table of ratios: what a row reaches, and how it is written."""

from itertools import count

from benchmarks.timing import Paired, Reach, render, take_turns


def test_the_two_sides_take_turns_after_one_run_each() -> None:
    seen: list[str] = []
    ticks = count()
    times = take_turns(
        lambda: seen.append("ours"),
        lambda: seen.append("baseline"),
        rounds=2,
        clock=lambda: float(next(ticks)),
    )
    assert seen == ["ours", "baseline"] * 3
    assert times == ([1.0, 1.0], [1.0, 1.0])


def test_a_ratio_is_reached_by_its_median() -> None:
    row = Paired("work", [1.0, 1.0, 1.0], [1.0, 5.0, 9.0], "s", Reach(5))
    assert Reach(5).met_by(row)
    assert not Reach(5.1).met_by(row)


def test_a_bound_is_on_our_own_median() -> None:
    row = Paired("work", [0.014, 0.016], [1.0, 1.0], "ms", Reach(bound=0.015))
    assert not Reach(bound=0.015).met_by(row)  # the median is the bound itself
    assert Reach(bound=0.0151).met_by(row)


def test_the_table_shows_medians_ranges_and_the_field() -> None:
    rows = [
        Paired("replay", [0.5, 0.4, 0.8], [4.0, 4.0, 4.0], "s", Reach(10), 4.3),
        Paired("select", [0.010], [1.0], "ms", Reach(bound=0.015)),
    ]
    header, replay, select = (line.split() for line in render(rows).splitlines())
    assert header[0] == "work"
    assert " ".join(replay) == "replay 0.50 s 4.00 s 4.30 s 8.0x (5.0-10.0) 10x no"
    assert " ".join(select) == "select 10.0 ms 1000.0 ms 100.0x (100.0-100.0) < 15 ms yes"
