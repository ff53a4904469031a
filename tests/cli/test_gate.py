"""`trajreplay gate` and `certify`: verdict files, exit codes, real commands and signals."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.captures import entries_of
from tests.helpers.cli import run
from tests.helpers.gates import CASES, healthy_run
from tests.helpers.recorded import enabled, record_rollout, record_step
from trajreplay import Lake

ROOT = Path(__file__).parents[2]
TRACES = CASES / "r3_traces" / "la_healthy"
ROUTES = ("--traces", TRACES, "--contract", "legacy-async")
# Records one rollout and one step as the environment says, then does what it is told.
TRAINING = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from tests.helpers.cohorts import ROLLOUT_STAGES
from tests.helpers.recorded import record_rollout, record_step
from tests.helpers.scenes import WAY
from trajreplay import capture
recorder = capture.enable_from_env(settings=WAY.short, rollout_stages=ROLLOUT_STAGES)
record_step(recorder, record_rollout(recorder))
recorder.close()
print("trained", flush=True)
exec(sys.argv[2])
"""


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def captured(lake: Lake, **changes: Any) -> None:
    recorder = enabled(lake, **changes)
    record_step(recorder, record_rollout(recorder))
    recorder.close()


def test_a_run_that_recomputes_is_clean(lake: Lake, tmp_path: Path) -> None:
    captured(lake)
    file = tmp_path / "verdict.json"
    outcome = run("gate", "replay-clean", "--lake", lake.path, "--attempt", "0", "--verdict", file)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines()[-1] == "pass: direct run 'r', attempt 0, captured 1 of 1 step"
    verdict = json.loads(file.read_text())
    assert (verdict["verdict"], verdict["certifies"], verdict["attempts"]) == ("pass", True, [0])
    assert {one["check"] for one in verdict["checks"]} == {"attempt", "captures", "replay"}


def test_a_dropped_capture_fails_and_its_phase_comes_first(lake: Lake) -> None:
    recorder = enabled(lake)
    record_step(recorder, record_rollout(recorder))
    with lake.capture(
        run_id="r", rollout_id=1, rank=0, expected_ranks=[0], settings=_settings()
    ) as capture:
        capture.drop("queue full")
    recorder.close()
    outcome = run("gate", "replay-clean", "--lake", lake.path, "--attempt", "0", "--format", "json")
    verdict = json.loads(outcome.out)
    assert (outcome.code, verdict["failing_phase"]) == (1, "captures")
    assert verdict["checks"][0]["check"] == "captures"
    assert "dropped" in verdict["checks"][0]["reason"]


def _settings() -> Any:
    from tests.helpers.scenes import WAY

    return WAY.short


def test_heartbeats_are_held_against_the_preset(lake: Lake) -> None:
    healthy_run(lake)
    command = ("gate", "router-replay", "--lake", lake.path, "--attempt", "0", *ROUTES)
    assert run(*command, "--command-exit", "0").code == 0
    unknown = run(*command)
    assert unknown.code == 1
    assert unknown.out.startswith("[      fail] command: the exit code of the command is not known")


@pytest.mark.parametrize(
    ("named", "told"),
    [
        (("--run", "rr"), "no run 'rr'"),
        (("--attempt", "1"), "run 'r' has no attempt 1, expected some of 0"),
        (("--attempts", "0,3"), "run 'r' has no attempt 3, expected some of 0"),
    ],
)
def test_a_run_or_attempt_that_is_not_there_is_a_usage_error(
    lake: Lake, named: tuple[str, str], told: str
) -> None:
    healthy_run(lake)
    outcome = run("gate", "replay-clean", "--lake", lake.path, "--attempt", "0", *named)
    assert (outcome.code, outcome.out) == (2, "")
    assert told in outcome.err
    assert f"trajreplay info --lake {lake.path}" in outcome.err


def test_values_come_with_their_units(lake: Lake) -> None:
    healthy_run(lake)
    out = run("gate", "router-replay", "--lake", lake.path, "--attempt", "0", *ROUTES).out
    assert "generation_kl: 0.0003876 nat (mean over steps < 0.001 nat, none negative)" in out
    assert "truncation: 0.62 of the samples (mean over steps < 0.9)" in out
    assert "nonzero_loss: 10 steps (at least 8 of 10 steps)" in out


def test_commands_in_hints_name_the_lake_that_was_named(lake: Lake) -> None:
    captured(lake)
    for command in (("--lake", lake.path, "replay"), ("replay", "--lake", lake.path)):
        outcome = run(*command, "--attempt", "7")
        assert outcome.code == 2
        assert f"trajreplay info --lake {lake.path}" in outcome.err


