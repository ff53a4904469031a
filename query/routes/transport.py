"""Producers and fetches of a TransferQueue: what was put is what every rank fetched."""

from __future__ import annotations

from collections import defaultdict

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.trace import FETCH_STAGES, Trace
from trajreplay.schema.bundles.r3.records import PayloadSample, TensorRecord

_ROUTE_DTYPES = ("int8", "int16", "int32")


def check_transport(trace: Trace, policy: RoutePolicy, say: RouteFindings) -> None:
    """Check producers, fetches, and that they agree."""
    produced = _check_producers(trace.producers, say)
    if not produced:
        say.fail("producer.coverage", "no rollout_payload_sample, expected one of every sample")
    for one in trace.payloads:
        _check_payload(one, say)
    fetched: dict[str, dict[tuple[int, str], set[int]]] = defaultdict(lambda: defaultdict(set))
    first: dict[str, PayloadSample] = dict(produced)
    for one in trace.fetches:
        stage = FETCH_STAGES.get(one.stage or "", one.stage or "")
        ranks = fetched[stage][one.trace_step, one.key]
        ranks |= set() if one.origin.rank is None else {one.origin.rank}
        before = first.setdefault(one.key, one)
        if before is not one:
            _check_fetch(one, before, stage, say)
    for stage in policy.stages:
        keys = {key for _, key in fetched[stage]}
        for key in produced:
            if key not in keys:
                say.fail(
                    "fetch.coverage",
                    f"key {key} was put and never fetched for {stage}",
                    stage=stage,
                    key=key,
                )
        by_key = {key: frozenset(ranks) for key, ranks in fetched[stage].items()}
        _check_ranks(stage, by_key, trace, say)
    if strange := len({one.key for one in trace.fetches} - produced.keys()):
        say.remark("fetch.coverage", f"{strange} fetched keys have no traced producer")
    _check_layout(trace, say)


def _check_producers(
    producers: list[PayloadSample], say: RouteFindings
) -> dict[str, PayloadSample]:
    first: dict[str, PayloadSample] = {}
    for one in producers:
        before = first.setdefault(one.key, one)
        if before is one:
            continue
        same = (
            before.valid_length == one.valid_length
            and _hashes(before.routed_experts) == _hashes(one.routed_experts)
            and _hashes(before.input_ids) == _hashes(one.input_ids)
        )
        if same:
            say.remark("producer.duplicate", f"key {one.key} was put again, unchanged", key=one.key)
        else:
            say.fail(
                "producer.duplicate",
                f"key {one.key} was put again with other hashes: {before.origin.file} line "
                f"{before.origin.line} and {one.origin.file} line {one.origin.line}",
                key=one.key,
                sample_idx=one.sample_idx,
            )
    return first


def _check_payload(one: PayloadSample, say: RouteFindings) -> None:
    """Shape, length and dtype of one put or fetched sample."""
    where = {
        "stage": FETCH_STAGES.get(one.stage or "", one.stage),
        "rank": one.origin.rank,
        "sample_idx": one.sample_idx,
        "key": one.key,
    }
    routes, length = one.routed_experts, one.valid_length
    place = f"{one.origin.file}, line {one.origin.line}"
    if len(routes.shape) != 3 or routes.shape[0] != length or 0 in routes.shape[1:]:
        say.fail(
            "tensor.shape",
            f"{place}: routes have shape {list(routes.shape)}, expected [{length}, layers, top_k]",
            **where,
        )
    if routes.dtype not in _ROUTE_DTYPES:
        say.fail(
            "tensor.shape",
            f"{place}: routes are {routes.dtype}, expected one of {', '.join(_ROUTE_DTYPES)}",
            **where,
        )
    tensors = (("routes", routes, 4), ("input_ids", one.input_ids, 2))
    for name, tensor, dimensions in tensors:
        if tensor is None:
            continue
        full = tensor.full_shape or ()
        fits = (
            len(full) == dimensions
            and full[2:] == tensor.shape[1:]
            and full[1] >= length
            and full[0] > one.sample_idx
        )
        if not fits or tensor.shape[:1] != (length,):
            say.fail(
                "tensor.shape",
                f"{place}: {name} of sample {one.sample_idx} have shape {list(tensor.shape)} in a "
                f"batch of {list(full)}, expected {length} tokens of it",
                **where,
            )


