"""`trajreplay replay`: selections, formats, exit codes."""

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.helpers.captures import record, sample
from tests.helpers.cli import Outcome, interrupted, run
from tests.helpers.small_lakes import REWARD_STAGES, faulty_lake, gappy_lake, healthy_lake, rollout
from trajreplay import Lake, ParallelCoordinates, RecomputeConfig

FAULTY = """\
rollout 1 (rank 0): first divergent stage: reward.post_process
[    pass] sample
[    pass] reward.raw
[diverged] reward.post_process: 1 of 2 samples
          reward s-0 (g-0, rank 0): recorded 5.5, recomputed 0.707105781, abs 4.79289, ratio 7.77819
"""


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(faulty_lake(tmp_path_factory.mktemp("faulty") / "lake").path)


def replay(lake: Path, *args: str) -> Outcome:
    return run("replay", "--lake", lake, *args)


def test_a_divergence_ends_with_exit_code_1(lake: Path) -> None:
    assert replay(lake) == Outcome(
        1,
        "rollout 0 (rank 0): pass\n"
        "[    pass] sample\n"
        "[    pass] reward.raw\n"
        "[    pass] reward.post_process\n"
        "\n"
        f"{FAULTY}"
        "\n"
        "rollout 2 (rank 0): pass\n"
        "[    pass] sample\n"
        "[    pass] reward.raw\n"
        "[    pass] reward.post_process\n"
        "\n"
        "diverged: first divergent stage reward.post_process; of 3 cohorts 1 diverged, 2 pass\n",
        "",
    )


def test_what_is_healthy_ends_with_exit_code_0(tmp_path: Path) -> None:
    path = Path(healthy_lake(tmp_path / "lake", rollouts=5).path)
    assert replay(path) == Outcome(0, "pass: 5 cohorts\n", "")


@pytest.mark.parametrize(
    "selection",
    [
        ("--where", "rollout_id = 1"),
        ("--rollout", "1"),
        ("--run", "r", "--attempt", "0", "--rollout", "1", "--rank", "0"),
        ("--sample", "s-0", "--rollout", "1"),
        ("--group", "g-0", "--where", "rollout_id between 1 and 1"),
        ("--closure", "cohort", "--rollout", "1", "--memory", "64MiB"),
    ],
)
def test_a_selection_can_be_made_in_many_ways(lake: Path, selection: tuple[str, ...]) -> None:
    closing = "diverged: first divergent stage reward.post_process; 1 cohort\n"
    assert replay(lake, *selection) == Outcome(1, f"{FAULTY}\n{closing}", "")


def test_options_may_be_given_several_times(lake: Path) -> None:
    found = json.loads(replay(lake, "--rollout", "0", "--rollout", "2", "--format", "json").out)
    assert [one["rollout_id"] for one in found["cohorts"]] == [0, 2]


def test_a_looser_tolerance_is_named_and_its_acceptances_are_no_pass(lake: Path) -> None:
    outcome = replay(lake, "--rollout", "1", "--atol", "1e3")
    assert outcome.code == 0
    assert "outside the policy's tolerance, accepted as asked: atol 1000" in outcome.out
    assert outcome.out.endswith("compared as asked: atol 1000\nprecision: 1 cohort\n")


@pytest.mark.parametrize("options", [("--rtol", "-1"), ("--atol", "nan"), ("--rtol", "inf")])
def test_a_tolerance_that_accepts_everything_is_a_wrong_option(
    lake: Path, options: tuple[str, ...]
) -> None:
    assert replay(lake, *options).code == 2


@pytest.mark.parametrize("other", [("--set", "reward.ddof=0"), ("--explain",)])
def test_a_comparison_goes_with_a_verdict_alone(lake: Path, other: tuple[str, ...]) -> None:
    outcome = replay(lake, "--exact", *other)
    assert outcome.code == 2
    assert "--exact is part of a verdict" in outcome.err


def test_only_the_stages_asked_for_are_recomputed(lake: Path) -> None:
    outcome = replay(lake, "--rollout", "1", "--stage", "reward.raw")
    assert outcome.code == 0
    assert "reward.post_process" not in outcome.out


def test_stages_that_are_required_and_were_not_compared_are_unverified(lake: Path) -> None:
    outcome = replay(lake, "--rollout", "0", "--require-stages")
    assert outcome.code == 3
    assert outcome.out.endswith("unverified: 1 cohort\n")


def test_an_incomplete_rollout_is_refused_unless_partial_is_allowed(tmp_path: Path) -> None:
    path = Path(gappy_lake(tmp_path / "lake").path)
    refused = replay(path, "--rollout", "1")
    assert refused == Outcome(
        3,
        "rollout 1 (rank 0): refused: no capture of rank 1, expected ranks 0, 1: capture again, "
        "or look at the rest with --allow-partial\n"
        "\n"
        "refused: 1 cohort\n",
        "",
    )
    allowed = replay(path, "--rollout", "1", "--allow-partial")
    assert allowed.code == 3
    assert "refused" not in allowed.out
    assert allowed.out.endswith("unverified: 1 cohort\n")


