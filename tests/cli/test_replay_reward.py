"""`trajreplay replay --reward`: a function of the user's, named as `python -m` would find it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.captures import record, sample
from tests.helpers.cli import Outcome, run
from tests.helpers.plugins import REWARDS, write_package
from trajreplay import Lake, RecomputeConfig

SOURCE = """
def right(sample):
    print("never on stdout")
    return float(sample["response"] == sample["label"])


def blind(sample):
    return float(sample["prompt"] == "?")
"""
SAID = "          info reward.function: raw rewards are recomputed with grading_here:right\n"
PASSED = "rollout 0 (rank 0): pass\n[    pass] sample\n[    pass] reward.raw\n"
STAGES = ("sample", "reward.raw")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a lake, of which rollout 1 has a wrong reward, and a module of its own."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "grading_here.py").write_text(SOURCE, encoding="utf-8")
    (folder / "halfway_here.py").write_text("import no_such_module_anywhere\n", encoding="utf-8")
    lake = Lake.create(folder / "lake")
    for rollout_id, last in enumerate((0.0, 1.0)):
        rewards = {"4": 1.0, "5": last}
        samples = [
            sample(row, raw_reward=score, response=text, label="4", reward=0.0)
            for row, (text, score) in enumerate(rewards.items())
        ]
        record(
            lake,
            lambda capture, samples=samples: capture.samples(samples),  # type: ignore[misc]
            rollout_id=rollout_id,
            stages=STAGES,
            settings=RecomputeConfig(),
            redaction={"response": "truncate:9", "label": "truncate:9"},
        )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(folder)
    return folder


def test_the_current_folder_is_searched_and_the_wrong_reward_is_named(here: Path) -> None:
    outcome = run("replay", "--reward", "grading_here:right")
    assert outcome.code == 1
    assert outcome.out == (
        "rollout 0 (rank 0): pass\n"
        "[    pass] sample\n"
        "[    pass] reward.raw\n"
        f"{SAID}"
        "\n"
        "rollout 1 (rank 0): first divergent stage: reward.raw\n"
        "[    pass] sample\n"
        "[diverged] reward.raw: 1 of 2 samples\n"
        f"{SAID}"
        "          raw_reward s-1 (g-0, rank 0): recorded 1.0, recomputed 0.0, abs 1.0\n"
        "\n"
        "diverged: first divergent stage reward.raw; of 2 cohorts 1 diverged, 1 pass\n"
    )
    assert "never on stdout" in outcome.err


def test_the_installed_program_searches_it_too(here: Path) -> None:
    script = str(Path(sys.executable).with_name("trajreplay"))
    command = [script, "replay", "--rollout", "0", "--reward", "grading_here:right"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, f"{PASSED}{SAID}\npass: 1 cohort\n")


def test_without_a_function_both_pass(here: Path) -> None:
    outcome = run("replay", "--rollout", "0", "--rollout", "1")
    other = PASSED.replace("rollout 0", "rollout 1")
    assert outcome == Outcome(0, f"{PASSED}\n{other}\npass: 2 cohorts\n", "")


def test_a_redacted_prompt_is_unverified_with_what_to_do(here: Path) -> None:
    outcome = run("replay", "--rollout", "0", "--reward", "grading_here:blind")
    assert outcome.code == 3
    assert "prompt was dropped by the redaction policy of the capture" in outcome.out
    assert outcome.out.endswith("unverified: 1 cohort\n")


def test_an_entry_point_is_found_by_its_name(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {REWARDS: {"right": "acme_grading:right"}}
    monkeypatch.syspath_prepend(write_package(tmp_path / "site", "acme_grading", points, SOURCE))
    outcome = run("replay", "--reward", "right")
    assert outcome.code == 1
    assert "recomputed with acme_grading:right of acme_grading 1.2" in outcome.out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing_here:right", "No module named 'nothing_here'"),
        ("halfway_here:right", "No module named 'no_such_module_anywhere'"),
        ("grading_here:wrong", "has no 'wrong'; its functions are: right, blind"),
        ("grading_here:", "expected module:function"),
        ("wrong", "entry point 'wrong' of the group trajreplay.rewards is not installed"),
    ],
)
def test_a_function_that_is_not_there_is_a_usage_error(here: Path, name: str, message: str) -> None:
    outcome = run("replay", "--reward", name)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err


def test_a_function_that_nothing_calls_is_a_usage_error(here: Path) -> None:
    outcome = run("replay", "--reward", "grading_here:right", "--stage", "sample")
    assert (outcome.code, outcome.out) == (2, "")
    assert "only sample are to be recomputed" in outcome.err
