"""What each version of NeMo-RL wires: backends, engines and transports by entry point."""

import pytest

from trajreplay.query.preflight import preflight
from trajreplay.query.preflight.configs import parse_overrides

LEGACY = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
CONTROLLER = (
    "async_rl.max_inflight_prompts=8",
    "data_plane.enabled=true",
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=32",
)
ASYNC = "policy.generation.vllm_cfg.async_engine=true"


def found(entry: str, version: str | None, *stated: str) -> dict[str, str]:
    """The rules of a version that a configuration breaks, and how severe each is."""
    facts = {"entry": entry}
    report = preflight(parse_overrides(stated), "nemo-rl", version=version, facts=facts)
    return {one.rule.name.partition("/")[2]: one.severity for one in report.findings}


@pytest.mark.parametrize("version", ["0.4", "0.5.0", "0.6", "0.7.1"])
@pytest.mark.parametrize("backend", ["megatron", "sglang", "trtllm"])
def test_legacy_async_is_wired_for_vllm_alone(version: str, backend: str) -> None:
    told = found("legacy", version, *LEGACY, f"policy.generation.backend={backend}")
    assert told["async-backend"] == "error"
    assert found("legacy", version, *LEGACY, "policy.generation.backend=vllm", ASYNC) == {}


@pytest.mark.parametrize(
    ("version", "backend", "expected"),
    [
        ("0.4", "megatron", {"generation-megatron": "error"}),
        ("0.5", "megatron", {}),
        ("0.5", "sglang", {"generation-sglang": "error"}),
        ("0.6", "sglang", {}),
        ("0.4", "vllm", {}),
    ],
)
def test_a_backend_comes_with_a_version(
    version: str, backend: str, expected: dict[str, str]
) -> None:
    assert found("legacy", version, f"policy.generation.backend={backend}") == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.4", {"controller-version": "error", "data-plane-version": "error"}),
        ("0.5.0", {"controller-version": "error", "data-plane-version": "error"}),
        ("0.6", {"controller-sources": "warning"}),
        ("0.7", {"controller-sources": "warning"}),
        ("0.8", {}),
        (None, {}),
    ],
)
def test_the_single_controller_comes_with_a_version(
    version: str | None, expected: dict[str, str]
) -> None:
    assert found("single-controller", version, *CONTROLLER, ASYNC) == expected


@pytest.mark.parametrize(
    ("version", "backend", "refused"),
    [
        ("0.4", "megatron", True),
        ("0.6", "megatron", True),
        ("0.7", "trtllm", True),
        ("0.7", "sglang", False),
        ("0.8", "megatron", False),
    ],
)
def test_the_single_controller_builds_engines_of_its_own_version(
    version: str, backend: str, refused: bool
) -> None:
    stated = (*CONTROLLER, f"policy.generation.backend={backend}")
    assert ("controller-backend" in found("single-controller", version, *stated)) is refused


@pytest.mark.parametrize(("version", "refused"), [("0.6", True), ("0.7", True), ("0.8", False)])
def test_routes_reach_the_single_controllers_trainer_from_a_version_on(
    version: str, refused: bool
) -> None:
    replays = ("policy.router_replay.enabled=true", "policy.megatron_cfg.enabled=true", ASYNC)
    told = found("single-controller", version, *CONTROLLER, *replays)
    assert told.pop("replay-controller", "") == ("error" if refused else "")
    assert set(told) == ({"controller-sources"} if refused else set())


def test_what_hangs_on_a_version_that_is_not_stated_is_named() -> None:
    stated = (*LEGACY, "policy.generation.backend=sglang")
    report = preflight(parse_overrides(stated), "nemo-rl", facts={"entry": "legacy"})
    assert report.undecided["nemo-rl/async-backend"] == ("version",)
