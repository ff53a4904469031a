"""One capture set in detail, as text and as rows of its columns."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from trajreplay.cli.terminal.text import aligned, cell, counted, number, printable
from trajreplay.cli.terminal.values import json_text

_INDENT = "  "
_LABEL_WIDTH = 13
_PROVENANCE = {
    "rollout_partition_id": "partitions",
    "consumer_batch_id": "batches",
    "micro_batch_id": "micro-batches",
}


def inspection_text(found: Mapping[str, Any], *, everything: bool = False) -> str:
    """A capture set as text.

    Args:
        found: What `Inspection.to_json` returns.
        everything: Whether ids and provenance are among the columns, and every scalar is shown.
    """
    step = "" if found["step_id"] is None else f" step {found['step_id']}"
    attempt = f" attempt {found['attempt']}" if found["attempt"] else ""
    place = f"run {printable(found['run_id'])}{attempt} rollout {found['rollout_id']}{step}"
    lines = [f"{place}: {found['status']}"]
    lines += [f"{_INDENT}{printable(one, keep=chr(10))}" for one in found["problems"]]
    for capture in found["captures"]:
        lines += ["", *_capture_lines(capture, everything)]
    return "".join(f"{line}\n" for line in lines)


def _capture_lines(capture: Mapping[str, Any], everything: bool) -> Iterator[str]:
    if "problem" in capture:
        yield f"rank {capture['rank']} ({capture['part']}): {printable(capture['problem'])}"
        return
    copy = "" if capture["owner"] else ", a copy of another rank"
    part = "" if capture["part"] == "data" else f" ({capture['part']})"
    yield (
        f"rank {capture['rank']}{part}: {counted(capture['samples'], 'sample')}, "
        f"{counted(capture['tokens'], 'token')}{copy}"
    )
    for label, text in _facts(capture):
        if text:
            yield _labelled(label, text)
    for file in capture["files"]:
        yield _labelled("file", f"{file['path']}, {counted(file['bytes'], 'byte')}")
        yield from _indented(_columns(file, everything))
    yield from _outputs(capture["outputs"], everything)


def _labelled(label: str, text: str) -> str:
    return f"{_INDENT}{label:<{_LABEL_WIDTH}}  {printable(text)}"


def _facts(capture: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    producer = capture["producer"]
    yield "entry", capture["entry"]
    yield "given up", capture.get("reason", "")
    moment = datetime.datetime.fromtimestamp(capture["created_us"] / 1e6, datetime.UTC)
    yield "committed", f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    facts = {"commit": producer.get("commit"), "torch": producer.get("torch_version")}
    facts |= producer.get("extra") or {}
    described = [str(producer.get("framework") or ""), str(producer.get("role") or "")]
    described += [f"{name} {value}" for name, value in facts.items() if value]
    yield "producer", ", ".join(one for one in described if one)
    yield "parallel", _parallel(capture["parallel"])
    yield "expected", f"ranks {', '.join(map(str, capture['expected_ranks']))}"
    if capture["cohort_size"] is not None:
        yield "cohort", counted(capture["cohort_size"], "sample")
    if capture["resumed_from"] is not None:
        attempt, rollout_id = capture["resumed_from"]
        yield "resumed from", f"attempt {attempt}, before rollout {rollout_id}"
    yield "consumed from", ", ".join(_source(*one) for one in capture["sources"])
    yield "stages", ", ".join(map(_contract, *zip(*capture["contracts"].items(), strict=True)))
    for section, values in capture["settings"].items():
        told = _settings(section, values)
        yield "settings", f"{section}: {told}" if told else ""
    for name, origin in capture["origins"].items():
        yield "origin", f"{name}: {_pairs(origin)}"
    for name, tolerance in capture["tolerances"].items():
        yield "tolerance", f"{name}: {_pairs(tolerance)}"
    yield "redaction", _pairs(capture["redaction"]) or "all text dropped"
    for name, values in (capture.get("provenance") or {}).items():
        yield _PROVENANCE.get(name, name), cell(values) if values else ""


def _settings(section: str, values: Mapping[str, Any]) -> str:
    """The first setting of a section and those that are not as by default; JSON has all."""
    from trajreplay.schema import Settings

    plain = Settings().to_json().get(section, {})
    shown = {
        name: value
        for place, (name, value) in enumerate(values.items())
        if place == 0 or plain.get(name) != value
    }
    rest = ", the others as by default" if len(shown) < len(values) else ""
    return f"{pairs}{rest}" if (pairs := _pairs(shown)) else ""


def _parallel(coordinates: Mapping[str, int]) -> str:
    sizes = {one: coordinates[f"{one}_size"] for one in ("data", "tensor", "pipeline", "context")}
    return ", ".join(
        f"{name} {coordinates[f'{name}_rank']} of {size}"
        for name, size in sizes.items()
        if size > 1
    )


def _source(attempt: int, rollout_id: int) -> str:
    return f"rollout {rollout_id}" + (f" of attempt {attempt}" if attempt else "")


def _contract(stage: str, contract: Mapping[str, str]) -> str:
    if contract["capability"] == "recompute":
        return stage
    reason = f": {contract['reason']}" if contract["reason"] else ""
    return f"{stage} ({contract['capability']}{reason})"


def _pairs(values: Mapping[str, Any]) -> str:
    if not isinstance(values, Mapping):
        return str(values)
    return ", ".join(f"{name} {cell(one)}" for name, one in values.items() if one is not None)


def _columns(file: Mapping[str, Any], everything: bool) -> str:
    from trajreplay.schema import TABLES

    table = TABLES.get(file["table"], TABLES["steps"])
    shown = {
        name: seal
        for name, seal in file["columns"].items()
        if everything or (name in table and table[name].role in ("input", "output"))
    }
    rows = [
        [
            printable(name),
            f"{seal['values']:,}",
            str(seal["nulls"]),
            "" if seal["non_finite"] is None else str(seal["non_finite"]),
            seal["source_dtype"] or "",
        ]
        for name, seal in shown.items()
    ]
    names = ["column", "values", "nulls", "non-finite", "recorded as"]
    return aligned(names, rows, [False, True, True, True, False])


def _outputs(outputs: list[dict[str, Any]], everything: bool) -> Iterator[str]:
    """The recorded scalars of a rank or of the whole cohort; the finer ones are counted."""
    fine: Counter[str] = Counter()
    for one in outputs:
        scope = one.get("scope") or "unstated scope"
        if scope in ("sample", "micro_batch") and not everything:
            fine[f"{one['stage']} at scope {scope}"] += 1
            continue
        meaning = ", ".join(
            f"{name} {cell(one[name])}"
            for name in ("micro_batch_id", "reduction", "numerator", "denominator", "scale")
            if name in one and one[name] != 1.0
        )
        value = number(one["value"]) if "value" in one else cell(one.get("values"))
        place = f"{scope}{f', {meaning}' if meaning else ''}"
        yield _labelled("recorded", f"{one['stage']} {one['field']} = {value} ({place})")
    for place, count in fine.items():
        yield _labelled("recorded", f"{counted(count, 'output')} of {place}")


def _indented(text: str) -> Iterator[str]:
    return (f"{_INDENT * 2}{line}" for line in text.splitlines())


def column_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each column of each capture; a capture without files has one of its own."""
    rows = []
    for capture in found["captures"]:
        about = {name: found[name] for name in ("run_id", "attempt", "rollout_id", "step_id")}
        about |= {
            name: capture.get(name) for name in ("rank", "part", "owner", "samples", "tokens")
        }
        about["producer"] = json_text(capture.get("producer"))
        about["problem"] = capture.get("problem")
        rows += [
            about | {"path": file["path"], "column": name} | seal
            for file in capture.get("files", [])
            for name, seal in file["columns"].items()
        ] or [about]
    return rows
