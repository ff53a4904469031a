"""A replay report as text: what diverged in full, what passed in a line, the verdict last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from trajreplay.cli.terminal.text import counted, number, printable

if TYPE_CHECKING:
    from trajreplay.stages import CohortReport, Divergence, Finding, Report, StageResult

_FULL_COHORTS = 3
_LISTED_COHORTS = 10
_DIVERGENCES = 3
_VERDICT_WIDTH = 8
_HANDOFF = "handoff."  # begins the field of a value that a step took over from its rollout
_VERDICTS = ("diverged", "refused", "unverified", "precision", "pass")
_COLORS = {
    "pass": "green",
    "precision": "yellow",
    "diverged": "red",
    "refused": "magenta",
    "unverified": "magenta",
}


class ReportText:
    """Renders one report.

    Args:
        report: What a replay found.
        color: Whether verdicts are coloured.
        everything: Whether every cohort and divergence is shown in full.
    """

    def __init__(self, report: Report, *, color: bool = False, everything: bool = False) -> None:
        self._cohorts = report.cohorts
        self._report = report
        self._color = color
        self._everything = everything
        self._several_runs = len({one.run_id for one in report.cohorts}) > 1
        self._several_attempts = any(one.attempt for one in report.cohorts)

    def render(self) -> str:
        """The whole text, ending in a line that has the verdict."""
        lines: list[str] = []
        if self._everything or len(self._cohorts) <= _FULL_COHORTS:
            for cohort in self._cohorts:
                lines += [*self._in_full(cohort), ""]
        else:
            for verdict in _VERDICTS[:-1]:
                lines += self._of_verdict([one for one in self._cohorts if one.verdict == verdict])
            passing = [one for one in self._cohorts if one.verdict == "pass"]
            if 0 < len(passing) < len(self._cohorts):
                verb = "passes" if len(passing) == 1 else "pass"
                lines += [self._painted(f"{counted(len(passing), 'cohort')} {verb}", "pass")]
            lines += self._inheriting(passing)
            lines += [*_warnings(passing), ""]
        for path, problem in self._report.refused.items():
            verdict = self._painted("refused", "refused")
            lines += [f"{printable(path)}: {verdict}: {printable(problem, keep=chr(10))}", ""]
        if self._report.comparison is not None:
            lines.append(f"compared as asked: {self._report.comparison}")
        text = "".join(f"{line}\n" for line in (*lines, self._closing()))
        return text.lstrip("\n")

    def _inheriting(self, passing: Sequence[CohortReport]) -> Iterator[str]:
        """Cohorts that pass on their own, and would not from what should have been before them."""
        found = [one for one in passing if _inherits(one)]
        for cohort in found[:_LISTED_COHORTS]:
            yield f"  {self._headline(cohort)}"
        if len(found) > _LISTED_COHORTS:
            more = counted(len(found) - _LISTED_COHORTS, "further cohort")
            yield f"  and {more} (--all shows every one)"

    def _of_verdict(self, cohorts: Sequence[CohortReport]) -> Iterator[str]:
        """The first cohorts of one verdict in full, some by a line each, the others counted."""
        for cohort in cohorts[:_FULL_COHORTS]:
            yield from self._in_full(cohort)
            yield ""
        rest = cohorts[_FULL_COHORTS:]
        for cohort in rest[:_LISTED_COHORTS]:
            yield self._headline(cohort)
        if len(rest) > _LISTED_COHORTS:
            more = counted(len(rest) - _LISTED_COHORTS, "further cohort")
            yield f"and {more} {cohorts[0].verdict} (--all shows every one)"
        if rest:
            yield ""

    def _in_full(self, cohort: CohortReport) -> Iterator[str]:
        yield self._headline(cohort)
        shown = [one for one in cohort.stages if one.verdict != "not-declared" or one.message]
        width = max([_VERDICT_WIDTH, *(len(one.verdict) for one in shown)])
        for stage in shown:
            padding = " " * (width - len(stage.verdict))
            verdict = self._painted(stage.verdict, stage.verdict)
            yield f"[{padding}{verdict}] {_stage_line(stage)}"
            yield from self._details(stage, cohort, " " * (width + 2))
        for finding in cohort.findings:
            said = finding.message == cohort.refusal  # the headline has it
            if not said and finding.stage not in {one.stage for one in shown}:
                yield _finding_line(finding, " " * 2)

    def _details(self, stage: StageResult, cohort: CohortReport, indent: str) -> Iterator[str]:
        told = {(one.field, one.sample_id, one.token) for one in stage.divergences}
        for finding in cohort.findings:
            known = (finding.check, finding.sample_id, finding.token) in told
            if finding.stage == stage.stage and not known:
                yield _finding_line(finding, indent)
        limit = len(stage.divergences) if self._everything else _DIVERGENCES
        for divergence in stage.divergences[:limit]:
            yield indent + _divergence_line(divergence)
        more = max(stage.mismatches, len(stage.divergences)) - min(limit, len(stage.divergences))
        if stage.divergences and more > 0:
            yield f"{indent}and {more:,} more"

    def _headline(self, cohort: CohortReport) -> str:
        run = f"run {printable(cohort.run_id)} " if self._several_runs else ""
        attempt = f"attempt {cohort.attempt} " if self._several_attempts else ""
        step = "" if cohort.step_id is None else f" step {cohort.step_id}"
        ranks = ",".join(map(str, cohort.ranks))
        noun = "rank" if len(cohort.ranks) == 1 else "ranks"
        place = f"{run}{attempt}rollout {cohort.rollout_id}{step} ({noun} {ranks})"
        stage = cohort.first_divergent_stage
        if stage:
            return f"{place}: first divergent stage: {self._painted(stage, 'diverged')}"
        if _inherits(cohort):
            verdict = self._painted(cohort.verdict, cohort.verdict)
            return f"{place}: {verdict}, and inherits what is wrong before it"
        reason = printable(cohort.refusal, keep="\n")
        if not reason and (cohort.partial or cohort.unproven):
            reason = "ranks are missing" if cohort.partial else "ranks may be missing"
        verdict = self._painted(cohort.verdict, cohort.verdict)
        return f"{place}: {verdict}{f': {reason}' if reason else ''}"

    def _closing(self) -> str:
        """The verdict over everything, where it begins, and how many cohorts have which."""
        report = self._report
        verdict = self._painted(report.verdict, report.verdict)
        cohorts = counted(len(self._cohorts), "cohort")
        counts = Counter[str](one.verdict for one in self._cohorts)
        if len(counts) < 2:
            parts = cohorts
        else:
            found = (f"{counts[one]} {one}" for one in _VERDICTS if counts[one])
            parts = f"of {cohorts} {', '.join(found)}"
        stage = report.first_divergent_stage
        skipped = {
            one.stage
            for cohort in self._cohorts
            for one in cohort.stages
            if one.verdict == "skipped"
        }
        if self._report.refused:
            parts += f"; {counted(len(self._report.refused), 'source')} refused"
        left = f"; not compared: {', '.join(sorted(skipped))}" if skipped else ""
        return f"{verdict}: {f'first divergent stage {stage}; ' if stage else ''}{parts}{left}"

    def _painted(self, text: str, verdict: str) -> str:
        if not self._color or verdict not in _COLORS:
            return text
        return click.style(text, fg=_COLORS[verdict])


def _inherits(cohort: CohortReport) -> bool:
    return cohort.verdict in ("pass", "precision") and any(one.inherited for one in cohort.stages)


def _stage_line(stage: StageResult) -> str:
    text = stage.stage
    if stage.message:
        text += f": {printable(stage.message, keep=chr(10))}"
    elif stage.verdict == "diverged" and stage.mismatches:
        text += f": {counted(stage.mismatches, 'value')}"
        text += f" of {stage.compared:,}" if stage.compared else ""
    elif stage.verdict == "precision" and stage.max_abs_error is not None:
        text += f": max abs {_short(stage.max_abs_error)}, within the bound of its rounding"
    if stage.inherited:
        error = "" if stage.chained_error is None else f"max abs {_short(stage.chained_error)} "
        text += f" (inherits: {error}when chained)"
    if stage.suspect:
        text += f" (suspect: {stage.suspect})"
    return text


def _divergence_line(one: Divergence) -> str:
    where = one.field
    if one.sample_id is not None:
        where += f" {printable(one.sample_id)}"
    if one.token is not None:
        where += f" token {one.token}"
    inside = [] if one.group_id is None else [printable(one.group_id)]
    inside += [] if one.rank is None else [f"rank {one.rank}"]
    place = f" ({', '.join(inside)})" if inside else ""
    ratio = "" if one.ratio is None else f", ratio {_short(one.ratio)}"
    other = "rollout has" if one.field.startswith(_HANDOFF) else "recomputed"
    return (
        f"{where}{place}: recorded {number(one.recorded)}, {other} {number(one.recomputed)}, "
        f"abs {_short(one.abs_error)}{ratio}"
    )


def _finding_line(one: Finding, indent: str) -> str:
    where = "" if one.sample_id is None else f" {printable(one.sample_id)}"
    where += "" if one.token is None else f" token {one.token}"
    return f"{indent}{one.severity} {one.check}{where}: {printable(one.message)}"


def _warnings(cohorts: Sequence[CohortReport]) -> Iterator[str]:
    """The warnings of cohorts that passed: the first of each kind, and how many more there are."""
    found: dict[str, list[Finding]] = {}
    for cohort in cohorts:
        for one in cohort.findings:
            if one.severity == "warning":
                found.setdefault(one.check, []).append(one)
    for alike in found.values():
        more = f" (and {len(alike) - 1} more like it)" if len(alike) > 1 else ""
        yield _finding_line(alike[0], "  ") + more


def _short(value: float) -> str:
    return number(value, 6)