def test_json_is_the_whole_report(lake: Path) -> None:
    outcome = replay(lake, "--format", "json")
    assert (outcome.code, outcome.err) == (1, "")
    assert json.loads(outcome.out) == Lake.open(lake).replay().to_json()


def test_ndjson_is_a_cohort_a_line(lake: Path) -> None:
    lines = replay(lake, "--format", "ndjson").out.splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == ["pass", "diverged", "pass"]


def test_csv_is_a_row_a_stage_with_the_first_value_that_differs(lake: Path) -> None:
    rows = list(csv.DictReader(replay(lake, "--format", "csv").out.splitlines()))
    compared = [row for row in rows if row["verdict"] in ("pass", "diverged")]
    assert len(compared) == 9
    (wrong,) = (row for row in rows if row["verdict"] == "diverged")
    assert (wrong["rollout_id"], wrong["stage"], wrong["field"], wrong["sample_id"]) == (
        "1",
        "reward.post_process",
        "reward",
        "s-0",
    )
    assert float(wrong["recorded"]) == 5.5


def test_parquet_is_written_as_a_whole_file(lake: Path, tmp_path: Path) -> None:
    outcome = replay(lake, "-o", str(tmp_path / "report.parquet"))
    assert outcome == Outcome(1, "", "")
    assert set(pq.read_table(tmp_path / "report.parquet")["cohort_verdict"].to_pylist()) == {
        "pass",
        "diverged",
    }


@pytest.mark.parametrize("verb", ["replay", "inspect"])
def test_help_says_that_a_rollout_and_a_step_exclude_each_other(verb: str) -> None:
    words = " ".join(run(verb, "--help").out.split())
    rollout, step = words.index("--rollout R "), words.index("--step R:S ")
    assert "excludes --step" in words[rollout:step]
    assert "excludes --rollout" in words[step : step + 150]


def refused(outcome: Outcome, code: int, message: str) -> None:
    assert (outcome.code, outcome.out) == (code, "")
    assert message in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--stage", "loss"), "unknown stage 'loss', expected one of sample, reward.raw"),
        (("--run", "nope"), "no run 'nope'"),
        (("--attempt", "3"), "no attempt 3"),
        (("--step", "1"), "'1' is no step, expected ROLLOUT:STEP"),
        (("--step", "1:0", "--rollout", "1"), "give it or --rollout, not both"),
        (("--batch", "mb-0000"), "--batch needs --step R:S"),
        (("--memory", "lots"), "'lots' is no size"),
        (("--closure", "all"), "'all' is not one of 'group', 'cohort'"),
        (("--where", "rollout_id ="), "Error: "),
        (("--where", "nonsense = 1"), "nonsense"),
        (("--where", "rollout_id = 1; select 1"), "Error: "),
        (("--where", "1=1) union select 9 --"), "Error: "),
        (("--where", "sample_id in (select sample_id from read_csv('/etc/passwd'))"), "Error: "),
        (("--where", ""), "Error: "),
        (("--where", "-- nothing"), "Error: "),
        (("--where", "rollout_id = 99"), "Error: "),
        (("--rollout", "99"), "Error: "),
        (("--sample", "nobody"), "Error: "),
        (("--sample", "s-\udcff"), "'s-\\udcff' is no valid text, expected UTF-8"),
        (("--group", "\udcff"), "'\\udcff' is no valid text, expected UTF-8"),
        (("--run", "\udcff"), "'\\udcff' is no valid text, expected UTF-8"),
        (("--where", "\udcff"), "'\\udcff' is no valid text, expected UTF-8"),
        (("--step", "1:0", "--batch", "\udcff"), "'\\udcff' is no valid text, expected UTF-8"),
        (("--stage", "\udcff"), "unknown stage '\\udcff'"),
        (("--memory", "99999999999999T"), "'99999999999999T' is too large"),
    ],
)
def test_a_wrong_selection_is_a_usage_error_and_never_a_pass(
    lake: Path, args: tuple[str, ...], message: str
) -> None:
    refused(replay(lake, *args), 2, message)


def test_an_empty_lake_selects_nothing(tmp_path: Path) -> None:
    Lake.create(tmp_path / "lake")
    refused(replay(tmp_path / "lake"), 2, "Error: ")


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.rglob(pattern)
    return found


