"""`trajreplay watch`: a line for each cohort, restarts, the first divergence, Ctrl-C."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.cli import INTERRUPTIBLE, run
from tests.helpers.mismatches import write_pair
from tests.helpers.small_lakes import rollout
from trajreplay import Lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def once(lake: Lake, *args: str | Path) -> tuple[int, list[str], str]:
    outcome = run("watch", "--lake", lake.path, "--once", *args)
    return outcome.code, outcome.out.splitlines(), outcome.err


def test_a_line_a_cohort_says_what_diverged(lake: Lake) -> None:
    rollout(lake, 0, run_id="r")
    rollout(lake, 1, run_id="r", reward=5.5)
    code, lines, err = once(lake)
    assert (code, err) == (1, "")
    assert lines == [
        "r rollout 0: pass",
        "r rollout 1: diverged: reward.post_process, reward recorded 5.5, recomputed 0.707105781",
    ]


def test_a_restart_repeats_nothing(lake: Lake, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    rollout(lake, 0, run_id="r")
    assert once(lake, "--state", state) == (0, ["r rollout 0: pass"], "")
    rollout(lake, 1, run_id="r")
    code, lines, err = once(lake, "--state", state)
    assert (code, lines) == (0, ["r rollout 1: pass"])
    assert err == "reported before: 1 cohort\n"
    assert once(lake, "--state", state, "-q") == (0, [], "")


def test_the_first_divergence_ends_it_if_asked(lake: Lake, tmp_path: Path) -> None:
    for rollout_id in range(3):
        rollout(lake, rollout_id, reward=5.5 if rollout_id == 1 else 0.5 / (0.5**0.5 + 1e-6))
    outcome = run("watch", "--lake", lake.path, "--fail-fast", "--state", tmp_path / "s.json")
    assert outcome.code == 1
    assert len(outcome.out.splitlines()) == 2
    code, lines, _ = once(lake, "--state", tmp_path / "s.json")
    assert (code, len(lines)) == (0, 1)


def test_a_policy_holds_every_step_and_its_failure_ends_it_if_asked(
    lake: Lake, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("[checks.generation_kl]\nbelow = 0.001\n")
    for step_id, off in enumerate((0.001, 0.5, 0.001)):
        write_pair(lake, [[off - 1.0]], [[-1.0]], step_id=step_id, run_id="r")
    code, lines, _ = once(lake, "--policy", policy)
    assert code == 1
    assert lines == [
        "r rollout 0 step 0: unverified",
        "r rollout 0 step 1: unverified; fails generation_kl: it is 0.1487212707001282",
        "r rollout 0 step 2: unverified",
    ]
    outcome = run("watch", "--lake", lake.path, "--fail-fast", "--policy", policy)
    assert (outcome.code, len(outcome.out.splitlines())) == (1, 2)
    _, lines, _ = once(lake, "--policy", policy, "--format", "ndjson")
    told = [json.loads(line)["gate"] for line in lines]
    assert [[one["verdict"] for one in checks] for checks in told] == [["pass"], ["fail"], ["pass"]]


def test_a_policy_that_no_cohort_can_fail_is_refused(lake: Lake, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("[checks.terminal]\n")
    code, lines, err = once(lake, "--policy", policy)
    assert (code, lines) == (2, [])
    assert err.startswith("Error: the policy demands nothing of a single rollout or step")


def test_what_is_not_whole_is_said_and_refused_exits_3(lake: Lake) -> None:
    rollout(lake, 0, expected_ranks=[0, 1])
    code, lines, err = once(lake)
    assert (code, lines) == (3, [])
    assert err.startswith("not whole yet: 1 cohort\nError: ")
    rollout(lake, 0, rank=1, expected_ranks=[1, 2], ids=("s-2", "s-3"))
    code, lines, _ = once(lake, "--format", "ndjson")
    assert code == 3
    assert json.loads(lines[0])["verdict"] == "refused"


def test_a_state_that_cannot_be_written_is_told_before_any_cohort(
    lake: Lake, tmp_path: Path
) -> None:
    for state, code in ((tmp_path / "gone" / "state", 2), (Path(lake.path) / "state", 2)):
        outcome = run("watch", "--lake", lake.path, "--once", "--state", state)
        assert (outcome.code, outcome.out) == (code, "")
        assert "--state" in outcome.err


def test_where_nothing_is_compared_it_does_not_end_well(lake: Lake, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    code, lines, err = once(lake)
    assert (code, lines) == (3, [])
    assert "nothing was compared, there is no whole cohort\n" in err
    rollout(lake, 0, run_id="r")
    assert once(lake, "--state", state, "-q")[0] == 0
    assert once(lake, "--state", state, "-q", "--run", "r")[0] == 0
    for more in (["--run", "other"], ["--attempt", "7"]):
        code, lines, err = once(lake, "--state", state, "-q", *more)
        assert (code, lines) == (3, [])
        assert "nothing was compared" in err


@contextmanager
def watching(lake: Lake) -> Iterator[subprocess.Popen[str]]:
    command = [*INTERRUPTIBLE, "watch", "--lake", lake.path, "--interval", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        try:
            yield it
        finally:
            it.kill()


def test_it_follows_a_lake_that_is_written_until_ctrl_c(lake: Lake) -> None:
    with watching(lake) as it:
        assert it.stdout is not None
        for rollout_id in range(3):
            rollout(lake, rollout_id, run_id="r")
            assert it.stdout.readline() == f"r rollout {rollout_id}: pass\n"
        it.send_signal(signal.SIGINT)
        out, err = it.communicate(timeout=60)
    assert (it.returncode, out) == (130, "")
    assert err.strip() == "Interrupted."
