"""`trajreplay explain` and `trajreplay faults`: what they print, and how they end."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.helpers.cli import run
from tests.helpers.scenes import WAY, drawn, write_rollout
from tests.helpers.small_lakes import healthy_lake
from trajreplay import Lake
from trajreplay.cli.shown.explain_rows import explanation_table
from trajreplay.cli.verbs.explain import _alike
from trajreplay.query import Cohort
from trajreplay.stages.explain import Explained, Explanation
from trajreplay.stages.explain.explanation import Hypothesis
from trajreplay.stages.faults import FAULTS, REPORTS
from trajreplay.stages.faults import Report as Source
from trajreplay.stages.report import Report

CASES = Path(__file__).parent.parent / "cases" / "fault_cases.json"
STAGES = ("sample", "reward.raw", "reward.post_process")


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Lake.create(tmp_path_factory.mktemp("faulty") / "lake")
    for rollout in range(2):
        way = replace(WAY, ddof=0)
        samples = drawn(way, rollout_id=rollout)
        write_rollout(made, samples, WAY, settings=WAY.full, stages=STAGES)
    return Path(made.path)


SAID = (
    "reward.post_process: recorded values equal division by the deviation with divisor n, where "
    "the settings say n - 1 (max error "
)


def test_a_divergence_is_explained_and_ends_with_exit_code_1(lake: Path) -> None:
    found = run("explain", "--lake", lake)
    assert (found.code, found.err) == (1, "")
    lines = found.out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["rollout 0", "rollout 1"]
    assert all(line.partition(": ")[2].startswith(SAID) for line in lines)


def test_a_run_is_explained_in_a_line(lake: Path) -> None:
    found = run("explain", "--lake", lake, "--across")
    assert found.code == 1
    assert found.out == (
        "reward.post_process: 2 of 2 cohorts, always: equal division by the deviation with divisor "
        "n, where the settings say n - 1. Known as: deviation with divisor n. See: trajreplay "
        "faults reward.population-std\n"
    )


def test_a_replay_is_explained_below_its_report(lake: Path) -> None:
    plain = run("replay", "--lake", lake, "--rollout", "1")
    found = run("replay", "--lake", lake, "--rollout", "1", "--explain")
    assert found.code == plain.code == 1
    assert found.out.startswith(plain.out)
    assert SAID in found.out.removeprefix(plain.out)


def test_an_explanation_is_a_document(lake: Path) -> None:
    found = json.loads(run("explain", "--lake", lake, "--format", "json").out)
    assert found["verdict"] == "diverged"
    (one, _) = found["explanations"]
    (hypothesis, *_) = one["hypotheses"]
    assert hypothesis["faults"] == ["reward.population-std"]
    assert hypothesis["settings"] == {"reward.ddof": 0}
    assert (hypothesis["agree"], hypothesis["values"]) == (8, 8)


def test_what_is_healthy_has_nothing_to_explain(tmp_path: Path) -> None:
    path = Path(healthy_lake(tmp_path / "lake").path)
    found = run("explain", "--lake", path)
    assert (found.code, found.out) == (0, "pass: nothing diverged\n")


def test_every_fault_is_listed_and_can_be_shown() -> None:
    found = run("faults", "--format", "json")
    assert found.code == 0
    rows = json.loads(found.out)
    assert {row["fault"] for row in rows} >= {one.id for one in FAULTS}
    shown = run("faults", "reward.stride-tail")
    assert shown.code == 0
    assert "K-003, AReaL: Fixed stride over a batch with a short group, https://" in shown.out


def test_reports_say_what_the_cases_say() -> None:
    cases = {one["id"]: one for one in json.loads(CASES.read_text())}
    for name, report in REPORTS.items():
        case = cases[name]
        assert report == Source(name, case["framework"], case["title"], case["url"])
    referred = {one for fault in FAULTS for one in fault.references if one.startswith("K-")}
    assert referred <= {*REPORTS}


def test_many_cohorts_with_one_explanation_are_told_once(tmp_path: Path) -> None:
    made = Lake.create(tmp_path / "lake")
    for rollout in range(6):
        way = replace(WAY, ddof=0)
        write_rollout(made, drawn(way, rollout_id=rollout), WAY, settings=WAY.full, stages=STAGES)
    found = run("explain", "--lake", tmp_path / "lake")
    first, rest = found.out.splitlines()
    assert first.startswith(f"rollout 0: {SAID}")
    assert rest == ("rollout 1 to rollout 5 (5 cohorts): reward.post_process: the same explanation")
    every = run("explain", "--lake", tmp_path / "lake", "--all")
    assert len(every.out.splitlines()) == 6


def test_the_faults_of_a_stage_are_listed_by_its_name() -> None:
    found = json.loads(run("faults", "advantage.kl", "--format", "json").out)
    assert {one["fault"] for one in found} == {
        one.id for one in FAULTS if one.stage == "advantage.kl"
    }
    assert found


def test_an_unknown_fault_is_a_usage_error() -> None:
    found = run("faults", "reward.unheard-of")
    assert (found.code, found.out) == (2, "")
    assert "no fault 'reward.unheard-of'" in found.err


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("across", [(), ("--across",)])
def test_rows_have_one_set_of_typed_columns_whatever_was_found(
    tmp_path: Path, across: tuple[str, ...]
) -> None:
    """Nothing, a NaN beside numbers, an explanation beside none: the same columns, real floats."""
    schemas = []
    for number, values in enumerate([(), (float("nan"), 0.75), (0.75,), (float("inf"),)]):
        made = Lake.create(tmp_path / f"lake-{number}")
        write_rollout(made, drawn(rollout_id=7), WAY, settings=WAY.full, stages=STAGES)
        for rollout, value in enumerate(values):
            samples = drawn(rollout_id=rollout)
            samples[0].reward = value
            write_rollout(made, samples, WAY, settings=WAY.full, stages=STAGES)
        file = tmp_path / f"{number}.parquet"
        written = run("explain", "--lake", made.path, *across, "--format", "parquet", "-o", file)
        assert written.code == (1 if values else 0)
        odd = sum(not math.isfinite(one) for one in values)
        assert written.err.count("the first value that is not finite is reward of s-0") == odd
        assert len(written.err.splitlines()) == odd
        table = pq.read_table(file)
        schemas.append(table.schema)
        text = run("explain", "--lake", made.path, *across, "--format", "csv")
        assert text.out.splitlines()[0].split(",") == table.column_names
        assert len(_rows(text.out)) == table.num_rows
        if not across:
            missed = table["misses_by"].to_pylist()
            assert len(missed) == len(values)
            assert all(isinstance(one, float) for one in missed)
    assert all(one == schemas[0] for one in schemas)


def test_rows_name_the_faults(lake: Path) -> None:
    for options in ((), ("--across",)):
        found = _rows(run("explain", "--lake", lake, *options, "--format", "csv").out)
        assert {one["faults"] for one in found} == {"reward.population-std"}


@pytest.mark.parametrize("shape", ["csv", "ndjson"])
def test_what_is_no_explanation_is_said_beside_rows_of_them(tmp_path: Path, shape: str) -> None:
    """A stage that differs within its rounding, and a NaN, of one rollout each."""
    made = Lake.create(tmp_path / "lake")
    for rollout in range(2):
        samples = drawn(rollout_id=rollout)
        for one in samples[:4]:
            one.raw_reward, one.reward = 0.1, 0.0  # of a group without a spread
        samples[1].reward = 1e-3  # a rounding error over epsilon
        samples[5].reward = float("nan") if rollout else samples[5].reward
        write_rollout(made, samples, WAY, settings=WAY.full, stages=STAGES)
    found = run("explain", "--lake", made.path, "--format", shape)
    assert "the first value that is not finite is reward of s-5" in found.err
    assert "reward.post_process: 1 cohort differs by up to 0.001" in found.err
    assert "not finite is" not in found.out


def test_doubt_and_warnings_are_no_one_explanation(tmp_path: Path) -> None:
    """What rests on chance is not said to be the explanation of what is certain."""
    sure, doubtful, warned = ([Explanation(Cohort("r", 0, at, None), STAGES[2])] for at in range(3))
    told = Hypothesis(("a.b",), "a", "it", "there", (), {}, 4, 4, 0.0)
    sure[0].hypotheses.append(told)
    doubtful[0].hypotheses.append(replace(told, by_chance=1))
    warned[0].hypotheses.append(told)
    warned[0].warns = True
    found = Explained(Report([]), [*sure * 3, *doubtful * 3, *warned * 3])
    assert [len(one) for one in _alike(found)] == [3, 3, 3]
    rows = explanation_table(found.explanations).to_pylist()
    assert [one["by_chance"] for one in rows] == [0] * 3 + [1] * 3 + [0] * 3
    assert [one["warns"] for one in rows] == [False] * 6 + [True] * 3


def test_the_rows_of_a_counterfactual_have_their_columns_without_a_row(tmp_path: Path) -> None:
    made = Lake.create(tmp_path / "lake")
    write_rollout(made, drawn(), WAY, stages=["sample"])
    empty = run("replay", "--lake", made.path, "--set", "reward.ddof=0", "--format", "csv")
    other = Lake.create(tmp_path / "other")
    write_rollout(other, drawn(), WAY, stages=STAGES)
    full = run("replay", "--lake", other.path, "--set", "reward.ddof=0", "--format", "csv")
    assert empty.code == full.code == 0
    assert empty.out.splitlines() == full.out.splitlines()[:1]
    assert len(full.out.splitlines()) > 1


@pytest.mark.parametrize("shape", ["table", "csv", "ndjson"])
def test_what_was_refused_is_said_with_its_reason(shape: str, tmp_path: Path) -> None:
    path = Path(healthy_lake(tmp_path / "lake").path)
    for file in path.glob("data/**/*.parquet"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
    found = run("explain", "--lake", path, "--format", shape)
    assert found.code == 3
    assert found.err.count("Not explained: ") >= 1
    assert "expected" in found.err, "the reason of the refusal"


def test_of_many_that_were_refused_the_first_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    for number in range(12):
        write_rollout(lake, drawn(), rollout_id=number)
    for file in (tmp_path / "lake").glob("data/**/*.parquet"):
        file.write_bytes(file.read_bytes()[:-1])
    told = run("explain", "--lake", lake.path).err
    assert (told.count("Not explained: "), "2 more (--all shows them)" in told) == (11, True)
    assert run("explain", "--lake", lake.path, "--all").err.count("Not explained: ") == 12


def test_other_settings_have_nothing_to_explain(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    write_rollout(lake, drawn())
    found = run("replay", "--lake", lake.path, "--set", "reward.ddof=0", "--explain")
    assert (found.code, found.out) == (2, "")
    assert "--explain explains a verdict, and --set gives none." in found.err


def test_rows_of_a_replay_that_is_explained_say_where_its_report_is(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    write_rollout(lake, drawn())
    for kind in ("ndjson", "csv"):
        found = run("replay", "--lake", lake.path, "--explain", "--format", kind)
        assert "the report is in --format table and json" in found.err
    assert "the report is" not in run("explain", "--lake", lake.path, "--format", "csv").err
