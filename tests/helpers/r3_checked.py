"""Traces of several layouts, and what their check says."""

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.r3_traces import Layout, Trace
from trajreplay.query.routes import RoutePolicy, RouteReport, check_routes

LAYOUTS = {
    "one rank": Layout(lengths=(3, 2, 4, 1)),
    "context": Layout(context=2),
    "sequence": Layout(tensor=2, sequence=True, context=2),
    "pipeline": Layout(pipeline=3, data=2, lengths=(3, 4, 2), microbatch=2),
    "rows": Layout(packed=False, lengths=(3, 4, 2, 2), data=2),
    "steps": Layout(steps=3, context=2, full=True),
    "fallback": Layout(fallback=1, context=2, pipeline=2, recompute=True),
    "tensor": Layout(
        tensor=2, context=2, lengths=(70, 90, 110, 20), top_k=4, experts=64, previewed=0
    ),
    "long": Layout(context=2, lengths=(70, 90, 110, 20, 33, 21), pipeline=2, previewed=0),
}


def checked(trace: Trace, **stated: object) -> RouteReport:
    layout = trace.layout
    policy = RoutePolicy(layout.contract, stages=layout.stages, **stated)  # type: ignore[arg-type]
    with TemporaryDirectory() as folder:
        return check_routes(trace.write(Path(folder) / "trace"), policy)


def failed(report: RouteReport) -> set[str]:
    return {one.rule for one in report.findings if one.severity == "failure"}