@pytest.mark.parametrize("kind", ["truncated", "flipped", "missing", "link", "pipe"])
def test_a_broken_data_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    lake = Path(healthy_lake(tmp_path / "lake", rollouts=1).path)
    file = only(lake / "data", "*.parquet")
    content = file.read_bytes()
    file.unlink()
    match kind:
        case "truncated":
            file.write_bytes(content[:-5])
        case "flipped":
            middle = len(content) // 3
            file.write_bytes(
                content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            )
        case "link":
            (tmp_path / "elsewhere").write_bytes(content)
            file.symlink_to(tmp_path / "elsewhere")
        case "pipe":
            os.mkfifo(file)
    outcome = replay(lake)
    assert outcome.code == 3
    assert "Traceback" not in outcome.out + outcome.err
    assert file.name in outcome.out
    assert "refused" in outcome.out


def test_a_damaged_manifest_entry_is_refused_by_name(tmp_path: Path) -> None:
    lake = Path(healthy_lake(tmp_path / "lake", rollouts=1).path)
    entry = only(lake / "_manifest" / "entries", "*.json")
    entry.write_bytes(entry.read_bytes().replace(b'"tokens":4', b'"tokens":5'))
    outcome = replay(lake)
    assert outcome.code == 3
    assert entry.name in outcome.out + outcome.err


def two_ranks(lake: Lake, first: dict[str, Any], second: dict[str, Any]) -> None:
    for rank, options in enumerate((first, second)):
        usual: dict[str, Any] = {"rank": rank, "expected_ranks": [0, 1]}
        rollout(lake, **usual | options)


REFUSED: dict[str, tuple[Callable[[Lake], object], str]] = {
    "extra rank": (
        lambda lake: two_ranks(
            lake, {"expected_ranks": [0]}, {"rank": 2, "expected_ranks": [2], "ids": ("a", "b")}
        ),
        "expects the ranks",
    ),
    "ranks that disagree": (
        lambda lake: two_ranks(lake, {"expected_ranks": [0, 1, 2]}, {"ids": ("a", "b")}),
        "rank 0 expects the ranks 0, 1, 2, rank 1 expects 0, 1",
    ),
    "a sample twice": (lambda lake: two_ranks(lake, {}, {}), "s-0"),
    "a null group": (
        lambda lake: record(
            lake,
            lambda capture: capture.samples([sample(0, group_index=None)]),
            stages=REWARD_STAGES,
        ),
        "group",
    ),
    "members not captured": (lambda lake: rollout(lake, cohort_size=3), "cohort_size 3"),
    "another estimator": (
        lambda lake: rollout(
            lake,
            settings=RecomputeConfig(advantage_estimator="sarsa"),
            stages=["advantage.estimate"],
        ),
        "sarsa",
    ),
    "context parallelism": (
        lambda lake: rollout(lake, parallel=ParallelCoordinates(context_size=2)),
        "context",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_refused_and_says_why(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    lake = Lake.create(tmp_path / "lake")
    make(lake)
    outcome = replay(tmp_path / "lake")
    assert outcome.code == 3
    assert "refused" in outcome.out
    assert reason in outcome.out
    assert outcome.err == ""


def test_a_newer_lake_is_refused(tmp_path: Path) -> None:
    lake = Path(healthy_lake(tmp_path / "lake", rollouts=1).path)
    (lake / "lake.json").write_text('{"format": 99}')
    refused(replay(lake), 3, "format 99, expected at most 1")


def test_names_from_a_lake_cannot_steer_the_terminal(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    evil = "s-\u202e[red]\u2066x"
    rollout(lake, reward=5.5, run_id="[bold]r", ids=(evil, "s-1"))
    outcome = replay(Path(lake.path))
    assert outcome.code == 1
    assert "reward s-\\u202e[red]\\u2066x (g-0, rank 0)" in outcome.out


def test_an_interrupt_ends_an_expensive_predicate(lake: Path, tmp_path: Path) -> None:
    where = "(select count(*) from range(100000000000) t(a) where a % 7 = rollout_id) > reward"
    outcome = interrupted("replay", "--lake", lake, "--where", where, tmp=tmp_path)
    assert outcome == Outcome(130, "", "\nInterrupted.\n")


def test_other_settings_are_shown_beside_those_in_force(lake: Path) -> None:
    found = replay(
        lake, "--rollout", "0", "--set", "reward.divide_by_std=false", "--format", "json"
    )
    assert found.code == 0
    document = json.loads(found.out)
    assert document["changes"] == {"reward.divide_by_std": False}
    (cohort,) = document["cohorts"]
    (field,) = cohort["fields"]
    assert (field["stage"], field["field"], field["changed"]) == (
        "reward.post_process",
        "reward",
        2,
    )


def test_other_settings_give_no_verdict(lake: Path) -> None:
    found = replay(lake, "--set", "reward.epsilon=1e-4", "--require-stages")
    assert (found.code, found.out) == (2, "")
    assert "--require-stages is part of a verdict" in found.err


def test_a_setting_that_there_is_not_names_those_like_it(lake: Path) -> None:
    found = replay(lake, "--set", "loss.eps_high=0.28")
    assert (found.code, found.out) == (2, "")
    assert "Did you mean loss.eps_clip_high" in found.err
