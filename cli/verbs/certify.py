"""`trajreplay certify`: a command run under capture as a fresh attempt, then gated."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajreplay.cli.options.shared import lake_option, output_options
from trajreplay.cli.options.types import Named
from trajreplay.cli.options.verb import HELP
from trajreplay.cli.running import NOT_FOUND, NOT_RUN, check_runnable, run_command
from trajreplay.cli.terminal.errors import REFUSED, report_error
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.sink import SinkError
from trajreplay.cli.verbs.gate import policy_options, stated_policy, tell
from trajreplay.cli.verdict_file import JudgingVerb, VerdictFile, told, verdict_option

if TYPE_CHECKING:
    from trajreplay.schema.store import Store


@click.command(
    cls=JudgingVerb,
    context_settings={**HELP, "allow_interspersed_args": False},
    exit_codes={
        0: "The command ended with 0 and every check holds.",
        1: "The command ended with 0 and a check fails.",
        2: "The policy or the command line is malformed; nothing was run.",
        3: "The command ended with 0 and its attempt cannot be judged, or nothing was run: the "
        "lake cannot be read or written.",
        NOT_RUN: "The command may not be executed; no attempt was used up.",
        NOT_FOUND: "There is no such command; no attempt was used up.",
        130: "",
    },
    example="trajreplay certify --policy replay-clean --run r1 -- python train.py",
)
@verdict_option("verdict.json")
@lake_option
@click.option(
    "--policy",
    required=True,
    type=Named(),
    metavar="POLICY",
    help="TOML file, or router-replay, replay-clean, mismatch-baseline.",
)
@click.option("--run", required=True, metavar="ID", help="The run that the attempt is of.")
@click.option(
    "--resume-rollout",
    type=click.IntRange(min=0),
    metavar="R",
    help="The trainer loads what the last attempt saved, and this is the first rollout that it "
    "samples anew, as it says, too. Both are judged as one chain. Default: the first attempt of a "
    "run resumes nothing.",
)
@click.option(
    "--no-resume",
    is_flag=True,
    help="The trainer starts anew: nothing is taken from earlier attempts of the run, and this one "
    "is judged alone.",
)
@policy_options
@click.argument(
    "command",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    help="The command and its arguments, as they are; best behind --.",
)
@output_options
def certify(
    lake_path: str,
    policy: str,
    run: str,
    resume_rollout: int | None,
    no_resume: bool,
    kept: VerdictFile,
    command: tuple[str, ...],
    output: Output,
    **stated: Any,
) -> None:
    """Run a command under capture as a fresh attempt, then gate it.

    The attempt is reserved in the lake and capture switched on for the command; its output passes
    through, signals reach it. What can be known to fail before the command runs is refused, and no
    attempt is used up. A code other than 0 that the command ends with is kept, 128 and the signal
    where it was killed; the verdict is written in every case, and says so where the attempt cannot
    be judged.

    From the second attempt of a run on, say what it begins with: --resume-rollout R where the
    trainer loads what the last attempt saved and goes on with rollout R, --no-resume where it
    starts anew.
    """
    from trajreplay.lake import Lake
    from trajreplay.stages.gate import check_meetable

    held = stated_policy(policy, **stated)
    check_meetable(held, policy)
    check_runnable(command[0])
    store, attempt = _reserved(lake_path, run, resume_rollout, no_resume, kept)
    traces = held.checks.get("routes", {}).get("traces")
    if traces is not None and not Path(traces).exists():
        output.note(f"{traces} is not there yet: traces are found if the command makes this folder")
    switches = {
        "TRAJREPLAY_CAPTURE": "1",
        "TRAJREPLAY_LAKE": str(store),
        "TRAJREPLAY_RUN_ID": run,
        "TRAJREPLAY_ATTEMPT": str(attempt),
    }
    # This program may be killed, too.
    kept.leave("the command has not ended", attempts=[attempt])
    ended = run_command(command, switches)
    kept.told["command"] = {"exit": ended.exit, "signal": ended.signal}
    code = None
    try:
        kept.leave("the command has ended, and its attempt is not judged yet")
        chain = _chain(store, run, attempt)
        found = Lake.open(lake_path).gate(
            held,
            run,
            chain,
            command_exit=ended.exit,
            command_signal=ended.signal,
        )
        code = found.exit_code
        tell(found, output, kept)
        _tell_of_others(output, run, chain)
    except Exception as error:
        if code is None:
            with suppress(SinkError, click.UsageError):  # it may be what cannot be written
                kept.leave(f"the attempt cannot be judged: {told(error)}")
        elif not ended.code:
            raise
        report_error(error, verbose=output.verbose)
    click.get_current_context().exit(ended.code or (REFUSED if code is None else code))


def _reserved(
    lake_path: str, run: str, resume_rollout: int | None, no_resume: bool, kept: VerdictFile
) -> tuple[Store, int]:
    """The lake, and a fresh attempt of the run.

    Raises:
        click.UsageError: The run is named by no id, or what the attempt begins with is not said, or
            said twice, or is what no attempt left.
        DatasetError: The lake cannot be made or read.
        CaptureError: Another run of the lake has the same id but for its case.
    """
    from trajreplay.schema import SchemaError
    from trajreplay.schema.identity import check_id
    from trajreplay.schema.lakefile import create_lake
    from trajreplay.writer.attempts import attempts_of, reserve_next_attempt

    if resume_rollout is not None and no_resume:
        raise click.UsageError("--resume-rollout and --no-resume are given, expected one of them")
    try:
        check_id("run_id", run)
    except SchemaError as error:
        raise click.BadParameter(f"{error.message}. {error.hint}", param_hint="'--run'") from error
    store = create_lake(lake_path, exist_ok=True)
    kept.leave("the command has not begun")  # refused where the lake lies around it
    before = max(attempts_of(store, run), default=None)
    if before is None and resume_rollout:
        raise click.UsageError(
            f"--resume-rollout {resume_rollout} is given, and run {run!r} has no attempt in "
            f"{store} to resume from; leave it out, or name the run and the lake of that attempt"
        )
    if before is not None and resume_rollout is None and not no_resume:
        raise click.UsageError(
            f"run {run!r} has attempts already, the last is {before}; expected one of\n"
            f"  --resume-rollout R  where the trainer loads what attempt {before} saved and goes "
            "on with\n"
            "                      rollout R: both are judged as one chain\n"
            "  --no-resume         where it starts anew: the new attempt is judged alone\n"
            "since nothing is recorded of a trainer that resumes where its attempt does not"
        )
    return store, reserve_next_attempt(store, run, resume_rollout).attempt


def _tell_of_others(output: Output, run: str, chain: tuple[int, ...]) -> None:
    """Say how other commands are told which attempt they are to show."""
    beside = [one for one in range(chain[-1]) if one not in chain]
    if beside:
        output.note(
            f"run {run!r} has attempts that this one does not continue, "
            f"{', '.join(map(str, beside))}: where they hold the same rollouts other commands need "
            f"--attempt {chain[-1]}. To continue the last one: --resume-rollout R"
        )


def _chain(store: Store, run: str, attempt: int) -> tuple[int, ...]:
    """The attempt, behind those that it continues."""
    from trajreplay.query import Catalog

    catalog, chain = Catalog.open(store), [attempt]
    while (resumed := catalog.resumed_from(run, chain[0])) is not None:
        chain.insert(0, resumed.attempt)
    return tuple(chain)
