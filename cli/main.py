"""The command `trajreplay`: its verbs, loaded when they are named, and how every run of it ends."""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches
from typing import Any

import click

from trajreplay import __version__
from trajreplay.cli.options.shared import LAKE_HELP, Session
from trajreplay.cli.options.types import Named
from trajreplay.cli.options.verb import EXIT_CODES, HELP, write_exit_codes
from trajreplay.cli.terminal.errors import report_error, silence_broken_pipe
from trajreplay.cli.terminal.sink import SinkError

# Verb: (module, the first sentence of its help). The modules are loaded when a verb is called; one
# whose name Python keeps for itself says after a colon what it is called there.
VERBS = {
    "init": ("trajreplay.cli.verbs.init", "Make a new, empty lake."),
    "demo": (
        "trajreplay.cli.demo.command",
        "Train a tiny policy on two ranks, capture it, replay it, and find the fault put into it.",
    ),
    "import": (
        "trajreplay.cli.verbs.importing:import_files",
        "Import files that another tool left, each whole or not at all.",
    ),
    "promote": (
        "trajreplay.cli.verbs.promote",
        "Bring what a training left in its spool into the lake.",
    ),
    "export": (
        "trajreplay.cli.verbs.export",
        "Write selected rollouts and steps for others: as bundles, or as a small lake.",
    ),
    "info": ("trajreplay.cli.verbs.overview", "Show what a lake holds, a row for each attempt."),
    "inspect": ("trajreplay.cli.verbs.overview", "Show who wrote each capture, and what is in it."),
    "validate": (
        "trajreplay.cli.verbs.validate",
        "Check that a lake, or a file of another tool, is whole, without arithmetic.",
    ),
    "snapshot": (
        "trajreplay.cli.verbs.snapshot",
        "Fold the manifest's entries into a few files, which readers open instead of one each.",
    ),
    "replay": (
        "trajreplay.cli.verbs.replay",
        "Recompute every stage from reward to loss and name the first one that differs.",
    ),
    "watch": (
        "trajreplay.cli.verbs.watch",
        "Follow a lake that is being written, and replay and gate each cohort as it becomes whole.",
    ),
    "diff": (
        "trajreplay.cli.verbs.diff",
        "Name the first place where two runs, attempts or lakes part, and how it grows.",
    ),
    "preflight": (
        "trajreplay.cli.verbs.preflight",
        "Refuse a configuration that parses but cannot work or does nothing.",
    ),
    "rules": ("trajreplay.cli.verbs.preflight", "List the rules that preflight checks."),
    "explain": (
        "trajreplay.cli.verbs.explain",
        "Say which known mistake reproduces what diverged.",
    ),
    "faults": (
        "trajreplay.cli.verbs.faults",
        "List the known mistakes that explain looks for, or show one.",
    ),
    "routes": (
        "trajreplay.cli.verbs.routes",
        "Check router-replay (R3) traces under a stated transport contract.",
    ),
    "mismatch": (
        "trajreplay.cli.verbs.mismatch",
        "Measure how far the trainer's log-probs are from the sampler's, run beside run.",
    ),
    "gate": ("trajreplay.cli.verbs.gate", "Hold a run against a policy; what is missing fails."),
    "certify": (
        "trajreplay.cli.verbs.certify",
        "Run a command under capture as a fresh attempt, then gate it.",
    ),
    "sql": ("trajreplay.cli.verbs.sql", "Ask a lake one question in SQL."),
    "profiles": (
        "trajreplay.cli.verbs.profiles",
        "List the profiles of the frameworks, show one, or compare two.",
    ),
    "capability": ("trajreplay.cli.verbs.capability", "Print the capability matrix."),
    "schema": ("trajreplay.cli.verbs.schema", "List the columns of the tables, or the stages."),
}


class Verbs(click.Group):
    """A group that knows its commands by name and imports them on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order in which a newcomer meets them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one verb."""
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name or cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb; of a word that is none, say which verbs are near.

        Raises:
            click.UsageError: There is no such verb.
        """
        word = args[0]
        if word in VERBS or word.startswith("-"):
            return super().resolve_command(ctx, args)
        near = [one for one in VERBS if word and one.startswith(word)]
        near += [
            one for one in get_close_matches(word.lower(), VERBS, cutoff=0.7) if one not in near
        ]
        told = f"; did you mean {' or '.join(near)}?" if near else ""
        raise click.UsageError(f"no verb {word!r}{told}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without loading them: `--help` has to be quick."""
        with formatter.section("Verbs"):
            formatter.write_dl([(name, line) for name, (_, line) in VERBS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; a reader of the output that has gone away is no failure of ours."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (BrokenPipeError, SinkError) as error:
            if not isinstance(error.__cause__ or error, BrokenPipeError):
                raise
            silence_broken_pipe()
            ctx.exit(141)  # 128 + SIGPIPE, as the shell reports it for any other program
        return result

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what comes below the verbs."""
        write_exit_codes(formatter, EXIT_CODES)
        with formatter.section("Example"):
            formatter.write("  trajreplay demo\n")

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run, report errors on stderr, and end with the exit code that stands for the outcome."""
        standalone = extra.pop("standalone_mode", True)
        session = Session()
        extra |= {"standalone_mode": False, "obj": session}
        try:
            result = super().main(*args, **extra)
        except Exception as error:  # noqa: BLE001 - the last stop: a traceback is a bug
            result = report_error(error, verbose=session.verbose, lake=session.named)
        return sys.exit(result or 0) if standalone else result


@click.group(cls=Verbs, name="trajreplay", context_settings=HELP)
@click.version_option(__version__, message="trajreplay %(version)s")
@click.option("--lake", type=Named(), envvar="TRAJREPLAY_LAKE", metavar="PATH", help=LAKE_HELP)
@click.pass_obj
def main(session: Session, lake: str | None) -> None:
    """A flight recorder for RL post-training: capture, query, replay, name the first divergence."""
    session.lake = lake
