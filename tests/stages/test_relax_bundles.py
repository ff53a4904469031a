"""Replay bundles of Relax, healthy and broken, captured as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trajreplay import CaptureError, Lake, RecomputeConfig, SampleRecord
from trajreplay.schema import StageContract, Tolerance
from trajreplay.stages import CohortReport

FILE = Path(__file__).parent.parent / "cases" / "relax_bundles.json"
BUNDLES = json.loads(FILE.read_text())
STAGES = ("sample", "reward.raw", "reward.post_process", "advantage.kl", "advantage.estimate")


def _captured(lake: Lake, bundle: dict[str, Any]) -> CohortReport | None:
    """The replay of the first shard of a bundle; None if it cannot even be captured."""
    shard = bundle["shards"][0]
    try:
        with lake.capture(
            run_id="relax",
            rollout_id=7,
            step_id=0,
            rank=0,
            expected_ranks=[0],
            settings=RecomputeConfig(**shard["config"]),
            stages=[StageContract(name, one) for name, one in shard["stages"].items()],
            tolerances={name: Tolerance(**one) for name, one in shard["tolerances"].items()},
        ) as capture:
            capture.samples([SampleRecord(**one) for one in shard["samples"]])
            for name, values in shard["tensors"].items():
                floats = [float(one) for one in values]
                capture.tensor(name, torch.tensor(floats, dtype=torch.float32))
            for stage, scalars in shard["expected"].items():
                if stage in shard["stages"]:
                    scope = None if stage == "loss.policy" else "sample"
                    capture.expected(stage, scope=scope, **_numbers(scalars))
    except CaptureError:
        return None
    (cohort,) = lake.replay().cohorts
    return cohort


def _numbers(scalars: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [float(one) for one in value] if isinstance(value, list) else float(value)
        for name, value in scalars.items()
    }


def _silent(cohort: CohortReport) -> bool:
    """Whether it passes and says nothing but where the samples are from."""
    passed = cohort.verdict in ("pass", "precision")
    return passed and all(one.severity == "info" for one in cohort.findings)


@pytest.mark.parametrize("name", BUNDLES)
def test_a_bundle_gets_the_verdict_of_a_careful_tool(lake: Lake, name: str) -> None:
    bundle = BUNDLES[name]
    sound = bundle["sound_verdict"]
    cohort = _captured(lake, bundle)
    if sound == "pass":
        assert cohort is not None
        assert _silent(cohort)
    elif "silent pass" in sound or "clean pass" in sound or "warning" in sound:
        assert cohort is None or not _silent(cohort)
        if sound.startswith("no stage diverges"):
            assert cohort is not None
            assert cohort.first_divergent_stage is None
    elif cohort is None or cohort.verdict == "refused":
        assert "refuse" in sound
    elif "unverified" in sound:
        assert cohort.verdict in ("diverged", "unverified")
        assert [one.stage for one in cohort.stages if one.verdict == cohort.verdict] == [
            "loss.policy"
        ]
    else:
        assert cohort.first_divergent_stage == sound.split()[0]


def test_the_bundles_are_of_both_formats_and_every_verdict() -> None:
    assert {name[:2] for name in BUNDLES} == {"v1", "v2"}
    named = {one["sound_verdict"].split()[0] for one in BUNDLES.values()}
    assert {"pass", "refuse", "sample", "loss.policy"} <= named
    assert set(STAGES) <= set(BUNDLES["v1_healthy"]["shards"][0]["stages"])
