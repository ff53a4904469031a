"""`trajreplay preflight` and `trajreplay rules`: configurations refused before a cluster starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajreplay.cli.options.shared import output_options
from trajreplay.cli.options.types import Place
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.errors import DIFFERS, REFUSED
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.text import counted, printable

if TYPE_CHECKING:
    from trajreplay.query.preflight import PreflightReport, RuleSet

FRAMEWORK_NAMES = ("nemo-rl", "verl", "trl", "slime", "relax", "openrlhf", "areal", "prime-rl")
_COLORS = {"error": "red", "warning": "yellow"}
_EXIT_CODES = {"ok": 0, "refused": DIFFERS, "unverified": REFUSED}
_RULES = click.option(
    "--rules",
    "rule_files",
    multiple=True,
    type=Place(dir_okay=False),
    help="TOML file with more rules; may be repeated. Default: those of the package only.",
)


@click.command(
    cls=Verb,
    exit_codes={
        0: "No rule of severity error is broken.",
        1: "One is: the configuration cannot work as written.",
        2: "The command line, the configuration or a file of rules is wrong.",
        3: "The rules say nothing of it: it is another framework's, has defaults alone, or is of a "
        "version that they do not know.",
    },
    example="trajreplay preflight grpo.yaml --framework nemo-rl@0.6 --fact entry=legacy "
    "grpo.async_grpo.enabled=true",
)
@click.argument(
    "config",
    type=Place(dir_okay=False),
    help="YAML, JSON or TOML file of the training.",
)
@click.argument(
    "overrides",
    nargs=-1,
    metavar="[PATH=VALUE]...",
    help="Settings that the training is started with beside the file.",
)
@click.option(
    "--framework",
    required=True,
    metavar="NAME[@VERSION]",
    help=f"Whose configuration it is: {', '.join(FRAMEWORK_NAMES)}.",
)
@click.option(
    "--fact",
    "facts",
    multiple=True,
    metavar="NAME=VALUE",
    help="What no configuration says, such as dataset_size=8000; may be repeated.",
)
@_RULES
@output_options
def preflight(
    config: Path,
    overrides: tuple[str, ...],
    framework: str,
    facts: tuple[str, ...],
    rule_files: tuple[Path, ...],
    output: Output,
) -> None:
    """Refuse a configuration that parses but cannot work or does nothing.

    Every finding has the setting, its value, why, and what to write instead. A rule that hangs on a
    fact or a version that was not stated, or on a setting whose value does not tell, such as an
    interpolation or a number in quotes, is named on stderr, and refuses nothing.
    """
    from trajreplay.query.preflight import load_config, load_rules
    from trajreplay.query.preflight import preflight as check

    name, _, version = framework.partition("@")
    report = check(
        load_config(config, overrides),
        name,
        version=version or None,
        facts=dict(_fact(one) for one in facts),
        more=[load_rules(one) for one in rule_files],
    )
    if output.format == "table":
        lines = preflight_lines(report, color=output.has_color)
        output.text("".join(f"{line}\n" for line in lines))
    else:
        output.rows(report.arrow())
        output.note(_summary(report))
    by_missing: dict[str, list[str]] = {}
    for rule, missing in report.undecided.items():
        stated = [
            "--framework NAME@VERSION" if one == "version" else f"--fact {one}=..."
            for one in missing
        ]
        by_missing.setdefault(" and ".join(stated), []).append(rule)
    for stating, names in by_missing.items():
        output.note(f"not decided without {stating}: {', '.join(names)}")
    by_written: dict[str, list[str]] = {}
    for rule, settings in report.unread.items():
        told = " and ".join(f"{path} is {_quoted(value)}" for path, value in settings.items())
        by_written.setdefault(told, []).append(rule)
    for told, names in by_written.items():
        output.note(f"not decided since {told}: {', '.join(names)}")
    click.get_current_context().exit(_EXIT_CODES[report.verdict])


@click.command(
    cls=Verb,
    exit_codes={1: "", 2: "There is no such framework, or a file of rules is wrong.", 3: ""},
    example="trajreplay rules --framework nemo-rl",
)
@click.option(
    "--framework",
    type=click.Choice(FRAMEWORK_NAMES),
    help="Only the rules of this one. Default: all.",
)
@_RULES
@output_options
def rules(framework: str | None, rule_files: tuple[Path, ...], output: Output) -> None:
    """List the rules that preflight checks.

    Each is data: a condition over dotted paths under which a configuration is refused, for all
    versions of a framework or some.
    """
    import pyarrow as pa

    from trajreplay.query.preflight import built_in, load_rules

    sets = [built_in(one) for one in FRAMEWORK_NAMES if framework in (None, one)]
    sets += [one for one in map(load_rules, rule_files) if framework in (None, one.framework)]
    output.rows(pa.Table.from_pylist(rule_rows(sets)), cell_width=None)


def rule_rows(sets: list[RuleSet]) -> list[dict[str, Any]]:
    """A row for each rule."""
    return [
        {
            "rule": rule.name,
            "revision": rule.revision,
            "severity": rule.severity,
            "versions": rule.versions or "all",
            "refuses": rule.when,
            "source": rule.source,
        }
        for of in sets
        for rule in of.rules
    ]


def preflight_lines(report: PreflightReport, *, color: bool = False) -> Iterator[str]:
    """Each finding with why and what to write instead, and a closing line."""
    from trajreplay.query.preflight.check import shown

    for one in report.findings:
        severity = click.style(one.severity, fg=_COLORS[one.severity]) if color else one.severity
        where = printable(f"{one.rule.path} is {shown(one.value)}")
        yield f"{severity} {printable(one.rule.name)}: {where}"
        yield f"  why: {printable(one.rule.why)}"
        yield f"  instead: {printable(one.rule.instead)}"
    yield _summary(report)


def _summary(report: PreflightReport) -> str:
    errors = sum(one.severity == "error" for one in report.findings)
    warnings = len(report.findings) - errors
    found = [counted(errors, "error")] if errors else []
    found += [counted(warnings, "warning")] if warnings else []
    open_rules = report.undecided.keys() | report.unread.keys()
    left = f", {len(open_rules)} not decided" if open_rules else ""
    version = f" {report.version}" if report.version else ""
    unread = f"; {report.unverified}" if report.unverified else ""
    return (
        f"{report.verdict}: {counted(report.checked, 'rule')} of "
        f"{report.framework}{version}: {', '.join(found) or 'nothing found'}{left}{unread}"
    )


def _quoted(value: Any) -> str:
    """A value as a configuration writes it, text in quotes."""
    from trajreplay.query.preflight.check import shown

    return f'"{value}"' if isinstance(value, str) else shown(value)


def _fact(text: str) -> tuple[str, Any]:
    from trajreplay.query.preflight.configs import parse_value

    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise click.BadParameter(f"{text!r}, expected NAME=VALUE", param_hint="'--fact'")
    try:
        return name, parse_value(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--fact'") from error