def _check_fetch(one: PayloadSample, put: PayloadSample, stage: str, say: RouteFindings) -> None:
    where = {
        "stage": stage,
        "rank": one.origin.rank,
        "sample_idx": one.sample_idx,
        "key": one.key,
    }
    place = f"{one.origin.file}, line {one.origin.line}"
    if (one.valid_length, _hashes(one.routed_experts)) != (
        put.valid_length,
        _hashes(put.routed_experts),
    ):
        reason = f"fetched routes are not those that {_done(put)}"
        say.fail("fetch.hash", f"{place}: {reason}", **where)
    if put.input_ids is None and one.input_ids is not None:
        if not any(
            found.rule == "producer.input_ids" and found.where["key"] == one.key
            for found in say.found
        ):
            say.fail(
                "producer.input_ids",
                f"key {one.key} was put without input_ids and fetched with",
                key=one.key,
                sample_idx=put.sample_idx,
            )
    elif _hashes(one.input_ids) != _hashes(put.input_ids):
        missing = one.input_ids is None
        reason = (
            "has no input_ids" if missing else f"fetched tokens are not those that {_done(put)}"
        )
        say.fail("fetch.hash", f"{place}: {reason}", **where)


def _done(put: PayloadSample) -> str:
    """How the first record of a key came to be: of one put untraced, another fetch is."""
    return "were put" if put.stage is None else f"rank {put.origin.rank} fetched"


def _check_ranks(
    stage: str, by_key: dict[tuple[int, str], frozenset[int]], trace: Trace, say: RouteFindings
) -> None:
    """Ranks of a replica fetch the same keys: sets of ranks are equal or have none in common."""
    sets = sorted(set(by_key.values()), key=len, reverse=True)
    groups: list[frozenset[int]] = []
    for ranks in sets:
        if not any(ranks & group for group in groups):
            groups.append(ranks)
    for (step, key), ranks in sorted(by_key.items()):
        whole = next(group for group in groups if ranks & group or group == ranks)
        for rank in sorted(whole - ranks):
            say.fail(
                "fetch.coverage",
                f"rank {rank} did not fetch key {key} for {stage} at step {step}, others of its "
                "replica did",
                stage=stage,
                trace_step=step,
                rank=rank,
                key=key,
            )
    there = {one.rank for one in trace.passes if one.stage == stage}
    for rank in sorted(there - set().union(*groups)) if groups else ():
        say.fail(
            "fetch.coverage", f"rank {rank} fetched nothing for {stage}", stage=stage, rank=rank
        )


def _check_layout(trace: Trace, say: RouteFindings) -> None:
    """Payloads have the same layers, choices and dtype, and those of a batch its size."""
    sizes: dict[object, dict[tuple[int, ...], PayloadSample]] = defaultdict(dict)
    for one in trace.payloads:
        batch = (one.origin.process, one.stage, one.trace_step)
        tensors = {"routes": one.routed_experts, "input_ids": one.input_ids}
        for name, tensor in tensors.items():
            if tensor is not None and tensor.full_shape:
                sizes[batch, name].setdefault(tensor.full_shape, one)
                sizes[batch, "both"].setdefault(tensor.full_shape[:1], one)
    for size, *others in (list(found.items()) for found in sizes.values()):
        for other, one in others:
            say.fail(
                "tensor.shape",
                f"{one.origin.file}, line {one.origin.line}: sample {one.sample_idx} is of a batch "
                f"of shape {list(other)}, others of it are of {list(size[0])}",
                rank=one.origin.rank,
                sample_idx=one.sample_idx,
                key=one.key,
            )
    found = {(one.routed_experts.shape[1:], one.routed_experts.dtype) for one in trace.payloads}
    if len(found) > 1:
        shown = ", ".join(f"{list(shape)} {dtype}" for shape, dtype in sorted(found))
        say.fail("tensor.shape", f"payloads differ in layers, choices or dtype: {shown}")


def _hashes(tensor: TensorRecord | None) -> tuple[object, ...] | None:
    """What must be equal for two records to be of equal tensors."""
    return None if tensor is None else (tensor.sha256, tensor.shape, tensor.dtype)