def test_an_attempt_counts_alone_unless_the_chain_is_named(lake: Lake) -> None:
    healthy_run(lake, 4)
    healthy_run(lake, 6, attempt=1, first=5)
    command = ("gate", "router-replay", "--lake", lake.path, *ROUTES, "--command-exit", "0")
    alone = json.loads(run(*command, "--attempt", "1", "--format", "json").out)
    assert set(alone["failing"]) == {"complete", "learning_signal", "nonzero_loss"}
    chain = run(*command, "--attempts", "0,1", "--kind", "final")
    assert (chain.code, chain.out.splitlines()[-1]) == (
        0,
        "pass: final run 'r', attempts 0,1, captured 0 of 10 steps",
    )


def test_any_statement_that_returns_a_number_can_be_held_to_a_bound(
    lake: Lake, tmp_path: Path
) -> None:
    captured(lake)
    policy = tmp_path / "policy.toml"
    for query, code in [
        ("select count(*) from steps", 0),
        ("select count(*) from steps where false", 1),
        ("select null", 1),
        ("select 'NaN'::double", 1),
        ("select 1, 2", 1),
        ("select response_length from steps", 1),
        ("select * from read_csv('/etc/passwd')", 2),
        ("select max(response_lenght) from steps", 2),
        ("select count(*) from step", 2),
        ("select maximum(response_length) from steps", 2),
    ]:
        policy.write_text(f'[[sql]]\nname = "rows"\nquery = "{query}"\nat_least = 1\n')
        assert run("gate", policy, "--lake", lake.path, "--attempt", "0").code == code, query


@pytest.mark.parametrize("attempts", ["", "x", "1,0", "0,0", "-1"])
def test_attempts_that_are_no_chain_are_a_usage_error(lake: Lake, attempts: str) -> None:
    outcome = run("gate", "replay-clean", "--lake", lake.path, f"--attempts={attempts}")
    assert (outcome.code, outcome.out) == (2, "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[checks.loss]", "unknown 'loss', expected one of command, attempt"),
        (
            'preset = "router-replay"\n[checks]\nroutes = "no"',
            "checks.routes is 'no', expected a t",
        ),
        ("[checks]\nattempt = 3", "checks.attempt is 3, expected a table"),
        ('contract = "legacy-async"\n', "contract at the top, as in a policy of trajreplay routes"),
        ('preset = "replay-claen"', "preset is 'replay-claen', expected one of"),
        ("[checks.generation_kl]\nbelow = nan", "below is nan, expected a finite number"),
        ("[checks.truncation]\nbelow = 'x'", "below is 'x', expected a finite number"),
        ("[checks.learning_signal]\nshare = -1", "share is -1, expected a number from 0 to 1"),
        ("max_steps = -1\n[checks.attempt]", "max_steps is -1, expected a number from 1"),
        ("", "no check is named"),
        ("checks = 3", "checks is 3, expected a table of tables"),
    ],
)
def test_a_malformed_policy_is_a_usage_error(
    lake: Lake, tmp_path: Path, text: str, told: str
) -> None:
    healthy_run(lake)
    policy = tmp_path / "policy.toml"
    policy.write_text(text)
    outcome = run("gate", policy, "--lake", lake.path, "--attempt", "0")
    assert (outcome.code, outcome.out) == (2, "")
    assert told in outcome.err
    assert "{'command'" not in outcome.err, "no table as Python has it"


def certified(lake: Path, verdict: Path, then: str, *more: str) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "trajreplay", "certify", "--lake", str(lake)),
        *("--policy", "replay-clean", "--run", "r", "--verdict", str(verdict), *more, "--"),
        *(sys.executable, "-c", TRAINING, str(ROOT), then),
    )


