"""Router-replay traces of NeMo-RL: strict records, a line each, a file a process."""

from trajreplay.schema.bundles.r3.envelope import decode_envelope, encode_envelope
from trajreplay.schema.bundles.r3.fields import RecordError
from trajreplay.schema.bundles.r3.folder import (
    TraceFolder,
    TraceProblem,
    read_trace_folder,
    trace_lines,
)
from trajreplay.schema.bundles.r3.line import MAX_LINE_BYTES, parse_record

__all__ = [
    "MAX_LINE_BYTES",
    "RecordError",
    "TraceFolder",
    "TraceProblem",
    "decode_envelope",
    "encode_envelope",
    "parse_record",
    "read_trace_folder",
    "trace_lines",
]
