"""Faults of installed packages: one that fails is said, by package, and ends no explanation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.cli import run
from tests.helpers.plugins import write_package
from tests.helpers.scenes import WAY, drawn, write_rollout
from trajreplay import Lake
from trajreplay.stages.explain import Explained, clusters
from trajreplay.stages.faults import catalogue, fault_named, not_loaded

GROUP, STAGE = "trajreplay.faults", "reward.post_process"
SOURCE = """
import torch
from trajreplay.stages.faults import Fault, Told, WrongRewards
from trajreplay.stages.counterfactuals.variants import Variant

def right(settings, raw, groups, lengths):
    return raw.sign()

def arithmetic(function):
    def tries(block):
        yield Told(Variant(arithmetic=WrongRewards(function)), "as acme has them")
    return tries

def faults():
    return [Fault("acme.one", "acme", "reward.post_process", "rewards {}", "acme.py", tries=tries)]

"""
OK = "tries = arithmetic(right)\n"
NOT_LOADED = {
    "import": ("raise ValueError('no licence')\n", "cannot be imported: ValueError: no licence"),
    "call": ("def faults():\n    raise KeyError('a')\n", "raised KeyError: 'a'"),
    "exit": ("def faults():\n    raise SystemExit(3)\n", "raised SystemExit: 3"),
    "half": (
        OK + "ours = faults\ndef faults():\n    yield ours()[0]\n    1 / 0\n",
        "raised ZeroDiv",
    ),
    "number": ("def faults():\n    return 3\n", "raised TypeError"),
    "other": ("def faults():\n    return ['acme.one']\n", "gives a str, expected faults"),
    "twice": (
        OK + "ours = faults\ndef faults():\n    return [*ours(), *ours()]\n",
        "gives the fault 'acme.one', which is there already",
    ),
    "touches": (
        (
            "def faults():\n"
            "    return [Fault('acme.one', 'a', 'loss.policy', 'b', 'c', touches='loss')]\n"
        ),
        "gives a fault without text",
    ),
    "nameless": (
        "def faults():\n    return [Fault('', 'acme', 'reward.post_process', '', '')]\n",
        "gives a fault without text",
    ),
    "stage": (
        OK
        + "def faults():\n    return [Fault('acme.one', 'a', 'reward', 'b', 'c', tries=tries)]\n",
        "gives the fault 'acme.one' of the stage 'reward', expected sample, ",
    ),
    "untried": (
        "def faults():\n    return [Fault('acme.one', 'a', 'reward.post_process', 'b', 'c')]\n",
        "gives the fault 'acme.one' with neither tries nor hands",
    ),
    "function": ("faults = 7\n", "is a int, expected a function"),
}
FAILED = {
    "tries": ("def tries(block):\n    raise RuntimeError('acme')\n", "raised RuntimeError: acme"),
    "exit": ("def tries(block):\n    raise SystemExit\n", "raised SystemExit"),
    "later": (
        "def tries(block):\n    yield Told(Variant())\n    raise OSError('gone')\n",
        "raised OSError: gone",
    ),
    "nothing": ("def tries(block):\n    return None\n", "raised TypeError"),
    "words": ("def tries(block):\n    yield 'a fault'\n", "gives a str, expected Told"),
    "detail": ("def tries(block):\n    yield Told(Variant(), 4)\n", "expected Told"),
    "sum": ("tries = arithmetic(lambda *given: 1 / 0)\n", "raised ZeroDivisionError"),
    "name": ("tries = arithmetic(lambda *given: {}['acme'])\n", "raised KeyError: 'acme'"),
    "leave": ("def leave(*given):\n    exit(9)\ntries = arithmetic(leave)\n", "raised SystemExit"),
    "short": ("tries = arithmetic(lambda settings, raw, *given: raw[1:])\n", "raised "),
    "kind": ("tries = arithmetic(lambda *given: 'rewards')\n", "raised "),
    "signature": ("tries = arithmetic(lambda: None)\n", "raised TypeError"),
    "settings": ("def tries(block):\n    yield Told(Variant({'acme': 1}, 7))\n", "raised "),
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Put the package acme, of some source, on the path of this process."""

    def put(source: str) -> None:
        name = f"acme{abs(hash(source))}"
        points = {GROUP: {"acme": f"{name}:faults"}}
        monkeypatch.syspath_prepend(str(write_package(tmp_path / "site", name, points, source)))
        _forget()

    yield put
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    from trajreplay.stages.faults.catalogue import _loaded

    _loaded.cache_clear()


