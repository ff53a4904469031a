"""`trajreplay info` and `trajreplay inspect`."""

import csv
import json
import re
from pathlib import Path

import pytest

from tests.helpers.captures import record, sample
from tests.helpers.cli import Outcome, run
from tests.helpers.small_lakes import gappy_lake, healthy_lake, rollout
from trajreplay import Lake, ParallelCoordinates, ProducerInfo, RecomputeConfig
from trajreplay.schema import StageContract


@pytest.fixture(scope="module")
def gappy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(gappy_lake(tmp_path_factory.mktemp("gappy") / "lake").path)


def test_info_sums_an_attempt_up(gappy: Path) -> None:
    outcome = run("info", "--lake", gappy, "--format", "json")
    assert (outcome.code, outcome.err) == (0, "")
    (row,) = json.loads(outcome.out)
    assert row.pop("bytes") > 0
    assert row.pop("problem").startswith("no capture of rank 1, expected ranks 0, 1")
    assert row == {
        "run_id": "r",
        "attempt": 0,
        "rollouts": 2,
        "first_rollout": 0,
        "last_rollout": 1,
        "steps": 0,
        "ranks": 2,
        "samples": 4,
        "tokens": 8,
        "complete": 1,
        "incomplete": 1,
        "refused": 0,
        "superseded": 0,
    }


def test_info_lists_every_rollout_and_step_on_request(gappy: Path) -> None:
    rows = list(
        csv.DictReader(
            run("info", "--lake", gappy, "--cohorts", "--format", "csv").out.splitlines()
        )
    )
    assert [(row["rollout_id"], row["step_id"], row["status"]) for row in rows] == [
        ("0", "", "complete"),
        ("1", "", "incomplete"),
    ]
    assert rows[1]["expected_ranks"] == "[0, 1]"


def test_info_tells_attempts_apart_and_says_what_is_superseded(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    for rollout_id in range(3):
        rollout(lake, rollout_id)
    rollout(lake, 1, attempt=1, resumed_from=(0, 1))
    rollout(lake, 0, run_id="other")
    rows = json.loads(run("info", "--lake", lake.path, "--format", "json").out)
    assert [
        (row["run_id"], row["attempt"], row["complete"], row["superseded"]) for row in rows
    ] == [
        ("other", 0, 1, 0),
        ("r", 0, 1, 2),
        ("r", 1, 1, 0),
    ]
    one = json.loads(run("info", "--lake", lake.path, "--run", "other", "--format", "json").out)
    assert one == rows[:1]
    assert run("info", "--lake", lake.path, "--run", "nope").code == 2


def test_info_of_an_empty_lake_is_an_empty_table(tmp_path: Path) -> None:
    Lake.create(tmp_path / "lake")
    outcome = run("info", "--lake", tmp_path / "lake")
    assert outcome.code == 0
    assert outcome.out.startswith("run_id  attempt  rollouts")
    assert len(outcome.out.splitlines()) == 2


def full_lake(path: Path) -> Path:
    lake = Lake.create(path)
    record(
        lake,
        lambda capture: capture.samples([sample(0, micro_batch_id="mb-0000")]),
        lambda capture: capture.tensor("log_probs", [[-0.5, float("nan")]]),
        lambda capture: capture.expected("loss.policy", loss=0.25, scope="rank", reduction="sum"),
        lambda capture: capture.expected(
            "loss.policy", loss=0.25, scope="micro_batch", micro_batch_id="mb-0000", reduction="sum"
        ),
        run_id="r\u202e",
        step_id=3,
        attempt=1,
        cohort_size=1,
        settings=RecomputeConfig(eps_clip=0.1).resolve(),
        producer=ProducerInfo(commit="abc", torch_version="2.13", framework="t\x1b[1m"),
        parallel=ParallelCoordinates(data_rank=1, data_size=2),
        stages=["sample", StageContract("loss.policy", "recorded-only", reason="tis")],
        redaction={"prompt": "hash"},
    )
    return path


def test_inspect_describes_a_capture(tmp_path: Path) -> None:
    outcome = run("inspect", "--lake", full_lake(tmp_path / "lake"), "--step", "0:3")
    assert (outcome.code, outcome.err) == (0, "")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "THEN", outcome.out)
    text = re.sub(r"[0-9a-f-]{36}\.parquet, [\d,]+ bytes", "FILE", text)
    assert text == (
        "run r\\u202e attempt 1 rollout 0 step 3: complete\n"
        "\n"
        "rank 0: 1 sample, 2 tokens\n"
        "  entry          _manifest/entries/run_id=r%E2%80%AE/attempt=1/rollout_id=0/"
        "step.3.0.data.json\n"
        "  committed      THEN UTC\n"
        "  producer       t\\x1b[1m, train, commit abc, torch 2.13\n"
        "  parallel       data 1 of 2\n"
        "  expected       ranks 0\n"
        "  cohort         1 sample\n"
        "  consumed from  rollout 0 of attempt 1\n"
        "  stages         loss.policy (recorded-only: tis), sample\n"
        "  settings       reward: grouping group, the others as by default\n"
        "  settings       kl: estimator k1, the others as by default\n"
        "  settings       advantage: estimator grpo, the others as by default\n"
        "  settings       loss: eps_clip 0.1, eps_clip_high 0.1, the others as by default\n"
        "  settings       value: clip 0.2, the others as by default\n"
        "  settings       layout: context unstated, the others as by default\n"
        "  redaction      prompt hash\n"
        "  micro-batches  [mb-0000]\n"
        "  file           data/steps/run_id=r%E2%80%AE/attempt=1/rollout_id=0/step_id=3/rank=0/"
        "FILE\n"
        "    column           values  nulls  non-finite  recorded as\n"
        "    ---------------  ------  -----  ----------  -----------\n"
        "    log_probs             2      0           1  float32\n"
        "    loss_mask             2      0\n"
        "    raw_reward            1      0           0  float32\n"
        "    response_length       1      0\n"
        "    reward                1      0           0  float32\n"
        "    total_length          1      0\n"
        "  recorded       loss.policy loss = 0.25 (rank, reduction sum)\n"
        "  recorded       1 output of loss.policy at scope micro_batch\n"
    )


