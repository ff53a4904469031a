"""Router-replay traces of NeMo-RL: strict records, a line each, a file a process."""

from trajreplay.schema.bundles.r3.fields import RecordError
from trajreplay.schema.bundles.r3.folder import TraceFolder, TraceProblem, read_trace_folder
from trajreplay.schema.bundles.r3.line import MAX_LINE_BYTES, parse_record

__all__ = [
    "MAX_LINE_BYTES",
    "RecordError",
    "TraceFolder",
    "TraceProblem",
    "parse_record",
    "read_trace_folder",
]
