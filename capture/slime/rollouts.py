"""slime's rollouts, from rewards to advantages, by its option --rollout-data-postprocess-path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trajreplay.capture.enabling import recorder
from trajreplay.capture.slime.identity import NAMED, sample_id, started
from trajreplay.capture.slime.settings import AS_GRPO, settings_of
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.records import SampleRecord

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

_NO_RAW = "which of the rollout's raw rewards are those of a rank is not handed over"


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
    pen = started(args)
    if not pen.enabled:
        return
    with pen.guard("slime"):
        NAMED.note(rollout_id, rollout_data)
        _record(args, rollout_id, rollout_data)


def _record(args: Any, rollout_id: int, data: Mapping[str, Any]) -> None:
    pen = recorder()
    given = {name: data.get(key) for name, key in COLUMNS.items()}
    given["rollout_experts"] = _routes(data)
    pen.describe_routes(num_experts=getattr(args, "num_experts", None))
    with pen.rollout(rollout_id, settings=settings_of(args), stages=_stages(args, data)):
        pen.record(_samples(args, rollout_id, data), **given)


def _routes(data: Mapping[str, Any]) -> Any:
    """The sampler's choices of experts; of another form than is known they are not taken."""
    routes = data.get("rollout_routed_experts")
    known = routes is not None and all(getattr(one, "ndim", 0) == 3 for one in routes)
    return list(routes) if routes is not None and known else None


def _raw_rewards(data: Mapping[str, Any]) -> list[float] | None:
    """The raw reward of each sample of this rank; None where it is not known which they are.

    slime hands those of the whole rollout to every data-parallel rank, and all else by its part.
    """
    raw, part, count = data.get("raw_reward"), data.get("partition"), len(data["tokens"])
    if raw is None:
        return None
    if part is None:
        return [float(one) for one in raw] if len(raw) == count else None
    places = [int(one) for one in part]
    if len(places) != count or not all(0 <= one < len(raw) for one in places):
        return None
    return [float(raw[one]) for one in places]


def _samples(args: Any, rollout_id: int, data: Mapping[str, Any]) -> list[SampleRecord]:
    group = int(args.n_samples_per_prompt)
    truncated, raw = data.get("truncated"), _raw_rewards(data)
    padded = data.get("max_seq_lens")
    return [
        SampleRecord(
            sample_id=sample_id(index),
            group_index=int(index) // group,
            group_size=group,
            response_length=int(data["response_lengths"][row]),
            total_length=len(data["tokens"][row]),
            padded_length=None if padded is None else int(padded[row]),
            loss_mask=data["loss_masks"][row],
            raw_reward=None if raw is None else raw[row],
            reward=float(data["rewards"][row]),
            truncated=None if truncated is None else bool(truncated[row]),
            source_rollout_id=rollout_id,
        )
        for row, index in enumerate(data["sample_indices"])
    ]


def _stages(args: Any, data: Mapping[str, Any]) -> list[StageContract]:
    unknown = "" if _raw_rewards(data) is not None else _NO_RAW
    shown = {
        "reward.raw": unknown,
        "reward.post_process": "a custom function made the rewards"
        if getattr(args, "custom_reward_post_process_path", None)
        else unknown,
        "advantage.estimate": "advantages were normalised over the batch"
        if getattr(args, "normalize_advantages", False)
        else "a custom function made the advantages"
        if getattr(args, "custom_advantage_function_path", None)
        else f"advantage_estimator is {args.advantage_estimator!r}"
        if args.advantage_estimator not in AS_GRPO
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
