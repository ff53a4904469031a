"""What a capture says about itself before it has any data, checked: the draft of its entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from trajreplay.schema.contracts import StageContract, stage_named
from trajreplay.schema.entry import Entry, LogProbOrigin
from trajreplay.schema.errors import CaptureError, bare, is_name, named
from trajreplay.schema.identity import CaptureKey, ParallelCoordinates, ProducerInfo, check_count
from trajreplay.schema.policy import Redaction, Tolerance
from trajreplay.schema.recompute import RecomputeConfig
from trajreplay.schema.settings import Settings

ORIGINS = ("sampler", "trainer", "detached", "interpolated")
COPY = "copy:"  # followed by the column that was copied


def make_draft(
    key: CaptureKey,
    expected_ranks: Sequence[int],
    settings: Settings | RecomputeConfig,
    *,
    producer: ProducerInfo,
    parallel: ParallelCoordinates,
    stages: Sequence[str | StageContract],
    redaction: Redaction,
    owner: bool | None,
    cohort_size: int | None,
    tolerances: Mapping[str, Tolerance],
) -> Entry:
    """An entry without files and outputs.

    Args:
        key: The capture.
        expected_ranks: Ranks of its set.
        settings: The arithmetic in force; stored resolved.
        producer: The program that captures.
        parallel: Where its rank stands.
        stages: Declared stages.
        redaction: What may be kept of text.
        owner: Whether its rows count; None lets those of `parallel.is_owner`.
        cohort_size: Samples of the cohort, where known.
        tolerances: The producer's own, by stage.

    Raises:
        SchemaError: A stage, setting or count is wrong.
        CaptureError: The ranks lack this one or occur twice, a stage is declared twice, or the
            settings are none.
    """
    if cohort_size is not None:
        check_count("cohort_size", cohort_size, limit=2**63 - 1)
    return Entry(
        key=key,
        expected_ranks=_ranks(expected_ranks, key.rank),
        owner=parallel.is_owner if owner is None else owner,
        cohort_size=cohort_size,
        producer=producer.to_json(),
        parallel=parallel,
        settings_tree=_tree(settings),
        contracts=_contracts(stages),
        tolerances={stage_named(stage).name: one for stage, one in tolerances.items()},
        redaction=redaction.rules,
    )


def make_origin(
    name: str, source: str | None, temperature: float | None, weight_version: int | None
) -> LogProbOrigin:
    """Where a column of log-probs came from.

    Raises:
        CaptureError: The column holds none, or the source is not one that is known.
    """
    if not name.endswith("log_probs"):
        raise CaptureError(
            f"{bare(name)} has an origin, expected a column of log-probs", column=name
        )
    known = isinstance(source, str) and (
        source in ORIGINS or (source.startswith(COPY) and is_name(source))
    )
    if source is None or not known:
        raise CaptureError(
            f"{name}: source is {named(source)}, expected {', '.join(ORIGINS)} or copy:<column>",
            column=name,
        )
    version = None if weight_version is None else check_count("weight_version", weight_version)
    return LogProbOrigin(source, None if temperature is None else float(temperature), version)


def _ranks(expected: Sequence[int], rank: int) -> tuple[int, ...]:
    ranks = sorted(check_count("expected_ranks", one) for one in expected)
    if len(set(ranks)) < len(ranks) or rank not in ranks:
        raise CaptureError(
            f"expected_ranks are {list(expected)!r}, expected distinct ranks with {rank} among "
            "them",
            hint="Name every rank that captures its part of the same rollout or step.",
        )
    return tuple(ranks)


def _tree(settings: Settings | RecomputeConfig) -> Mapping[str, Any]:
    """Settings in full, as they are stored."""
    if isinstance(settings, RecomputeConfig):
        return _tree_of_short(settings)
    return _resolved(settings).to_json()


@lru_cache(maxsize=64)
def _tree_of_short(settings: RecomputeConfig) -> Mapping[str, Any]:
    """A run has the same ones in all of its captures, and shares them."""
    return _resolved(settings).to_json()


def _resolved(settings: Settings | RecomputeConfig) -> Settings:
    if isinstance(settings, RecomputeConfig):
        return settings.resolve()
    if isinstance(settings, Settings):
        return settings
    raise CaptureError(
        f"settings are a {type(settings).__name__}, expected Settings or RecomputeConfig"
    )


def _contracts(stages: Sequence[str | StageContract]) -> dict[str, StageContract]:
    contracts: dict[str, StageContract] = {}
    for stage in [stages] if isinstance(stages, str) else stages:
        contract = stage if isinstance(stage, StageContract) else StageContract(stage)
        if contract.stage in contracts:
            raise CaptureError(f"stage {contract.stage} is declared twice")
        contract.check_implementation()
        contracts[contract.stage] = contract
    return contracts