@pytest.fixture
def faulty(lake: Lake) -> Lake:
    """A rollout whose deviation has another divisor than its settings say."""
    way = replace(WAY, ddof=0)
    write_rollout(lake, drawn(way, rollout_id=0), WAY, settings=WAY.full, stages=("sample", STAGE))
    return lake


def _named(found: Explained) -> list[tuple[str, ...]]:
    (one,) = [one for one in found.explanations if one.stage == STAGE]
    return [each.faults for each in one.hypotheses]


@pytest.mark.parametrize("case", NOT_LOADED)
def test_a_package_that_cannot_be_asked_is_said_and_the_others_are(
    install: object, faulty: Lake, case: str
) -> None:
    source, said = NOT_LOADED[case]
    assert callable(install)
    install(SOURCE + source)
    assert len(not_loaded()) == 1
    assert "'acme'" in not_loaded()[0]
    assert said in not_loaded()[0], not_loaded()
    found = faulty.explain()
    assert _named(found) == [("reward.population-std",)]
    assert found.to_json()["not_loaded"] == list(not_loaded())


@pytest.mark.parametrize("case", FAILED)
def test_a_fault_that_fails_is_said_and_explains_nothing(
    install: object, faulty: Lake, case: str
) -> None:
    source, said = FAILED[case]
    assert callable(install)
    install(SOURCE + source)
    assert fault_named("acme.one") in catalogue()
    found = faulty.explain()
    assert _named(found) == [("reward.population-std",)]
    (one,) = [one for one in found.explanations if one.stage == STAGE]
    assert len(one.failed) == 1, one.failed
    assert "acme.one (acme" in one.failed[0]
    assert said in one.failed[0], one.failed
    assert f"Not tried: {one.failed[0]}." in one.text
    assert one.to_json()["failed"] == one.failed


def test_nothing_is_said_to_be_known_to_explain_it_where_a_fault_was_not_tried(
    install: object, lake: Lake
) -> None:
    samples = drawn(WAY, rollout_id=0)
    for row, sample in enumerate(samples):
        assert sample.reward is not None
        sample.reward += 0.37 * row
    write_rollout(lake, samples, WAY, settings=WAY.full, stages=("sample", STAGE))
    assert "no known fault reproduces this" in lake.explain().explanations[0].text
    assert callable(install)
    install(SOURCE + FAILED["tries"][0])
    found = lake.explain()
    (one,) = [one for one in found.explanations if one.stage == STAGE]
    assert one.first is None
    assert "no known fault that could be tried reproduces this" in one.text
    (cluster,) = [each for each in clusters(found) if each.stage == STAGE]
    assert "no known fault that could be tried reproduces this" in cluster.text
    assert one.failed[0] in cluster.text


def test_recorded_values_that_a_fault_changes_prove_nothing(install: object, faulty: Lake) -> None:
    assert callable(install)
    install(
        SOURCE + "def nought(settings, raw, *given):\n    return torch.zeros_like(raw)\n"
        "def tries(block):\n"
        "    own = {'reward': torch.zeros(len(block.packed.lengths), dtype=torch.float64)}\n"
        "    yield Told(Variant({}, own, WrongRewards(nought)))\n"
    )
    assert _named(faulty.explain()) == [("reward.population-std",)]


def test_a_fault_of_a_package_that_works_is_tried(install: object, lake: Lake) -> None:
    samples = drawn(WAY, rollout_id=0)
    for one in samples:
        assert one.raw_reward is not None
        one.reward = float((one.raw_reward > 0) - (one.raw_reward < 0))
    write_rollout(lake, samples, WAY, settings=WAY.full, stages=("sample", STAGE))
    assert callable(install)
    install(SOURCE + OK)
    assert ("acme.one",) in _named(lake.explain())


def test_the_commands_say_on_stderr_which_package_failed(install: object, faulty: Lake) -> None:
    assert callable(install)
    install(SOURCE + NOT_LOADED["call"][0])
    found = run("explain", "--lake", faulty.path)
    assert found.code == 1
    assert found.err == f"faults that are not tried: {not_loaded()[0]}\n"
    listed = run("faults")
    assert listed.code == 0
    assert listed.err == f"faults that are not listed: {not_loaded()[0]}\n"
