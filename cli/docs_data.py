"""The generated parts of the documents that list what is declared: columns, stages, rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from trajreplay.cli.docs_verbs import table
from trajreplay.cli.verbs.capability import matrix_rows
from trajreplay.cli.verbs.profiles import profile_rows
from trajreplay.cli.verbs.schema import column_rows, stage_rows, tables

_LINK = re.compile(r"https?://\S+|arXiv:(\d{4}\.\d{5})")


def columns() -> str:
    """The columns of each table; a table that extends an earlier one lists what it adds."""
    parts: list[str] = []
    described: dict[str, set[tuple[str, ...]]] = {}
    for name, one in tables().items():
        rows = [
            (
                f"`{row['column']}`",
                row["type"] + ("" if not row["nullable"] else ", may be null"),
                row["unit"],
                row["doc"],
            )
            for row in column_rows(name)
        ]
        base = next((old for old, seen in described.items() if len(seen & set(rows)) > 20), None)
        shown = [row for row in rows if base is None or row not in described[base]]
        described[name] = set(rows)
        extends = f" It has the columns of `{base}` and these:" if base else ""
        key = ", ".join(f"`{column}`" for column in one.key)
        parts.append(
            f"### `{name}`\n\n{one.doc} Key: {key}.{extends}\n\n"
            + table(("column", "type", "unit", "what it is"), shown)
        )
    return "\n".join(parts)


def stages() -> str:
    """The stages with their equations and sources."""
    return table(
        ("stage", "reads", "writes", "equation", "source"),
        [
            (
                f"`{row['stage']}`",
                row["inputs"],
                row["outputs"],
                f"`{row['equation']}`",
                _LINK.sub(_linked, row["source"]),
            )
            for row in stage_rows()
        ],
    )


def _linked(found: re.Match[str]) -> str:
    return f"[{found[0]}](https://arxiv.org/abs/{found[1]})" if found[1] else found[0]


def settings() -> str:
    """The capability matrix: every setting of each stage, and what comes of its values."""
    rows = [
        (f"`{row['stage']}`", f"`{row['setting']}`", row["recomputed"], row["otherwise"])
        for row in matrix_rows()
    ]
    return table(("stage", "setting", "recomputed", "otherwise"), rows)


def profiles() -> str:
    """The profiles of the frameworks."""
    return table(
        ("profile", "is peculiar in"),
        [(f"`{row['profile']}`", row["doc"]) for row in profile_rows()],
    )


def faults() -> str:
    """The catalogue of known mistakes, with what each makes of a stage."""
    from trajreplay.stages.faults import FAULTS

    return table(
        ("fault", "known as", "recorded values equal", "look at", "reports"),
        [
            (
                f"`{one.id}`",
                one.name,
                one.says("..."),
                one.look,
                ", ".join(_reports(one.references)),
            )
            for one in FAULTS
        ],
    )


def _reports(references: Sequence[str]) -> Iterator[str]:
    """Links to what a fault refers to, each once."""
    from trajreplay.stages.faults import REPORTS

    links = (REPORTS[one].url if one in REPORTS else one for one in references)
    for link in dict.fromkeys(links):
        owner, name, *_, number = link.removeprefix("https://github.com/").split("/")
        known = link.startswith("https://github.com/")
        yield f"[{owner}/{name}#{number[:8]}]({link})" if known else link


def metrics() -> str:
    """The metrics that are recomputed where a training logs them."""
    from trajreplay.stages.contract_checks.definitions import METRICS

    return table(
        ("metric", "is", "reads"),
        [
            (f"`{name}`", one.doc, ", ".join(f"`{need}`" for need in one.needs))
            for name, one in METRICS.items()
        ],
    )


def routes() -> str:
    """The rules of router-replay traces."""
    from trajreplay.query.routes import RULES

    return table(
        ("rule", "demands", "under"),
        [
            (
                f"`{rule.name}`",
                rule.demand + (" As far as previews go." if rule.by_previews else ""),
                "both" if len(rule.contracts) > 1 else rule.contracts[0],
            )
            for rule in RULES
        ],
    )


def gates() -> str:
    """The checks of a gate."""
    from trajreplay.stages.gate import CHECKS

    return table(
        ("check", "demands", "of the", "takes"),
        [
            (
                f"`{check.name}`",
                check.demand,
                check.phase,
                ", ".join(f"`{one.name}`" for one in check.parameters),
            )
            for check in CHECKS
        ],
    )


def statistics() -> str:
    """The statistics of a mismatch."""
    from trajreplay.query.mismatch import statistic_rows

    rows = [
        (f"`{row['statistic']}`", f"`{row['formula']}`", row["level"], row["origin"])
        for row in statistic_rows()
    ]
    return table(("statistic", "is", "over", "named as"), rows)


def kinds() -> str:
    """The kinds of files that can be imported."""
    from trajreplay.capture.importers.registry import BUILT_IN, importer_of

    return table(
        ("kind", "reads"), [(f"`{name}`", importer_of(name).doc) for name in sorted(BUILT_IN)]
    )
