"""What a Relax bundle recorded: token columns of its payloads, scalars of expected.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.record import Scalars
from trajreplay.schema.bundles.relax.seal import SealedRank
from trajreplay.schema.bundles.tensors import TensorValue
from trajreplay.schema.contracts import stage_named
from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.records import SampleLists
from trajreplay.schema.tables import RESPONSE_LISTS

TOKEN_COLUMNS = tuple(name for name in RESPONSE_LISTS if name != "loss_mask")
_ECHOES = {"raw_rewards": "raw_reward", "rewards": "reward"}
_DTYPES = ("float32", "float64", "float16", "bfloat16")
_PAYLOADS_OF = {
    "advantage.kl": ("old_log_probs", "ref_log_probs"),
    "loss.policy": ("old_log_probs", "log_probs", "advantages"),
}


def read_results(
    one: SealedRank, samples: SampleLists
) -> tuple[dict[str, Any], tuple[Scalars, ...]]:
    """Token columns and scalars, from the payloads and from expected.json."""
    tokens = sum(samples.values("response_length"))
    tensors: dict[str, Any] = {}
    for name, tensor in one.payloads.items():
        if name in TOKEN_COLUMNS:
            _check_tensor(f"{one.where}/payloads/{name}.pt", tensor, tokens)
            tensors[name] = tensor
    scalars = []
    for stage, results in one.expected.items():
        try:
            stage_named(stage)
        except SchemaError as error:
            raise DatasetError(f"{one.expected.where}: {error.message}", hint=error.hint) from error
        lists: dict[str, list[float]] = {}
        plain: dict[str, float] = {}
        for name in results:
            value = results.tree[name]
            if type(value) is not list:
                plain[name] = results.get(name, read.number)
                continue
            values = results.get(name, read.numbers)
            if name in TOKEN_COLUMNS:
                _take_tokens(results, name, values, tokens, tensors)
                continue
            if len(values) != len(samples):
                raise results.error(
                    name, f"has {len(values)} values", f"{len(samples)}, one for each sample"
                )
            _check_echo(results, name, values, samples)
            lists[name] = values
        if lists:
            scalars.append(Scalars(stage, lists, scope="sample"))
        if plain:
            scalars.append(Scalars(stage, plain))
    return tensors, tuple(scalars)


def _check_tensor(where: str, tensor: TensorValue, tokens: int) -> None:
    if tensor.shape != (tokens,) or tensor.dtype not in _DTYPES:
        raise DatasetError(
            f"{where}: {tensor.dtype} of shape {tensor.shape}, expected floats of shape "
            f"({tokens},): one for each response token",
            hint="The bundle is not what was written: capture it again.",
        )


def _take_tokens(
    results: Fields, name: str, values: list[float], tokens: int, tensors: dict[str, Any]
) -> None:
    """A column that expected.json lists; where it is a payload too, the two have to agree."""
    if len(values) != tokens:
        raise results.error(name, f"has {len(values)} values", f"{tokens}, one for each token")
    listed = np.array(values, np.float32)
    held = tensors.setdefault(name, TensorValue(listed, "float32"))
    same = held.dtype != "bfloat16" and np.array_equal(
        held.values.astype(np.float32), listed, equal_nan=True
    )
    if not same:
        raise results.error(name, "differs from the payload of that name", "the same values")


def _check_echo(results: Fields, name: str, values: list[float], samples: SampleLists) -> None:
    """Values that index.json repeats have to be the same."""
    column = _ECHOES.get(name)
    if column is None:
        return
    others = zip(samples.values("sample_id"), samples.values(column), strict=True)
    for value, (sample, other) in zip(values, others, strict=True):
        same = value == other or (other is not None and value != value and other != other)
        if other is not None and not same:
            raise results.error(
                name,
                f"has {value} for sample {sample.rpartition('/')[2]!r}",
                f"{other}, as index.json has it",
            )


def check_inputs(
    where: str, declared: set[str], tensors: Mapping[str, Any], kl_coef: float
) -> None:
    """Refuse a stage that is declared for recomputation and was captured without its inputs.

    A replay would look for them in the rollout, by sample ids that mean another sample there.
    """
    for stage, needed in _PAYLOADS_OF.items():
        lacking = [name for name in needed if name not in tensors]
        if lacking == ["ref_log_probs"] and not kl_coef:
            continue
        if stage in declared and lacking:
            raise DatasetError(
                f"{where}: stage {stage} is declared for recomputation and its input "
                f"{lacking[0]} is no payload, expected {', '.join(needed)}",
                hint="The bundle was captured without it, or lost it: capture it again.",
            )