def test_inspect_shows_everything_when_verbose(tmp_path: Path) -> None:
    outcome = run("inspect", "--lake", full_lake(tmp_path / "lake"), "--step", "0:3", "-v")
    assert "    sample_id " in outcome.out
    assert "loss = 0.25 (micro_batch, micro_batch_id mb-0000, reduction sum)" in outcome.out


def test_inspect_has_every_format(tmp_path: Path) -> None:
    lake = full_lake(tmp_path / "lake")
    found = json.loads(run("inspect", "--lake", lake, "--step", "0:3", "--format", "json").out)
    assert found == Lake.open(lake).inspect(0, 3).to_json()
    (line,) = run("inspect", "--lake", lake, "--step", "0:3", "--format", "ndjson").out.splitlines()
    assert json.loads(line) == found["captures"][0]
    rows = list(
        csv.DictReader(
            run("inspect", "--lake", lake, "--step", "0:3", "--format", "csv").out.splitlines()
        )
    )
    assert {row["column"]: row["non_finite"] for row in rows}["log_probs"] == "1"


def test_inspect_works_on_what_is_incomplete(gappy: Path) -> None:
    outcome = run("inspect", "--lake", gappy, "--rollout", "1")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0] == "run r rollout 1: incomplete"
    assert lines[1].startswith("  no capture of rank 1, expected ranks 0, 1")


def test_inspect_works_on_what_is_damaged(tmp_path: Path) -> None:
    lake = Path(healthy_lake(tmp_path / "lake", rollouts=1).path)
    (entry,) = (lake / "_manifest" / "entries").rglob("*.json")
    entry.write_bytes(b"{}")
    outcome = run("inspect", "--lake", lake, "--rollout", "0")
    assert outcome.code == 0
    assert outcome.out.splitlines()[0] == "run r rollout 0: refused"
    assert run("inspect", "--lake", lake, "--rollout", "0", "--format", "csv").code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "Give one of --rollout R and --step R:S."),
        (("--rollout", "0", "--step", "0:0"), "Give one of --rollout R and --step R:S."),
        (("--rollout", "9"), "no capture of rollout 9"),
        (("--step", "0:9"), "no capture of rollout 0 step 9"),
        (("--rollout", "0", "--rank", "7"), "no capture of rank 7, expected one of 0"),
        (("--rollout", "0", "--run", "nope"), "no run 'nope'"),
        (("--rollout", "0", "--attempt", "4"), "no capture of rollout 0"),
    ],
)
def test_inspect_needs_one_place_that_is_there(
    gappy: Path, args: tuple[str, ...], message: str
) -> None:
    outcome = run("inspect", "--lake", gappy, *args)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_one_rank_can_be_inspected(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    rollout(lake, expected_ranks=[0, 1], ids=("s-0", "s-1"))
    rollout(lake, expected_ranks=[0, 1], rank=1, ids=("s-2", "s-3"))
    outcome = run(
        "inspect", "--lake", lake.path, "--rollout", "0", "--rank", "1", "--format", "ndjson"
    )
    assert [json.loads(line)["rank"] for line in outcome.out.splitlines()] == [1]


def test_init_makes_a_lake_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lake"
    assert run("init", path) == Outcome(0, "", f"A lake is ready in {path}\n")
    again = run("init", path)
    assert (again.code, again.out) == (3, "")
    assert again.err.startswith(f"Error: {path} is a lake already\n")
    assert Lake.open(path).path == str(path)


def test_init_takes_its_path_from_wherever_the_lake_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("init", "-q") == Outcome(0, "", "")
    assert run("init", "--lake", "a", "-q").code == 0
    assert run("--lake", "b", "init", "-q").code == 0
    assert run("init", "-q", TRAJREPLAY_LAKE="c").code == 0
    assert sorted(one.parent.name for one in tmp_path.glob("*/lake.json")) == [
        "a",
        "b",
        "c",
        "lake",
    ]
    assert run("init", "a", "--lake", "b").code == 2


def test_files_that_hold_events_only_say_so() -> None:
    traces = Path(__file__).parents[1] / "cases" / "r3_traces" / "la_healthy"
    done = run("inspect", traces)
    assert (done.code, done.out) == (2, "")
    assert "the files hold events, and no samples" in done.err
    assert run("validate", traces).code == 0
    assert run("replay", traces).code == 2
