"""slime's rollouts, from rewards to advantages, by its option --rollout-data-postprocess-path."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trajreplay.capture.enabling import enable_from_env, recorder
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.identity import ParallelCoordinates, ProducerInfo
from trajreplay.schema.recompute import RecomputeConfig
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.settings import Settings
from trajreplay.schema.settings.profiles import with_changes

# Columns of a lake, and the names that slime has for them in its rollout data.
COLUMNS = {
    "tokens": "tokens",
    "old_log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "kl": "kl",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
}
_AS_GRPO = ("grpo", "gspo")  # which differ in the loss alone
_asked: list[bool] = []


def record_rollout(args: Any, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
    """Record what a rank holds of a rollout once its advantages are computed.

    `--rollout-data-postprocess-path trajreplay.capture.slime.record_rollout`, with capture
    switched on in the environment. The first call of a process enables it.

    Args:
        args: slime's arguments; the settings are read from them.
        rollout_id: The rollout.
        rollout_data: What slime holds of it, a list by sample of each kind.

    Raises:
        SchemaError: At the first call, a switch is malformed.
    """
    if not _asked:
        _asked.append(True)
        place = _place()
        last = place.pipeline_rank == place.pipeline_size - 1  # the others hold no log-probs
        enable_from_env(
            parallel=place,
            producer=ProducerInfo(framework="slime"),
            records=last and place.tensor_rank == 0,
            resume_rollout_id=getattr(args, "start_rollout_id", None) or None,
        )
    pen = recorder()
    if not pen.enabled:
        return
    with pen.guard("slime"):
        _record(args, rollout_id, rollout_data)


def _record(args: Any, rollout_id: int, data: Mapping[str, Any]) -> None:
    pen, place = recorder(), _place()
    given = {name: data.get(key) for name, key in COLUMNS.items()}
    given["rollout_experts"] = _routes(data)
    pen.describe_routes(num_experts=getattr(args, "num_experts", None))
    with pen.rollout(rollout_id, settings=_settings(args, place), stages=_stages(args, data)):
        pen.record(_samples(args, rollout_id, data), **given)


def _routes(data: Mapping[str, Any]) -> Any:
    """The sampler's choices of experts; of another form than is known they are not taken."""
    routes = data.get("rollout_routed_experts")
    known = routes is not None and all(getattr(one, "ndim", 0) == 3 for one in routes)
    return list(routes) if routes is not None and known else None


def _samples(args: Any, rollout_id: int, data: Mapping[str, Any]) -> list[SampleRecord]:
    group = int(args.n_samples_per_prompt)
    truncated = data.get("truncated")
    return [
        SampleRecord(
            sample_id=f"s-{index}",
            group_index=int(index) // group,
            group_size=group,
            response_length=int(data["response_lengths"][row]),
            total_length=len(data["tokens"][row]),
            loss_mask=data["loss_masks"][row],
            raw_reward=float(data["raw_reward"][row]),
            reward=float(data["rewards"][row]),
            truncated=None if truncated is None else bool(truncated[row]),
            source_rollout_id=rollout_id,
        )
        for row, index in enumerate(data["sample_indices"])
    ]


def _settings(args: Any, place: ParallelCoordinates) -> Settings:
    """The arguments of slime have the names of the short form."""
    names = [one.name for one in fields(RecomputeConfig)]
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    if given.get("advantage_estimator") in _AS_GRPO:
        given["advantage_estimator"] = "grpo"
    settings = RecomputeConfig(**given).resolve()
    return (
        with_changes(settings, {"layout.context": "zigzag"}) if place.context_size > 1 else settings
    )


def _stages(args: Any, data: Mapping[str, Any]) -> list[StageContract]:
    shown = {
        "reward.post_process": "a custom function made the rewards"
        if getattr(args, "custom_reward_post_process_path", None)
        else "",
        "advantage.estimate": "advantages were normalised over the batch"
        if getattr(args, "normalize_advantages", False)
        else "a custom function made the advantages"
        if getattr(args, "custom_advantage_function_path", None)
        else f"advantage_estimator is {args.advantage_estimator!r}"
        if args.advantage_estimator not in _AS_GRPO
        else "",
    }
    kl = ["advantage.kl"] if data.get("kl") is not None else []
    names = ["sample", "reward.raw", "reward.post_process", *kl, "advantage.estimate"]
    return [
        StageContract(name, "recorded-only", reason=shown[name])
        if shown.get(name)
        else StageContract(name)
        for name in names
    ]


def _place() -> ParallelCoordinates:
    """Megatron's coordinates where it is in use; it is never loaded here."""
    mpu = getattr(sys.modules.get("megatron.core"), "mpu", None)
    if mpu is None or not mpu.model_parallel_is_initialized():
        return ParallelCoordinates()
    return ParallelCoordinates(
        data_rank=mpu.get_data_parallel_rank(),
        data_size=mpu.get_data_parallel_world_size(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        tensor_size=mpu.get_tensor_model_parallel_world_size(),
        pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
        pipeline_size=mpu.get_pipeline_model_parallel_world_size(),
        context_rank=mpu.get_context_parallel_rank(),
        context_size=mpu.get_context_parallel_world_size(),
    )