def test_a_command_is_certified_as_an_attempt_of_its_own(tmp_path: Path) -> None:
    lake, verdict = tmp_path / "lake", tmp_path / "verdict.json"
    for attempt, then, code in [
        (0, "pass", 0),
        (1, "sys.exit(3)", 3),
        (2, "os.kill(os.getpid(), 9)", 137),
    ]:
        done = subprocess.run(
            certified(lake, verdict, then, *["--no-resume"] * bool(attempt)),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stderr
        assert done.stdout.startswith("trained\n")
        told = json.loads(verdict.read_text())
        assert told["attempts"] == [attempt]
        assert told["command"] == {
            "exit": None if code == 137 else code,
            "signal": 9 if code == 137 else None,
        }
        failing = [one["check"] for one in told["checks"] if one["verdict"] == "fail"]
        assert failing == (["command"] if code else []), "also where the policy does not name it"
        assert told["certifies"] is (code == 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_reaches_the_command_and_leaves_a_verdict(number: int, tmp_path: Path) -> None:
    lake, verdict = tmp_path / "lake", tmp_path / "verdict.json"
    process = subprocess.Popen(
        certified(lake, verdict, "time.sleep(60)"), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "trained\n"
    assert json.loads(verdict.read_text())["verdict"] == "fail", "it has not ended"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert json.loads(verdict.read_text())["command"] == {"exit": None, "signal": number}


def test_a_command_that_records_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "verdict.json").write_text('{"verdict": "pass"}')
    outcome = run(
        *("certify", "--lake", tmp_path / "lake", "--policy", "replay-clean", "--run", "r"),
        *("--verdict", tmp_path / "verdict.json", "--", sys.executable, "-c", "pass"),
    )
    assert outcome.code == 1
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == "fail"


# Leaves a file in the manifest that is no entry, for whoever gates.
SPOIL = (
    "import os, pathlib; "
    "folder = pathlib.Path(os.environ['TRAJREPLAY_LAKE'], '_manifest', 'entries', 'run_id=r'); "
    "folder.mkdir(parents=True, exist_ok=True); (folder / 'stray.json').write_text('x'); "
)


@pytest.mark.parametrize(
    ("then", "code", "command"),
    [
        ("pass", 3, {"exit": 0, "signal": None}),
        ("raise SystemExit(7)", 7, {"exit": 7, "signal": None}),
        ("os.kill(os.getpid(), 9)", 137, {"exit": None, "signal": 9}),
    ],
)
def test_where_the_gate_cannot_judge_the_commands_own_end_is_kept_and_told(
    tmp_path: Path, then: str, code: int, command: dict[str, int | None]
) -> None:
    file = tmp_path / "verdict.json"
    outcome = run(
        *("certify", "--lake", tmp_path / "lake", "--policy", "replay-clean", "--run", "r"),
        *("--verdict", file, "--", sys.executable, "-c", SPOIL + then),
    )
    assert (outcome.code, outcome.out) == (code, "")
    assert "stray.json" in outcome.err
    told = json.loads(file.read_text())
    assert (told["verdict"], told["certifies"], told["command"]) == ("fail", False, command)
    assert told["reason"].startswith("the attempt cannot be judged: ")
    assert "stray.json" in told["reason"]


def test_a_verdict_file_that_cannot_be_written_loses_no_exit_code(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    gone = f"import shutil; shutil.rmtree({str(folder)!r}); raise SystemExit(7)"
    outcome = run(
        *("certify", "--lake", tmp_path / "lake", "--policy", "replay-clean", "--run", "r"),
        *("--verdict", folder / "verdict.json", "--", sys.executable, "-c", gone),
    )
    assert (outcome.code, outcome.out) == (7, "")
    assert "No such file or directory" in outcome.err


RESUMING = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.helpers.recorded import record_rollout, record_step
from trajreplay import capture
from tests.helpers.scenes import WAY
from tests.helpers.cohorts import ROLLOUT_STAGES
recorder = capture.enable_from_env(
    settings=WAY.short, rollout_stages=ROLLOUT_STAGES, resume_rollout_id=int(sys.argv[2]) or None
)
for rollout_id in range(int(sys.argv[2]), int(sys.argv[2]) + 2):
    record_step(recorder, record_rollout(recorder, rollout_id), rollout_id)
recorder.close()
"""


def test_an_attempt_that_resumes_is_certified_where_it_says_so(tmp_path: Path) -> None:
    base: tuple[str | Path, ...] = (
        *("certify", "--lake", tmp_path / "lake", "--policy", "replay-clean", "--run", "r"),
        *("--verdict", tmp_path / "verdict.json"),
    )

    def attempt(first: int, *more: str) -> int:
        return run(*base, *more, "--", sys.executable, "-c", RESUMING, ROOT, str(first)).code

    assert attempt(0) == 0
    assert attempt(2) == 2
    assert attempt(2, "--resume-rollout", "2", "--no-resume") == 2
    assert [one.attempt for one in Lake.open(tmp_path / "lake").replay().cohorts] == [0] * 4
    attempt(2, "--resume-rollout", "2")
    told = json.loads((tmp_path / "verdict.json").read_text())
    assert told["attempts"] == [0, 1]
    entries = [one for one in entries_of(Lake.open(tmp_path / "lake")) if one.key.attempt == 1]
    assert {one.resumed_from for one in entries} == {(0, 2)}
    assert {one.key.rollout_id for one in entries if one.key.kind == "step"} == {2, 3}
