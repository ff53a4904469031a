"""`trajreplay gate`: a run held against a policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from trajreplay.cli.options.shared import lake_option, output_options
from trajreplay.cli.options.types import Named
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.text import counted, printable
from trajreplay.cli.verdict_file import JudgingVerb, VerdictFile, verdict_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from trajreplay.stages.gate import CheckVerdict, GateVerdict, Policy

_TOLD = 5  # steps that a line names
_COLORS = {"pass": "green", "fail": "red", "not-judged": "yellow"}


class AttemptNumbers(click.ParamType[tuple[int, ...]]):
    """One attempt, or those of a chain with commas between them."""

    name = "N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Refuse what are no numbers in rising order."""
        if isinstance(value, tuple):
            return value
        parts = [one.strip() for one in str(value).split(",")]
        if not all(one.isascii() and one.isdigit() for one in parts):
            self.fail(f"{value!r} is no attempt, expected 0, or a chain such as 0,1", param, ctx)
        numbers = tuple(map(int, parts))
        if list(numbers) != sorted(set(numbers)):
            self.fail(f"{value!r} is no chain, expected rising numbers such as 0,1", param, ctx)
        return numbers


def policy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that count before what a policy states; one argument `stated` has them."""
    for option in reversed(
        (
            click.option(
                "--max-steps",
                type=click.IntRange(min=1),
                metavar="N",
                help="Optimizer steps of the whole chain. Default: the policy's.",
            ),
            click.option(
                "--kind",
                type=click.Choice(["direct", "intermediate", "final"]),
                help="A run of its own, one of a chain that may end early and certifies nothing, "
                "or the last of a chain. Default: the policy's.",
            ),
            click.option(
                "--traces",
                type=Named(),
                metavar="FOLDER",
                help="Router-replay traces, where the policy checks routes. Default: the policy's.",
            ),
            click.option(
                "--contract",
                type=click.Choice(["legacy-async", "transfer-queue"]),
                help="How routes travel. Default: the policy's.",
            ),
        )
    ):
        command = option(command)
    return command


def stated_policy(
    named: str,
    *,
    max_steps: int | None,
    kind: str | None,
    traces: str | None,
    contract: str | None,
) -> Policy:
    """The policy with what the command line states."""
    from trajreplay.stages.gate import load_gate_policy

    policy = load_gate_policy(named, max_steps=max_steps, run=kind)
    return policy.with_parameters("routes", traces=traces, contract=contract)


@click.command(
    cls=JudgingVerb,
    exit_codes={
        0: "Every check holds.",
        1: "A check fails.",
        2: "The policy or the command line is malformed, or names no run or attempt of the lake.",
        3: "The lake cannot be read.",
    },
    example="trajreplay gate replay-clean --run r3-on --attempt 0",
)
@verdict_option()
@lake_option
@click.argument(
    "policy",
    type=Named(),
    metavar="POLICY",
    help="TOML file, or router-replay, replay-clean, mismatch-baseline.",
)
@click.option("--run", metavar="ID", help="The run. Default: the only one of the lake.")
@click.option(
    "--attempt",
    "--attempts",
    "attempts",
    type=AttemptNumbers(),
    required=True,
    help="The attempt that is judged, or the chain that it ends, such as 0,1. Nothing else counts.",
)
@policy_options
@click.option(
    "--command-exit",
    type=click.IntRange(0, 255),
    metavar="CODE",
    help="Exit code of the command that ran the attempt. Default: not known.",
)
@output_options
def gate(
    lake_path: str,
    policy: str,
    run: str | None,
    attempts: tuple[int, ...],
    command_exit: int | None,
    kept: VerdictFile,
    output: Output,
    **stated: Any,
) -> None:
    """Hold a run against a policy; what is missing fails.

    Only the attempts that are named count. Every check is made, those of the first phase that
    fails are told first.
    """
    from trajreplay.lake import Lake

    held = stated_policy(policy, **stated)
    found = Lake.open(lake_path).gate(held, run, attempts, command_exit=command_exit)
    tell(found, output, kept)
    click.get_current_context().exit(found.exit_code)


def tell(found: GateVerdict, output: Output, kept: VerdictFile) -> None:
    """Write a verdict to its file, and show it."""
    kept.write(found.to_json())
    if output.format == "json":
        output.document(found.to_json())
    elif output.is_text:
        output.text("".join(f"{line}\n" for line in verdict_lines(found, color=output.has_color)))
    else:
        output.rows(found.arrow())


def verdict_lines(found: GateVerdict, *, color: bool = False) -> Iterator[str]:
    """One line a check, those that fail in the first failing phase before all others."""
    for one in found.checks:
        word = f"[{one.verdict:>{len('not-judged')}}]"
        told = click.style(word, fg=_COLORS[one.verdict]) if color else word
        yield f"{told} {printable(_line(one))}"
    attempts = ",".join(map(str, found.attempts))
    noun = "attempt" if len(found.attempts) == 1 else "attempts"
    line = (
        f"{found.verdict}: {found.run} run {found.run_id!r}, {noun} {attempts}, captured "
        f"{found.captured} of {counted(len(found.steps), 'step')}"
    )
    if found.captured and found.not_captured:
        more = " ..." if len(found.not_captured) > _TOLD else ""
        line += f", not {', '.join(found.not_captured[:_TOLD])}{more}"
    if found.failing:
        line += f"; first failing phase {found.failing_phase}"
    elif found.verdict == "fail":
        line += "; no check was judged"
    elif found.run == "intermediate":
        line += "; an intermediate run certifies nothing"
    elif not found.certifies:
        line += f"; certifies nothing: {', '.join(found.open)} not judged"
    yield ""
    yield printable(line)


def _line(one: CheckVerdict) -> str:
    if one.verdict == "pass":
        unit = f" {one.unit}" if one.unit else ""
        reserve = f"; {one.reason}" if one.reason else ""
        value = _routes(one.value) if one.check == "routes" else _shown(one.value)
        return f"{one.check}: {value}{unit} ({one.bound}{reserve})"
    return f"{one.check}: {one.reason} (demanded: {one.bound})"


def _routes(value: dict[str, dict[str, Any]]) -> str:
    """Of each attempt how many records were checked, and the steps that they are of."""
    parts = []
    for attempt, one in value.items():
        told = counted(one["records"], "record")
        if one["left_out"]:
            told += f" and {one['left_out']} left out"
        for stage, steps in one["traced"].items():
            told += f", {stage} of step {_steps(steps)}" if steps else f", {stage}"
        parts.append(f"attempt {attempt}: {told}")
    return "; ".join(parts)


def _steps(names: list[str]) -> str:
    return ", ".join(names[:_TOLD]) + (" ..." if len(names) > _TOLD else "")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    if isinstance(value, list):
        more = " ..." if len(value) > _TOLD else ""
        return f"[{', '.join(map(str, value[:_TOLD]))}{more}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
