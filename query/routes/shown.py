"""Whether what records show of a tensor is what its hash is of."""

from __future__ import annotations

from trajreplay.query.routes.dtypes import all_tensors
from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.payloads import sha256_of
from trajreplay.query.routes.trace import Trace
from trajreplay.schema.bundles.r3.records import TensorRecord, TraceRecord


def check_shown(trace: Trace, say: RouteFindings) -> None:
    """Compare previews of one hash, and hash those that hold every value.

    Other rules compare hashes in some places and previews in others, so that it is here that a
    preview of another tensor is noticed. Where they found something it may follow from that.
    """
    tell = say.unverified if any(one.severity == "failure" for one in say.found) else say.fail
    first: dict[tuple[str, str], tuple[TraceRecord, TensorRecord]] = {}
    hashed: set[TensorRecord] = set()
    for record, tensor in all_tensors(trace):
        before, known = first.setdefault((tensor.sha256, tensor.dtype), (record, tensor))
        if len(tensor.preview) > len(known.preview):
            first[tensor.sha256, tensor.dtype] = record, tensor
        reason = ""
        if any(one != other for one, other in zip(tensor.preview, known.preview, strict=False)):
            place = f"{before.origin.file}, line {before.origin.line}"
            reason = f"shows other values than {place} of a tensor of the same hash"
        elif tensor.is_whole and tensor not in hashed:
            hashed.add(tensor)
            if sha256_of([tensor.preview], tensor) != tensor.sha256:
                reason = "shows all values of a tensor, and its hash is of others"
        if reason:
            tell(
                "tensor.hash",
                f"{record.origin.file}, line {record.origin.line}: {reason}",
                file=record.origin.file,
                line=record.origin.line,
                rank=record.origin.rank,
            )
