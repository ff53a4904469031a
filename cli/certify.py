"""`trajreplay certify`: a command run under capture as a fresh attempt, then gated."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajreplay.cli.errors import REFUSED, report_error
from trajreplay.cli.gate import policy_options, stated_policy, tell
from trajreplay.cli.options import lake_option, output_options
from trajreplay.cli.output import Output
from trajreplay.cli.sink import SinkError
from trajreplay.cli.verb import HELP, Verb

if TYPE_CHECKING:
    from trajreplay.schema.store import Store

# Those that end a program unless it handles them, and that others send it: the last two are what
# schedulers warn a job with.
_FORWARDED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_NOT_FOUND, _NOT_RUN = 127, 126  # as a shell says it


@dataclass(frozen=True)
class Ended:
    """How a command ended: with an exit code, or killed by a signal."""

    exit: int | None
    signal: int | None = None

    @property
    def code(self) -> int:
        """The exit code that a shell gives: 128 and the signal where it was killed."""
        return 128 + (self.signal or 0) if self.exit is None else self.exit


@click.command(
    cls=Verb,
    context_settings={**HELP, "allow_interspersed_args": False},
    exit_codes={
        0: "The command ended with 0 and every check holds.",
        1: "The command ended with 0 and a check fails.",
        2: "The policy or the command line is malformed; nothing was run.",
        3: "The command ended with 0 and its attempt cannot be judged, or nothing was run: the "
        "lake cannot be read or written.",
        130: "",
    },
    example="trajreplay certify --policy replay-clean --run r1 -- python train.py",
)
@lake_option
@click.option(
    "--policy",
    required=True,
    metavar="POLICY",
    help="TOML file, or router-replay, replay-clean, mismatch-baseline.",
)
@click.option("--run", required=True, metavar="ID", help="The run that the attempt is of.")
@click.option(
    "--resume-rollout",
    type=click.IntRange(min=0),
    metavar="R",
    help="The first rollout that is not taken from the attempt before, as the trainer says, too.",
)
@click.option("--no-resume", is_flag=True, help="Nothing is taken from the attempt before.")
@policy_options
@click.option(
    "--verdict",
    "verdict_path",
    type=click.Path(dir_okay=False, path_type=Path),
    default="verdict.json",
    show_default=True,
    help="Write the verdict as JSON into this file, whole or not at all.",
)
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
    verdict_path: Path,
    command: tuple[str, ...],
    output: Output,
    **stated: Any,
) -> None:
    """Run a command under capture as a fresh attempt, then gate it.

    The attempt is reserved in the lake and capture switched on for the command; its output passes
    through, signals reach it. After the first attempt of a run, say whether it resumes. A code
    other than 0 that it ends with is kept, 128 and the signal where it was killed; the verdict is
    written in every case, and says so where the attempt cannot be judged.
    """
    from trajreplay.lake import Lake
    from trajreplay.schema.lakefile import create_lake
    from trajreplay.writer.attempts import attempts_of, reserve_next_attempt

    held = stated_policy(policy, **stated)
    store = create_lake(lake_path, exist_ok=True)
    if resume_rollout is not None and no_resume:
        raise click.UsageError("--resume-rollout and --no-resume are given, expected one of them")
    if resume_rollout is None and not no_resume and attempts_of(store, run):
        raise click.UsageError(
            f"run {run!r} has attempts already; expected --resume-rollout R or --no-resume, since "
            "nothing is recorded of a trainer that resumes where its attempt does not"
        )
    attempt = reserve_next_attempt(store, run, resume_rollout).attempt
    switches = {
        "TRAJREPLAY_CAPTURE": "1",
        "TRAJREPLAY_LAKE": str(store),
        "TRAJREPLAY_RUN_ID": run,
        "TRAJREPLAY_ATTEMPT": str(attempt),
    }
    # What lay there before is of another attempt, and this program may be killed, too.
    unjudged = {"verdict": "fail", "certifies": False, "run_id": run, "attempts": [attempt]}
    leave = Output("json", verdict_path).document
    leave({**unjudged, "reason": "the command has not ended"})
    ended = run_command(command, switches)
    unjudged["command"] = {"exit": ended.exit, "signal": ended.signal}
    code = None
    try:
        leave({**unjudged, "reason": "the command has ended, and its attempt is not judged yet"})
        chain = _chain(store, run, attempt)
        found = Lake.open(lake_path).gate(
            held,
            run,
            chain,
            command_exit=ended.exit,
            command_signal=ended.signal,
        )
        code = found.exit_code
        tell(found, output, verdict_path)
        _tell_of_others(output, run, chain)
    except Exception as error:
        if code is None:
            with suppress(SinkError, click.UsageError):  # it may be what cannot be written
                leave({**unjudged, "reason": f"the attempt cannot be judged: {_told(error)}"})
        elif not ended.code:
            raise
        report_error(error, verbose=output.verbose)
    click.get_current_context().exit(ended.code or (REFUSED if code is None else code))


def _told(error: Exception) -> str:
    return getattr(error, "message", "") or f"{type(error).__name__}: {error}"


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


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Run a command with more in its environment, and wait until it has ended.

    Signals that would end this program are passed on to it instead.
    """
    try:
        process = subprocess.Popen(command, env={**os.environ, **environment})
    except OSError as error:
        click.echo(f"Error: {command[0]}: {error.strerror}", err=True)
        return Ended(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUN)
    with _passed_on(process):
        code = process.wait()
    return Ended(None, -code) if code < 0 else Ended(code)


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on to the process; a terminal sends Ctrl-C to both, which is no harm."""

    def forward(number: int, _: object) -> None:
        process.send_signal(number)

    before = {one: signal.signal(one, forward) for one in _FORWARDED}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
