"""A replay report as a person reads it."""

from trajreplay.cli.shown.report_text import ReportText
from trajreplay.stages.report import CohortReport, Divergence, Finding, Report, StageResult


def cohort(
    *stages: StageResult,
    rollout: int = 120,
    step: int | None = 0,
    findings: tuple[Finding, ...] = (),
    refusal: str = "",
    run: str = "r1",
    attempt: int = 0,
    ranks: tuple[int, ...] = (0, 1),
) -> CohortReport:
    return CohortReport(
        run, attempt, rollout, step, list(ranks), list(stages), list(findings), refusal
    )


def diverged(count: int = 1) -> StageResult:
    divergence = Divergence("reward", -5.5, -1.0, sample_id="s-0", group_id="g-0", rank=0)
    return StageResult(
        "reward.post_process",
        "diverged",
        isolated="diverged",
        mismatches=8,
        message="8 of 16 samples",
        divergences=[divergence] * count,
    )


PASSED = StageResult("sample", "pass")


def text(*cohorts: CohortReport, color: bool = False, everything: bool = False) -> str:
    return ReportText(Report(list(cohorts)), color=color, everything=everything).render()


def test_a_divergence_is_shown_with_its_first_value_and_what_inherits_it() -> None:
    inherits = StageResult("advantage.estimate", "pass", inherited=True, chained_error=4.5)
    assert text(cohort(PASSED, StageResult("reward.raw", "pass"), diverged(), inherits)) == (
        "rollout 120 step 0 (ranks 0,1): first divergent stage: reward.post_process\n"
        "[    pass] sample\n"
        "[    pass] reward.raw\n"
        "[diverged] reward.post_process: 8 of 16 samples\n"
        "          reward s-0 (g-0, rank 0): recorded -5.5, recomputed -1.0, abs 4.5, ratio 5.5\n"
        "          and 7 more\n"
        "[    pass] advantage.estimate (inherits: max abs 4.5 when chained)\n"
        "\n"
        "diverged: first divergent stage reward.post_process; 1 cohort\n"
    )


def test_a_token_is_named_and_a_scalar_has_no_sample() -> None:
    token = Divergence("kl", 0.5, 0.0, sample_id="s-1", rank=1, token=4)
    scalar = Divergence("loss", float("nan"), 2.0, rank=0)
    shown = text(
        cohort(
            StageResult("advantage.kl", "diverged", divergences=[token]),
            StageResult("loss.policy", "diverged", divergences=[scalar]),
        )
    )
    assert "          kl s-1 token 4 (rank 1): recorded 0.5, recomputed 0.0, abs 0.5\n" in shown
    assert "          loss (rank 0): recorded NaN, recomputed 2.0, abs NaN\n" in shown


def test_passing_cohorts_are_counted_and_their_warnings_kept() -> None:
    warned = Finding("non-finite", "warning", "NaN under the mask", "sample", "s-3", 2)
    passing = [
        cohort(PASSED, rollout=one, findings=(warned,) if one % 2 else ()) for one in range(5)
    ]
    assert text(*passing) == (
        "  warning non-finite s-3 token 2: NaN under the mask (and 1 more like it)\n"
        "\n"
        "pass: 5 cohorts\n"
    )


def test_a_step_that_passes_and_inherits_is_said_to() -> None:
    """In full where it is one of a few, and by name below those that only pass."""
    inherits = StageResult("loss.policy", "pass", inherited=True, chained_error=0.5)
    said = "rollout 121 step 0 (ranks 0,1): pass, and inherits what is wrong before it\n"
    few = text(cohort(diverged(), step=None), cohort(PASSED, inherits, rollout=121))
    assert f"\n{said}[    pass] sample\n" in few
    assert "[    pass] loss.policy (inherits: max abs 0.5 when chained)\n" in few
    others = [cohort(PASSED, rollout=one) for one in (122, 123)]
    many = text(cohort(diverged(), step=None), cohort(PASSED, inherits, rollout=121), *others)
    assert f"\n3 cohorts pass\n  {said}\n" in many
    several = [cohort(PASSED, inherits, rollout=one) for one in range(12)]
    listed = text(cohort(diverged(), step=None), *several).splitlines()
    assert sum(line.endswith("pass, and inherits what is wrong before it") for line in listed) == 10
    assert "  and 2 further cohorts (--all shows every one)" in listed


def test_every_verdict_has_its_part_and_the_closing_line_counts_them() -> None:
    refused = cohort(rollout=7, step=None, refusal="no capture of rank 1", ranks=(0,))
    unverified = cohort(StageResult("loss.policy", "unverified", message="no pg_loss"), rollout=8)
    precise = cohort(StageResult("advantage.kl", "precision", max_abs_error=2e-6), rollout=9)
    shown = text(cohort(diverged()), refused, unverified, precise, cohort(PASSED, rollout=10))
    assert shown == (
        "rollout 120 step 0 (ranks 0,1): first divergent stage: reward.post_process\n"
        "[diverged] reward.post_process: 8 of 16 samples\n"
        "          reward s-0 (g-0, rank 0): recorded -5.5, recomputed -1.0, abs 4.5, ratio 5.5\n"
        "          and 7 more\n"
        "\n"
        "rollout 7 (rank 0): refused: no capture of rank 1\n"
        "\n"
        "rollout 8 step 0 (ranks 0,1): unverified\n"
        "[unverified] loss.policy: no pg_loss\n"
        "\n"
        "rollout 9 step 0 (ranks 0,1): precision\n"
        "[precision] advantage.kl: max abs 2e-06, within the bound of its rounding\n"
        "\n"
        "1 cohort passes\n"
        "\n"
        "diverged: first divergent stage reward.post_process; of 5 cohorts 1 diverged, 1 refused, "
        "1 unverified, 1 precision, 1 pass\n"
    )


def test_many_diverged_cohorts_are_listed_and_then_counted() -> None:
    cohorts = [cohort(diverged(), rollout=one) for one in range(20)]
    lines = text(*cohorts).splitlines()
    assert sum(line.startswith("[diverged]") for line in lines) == 3
    assert sum("first divergent stage: reward" in line for line in lines) == 13
    assert "and 7 further cohorts diverged (--all shows every one)" in lines
    everything = text(*cohorts, everything=True)
    assert everything.count("[diverged]") == 20


def test_only_the_first_values_are_shown_unless_all_are_asked_for() -> None:
    assert text(cohort(diverged(5))).count("reward s-0") == 3
    assert text(cohort(diverged(5)), everything=True).count("reward s-0") == 5


def test_findings_stand_with_their_stage_or_below_the_stages() -> None:
    shown = text(
        cohort(
            PASSED,
            findings=(
                Finding("lengths", "info", "all equal", "sample"),
                Finding("settings", "warning", "tolerance loosened"),
            ),
        )
    )
    assert shown == (
        "rollout 120 step 0 (ranks 0,1): pass\n"
        "[    pass] sample\n"
        "          info lengths: all equal\n"
        "  warning settings: tolerance loosened\n"
        "\n"
        "pass: 1 cohort\n"
    )


def test_a_handoff_is_said_once_with_what_the_rollout_has() -> None:
    def handoff(token: int) -> tuple[Divergence, Finding]:
        message = f"old_log_probs of s-0 token {token}: the step consumed -1.0, its rollout ..."
        name = "handoff.old_log_probs"
        return (
            Divergence(name, -1.0, -2.0, sample_id="s-0", group_id="g-0", rank=0, token=token),
            Finding(name, "error", message, "sample", "s-0", token),
        )

    divergences, findings = zip(*map(handoff, range(4)), strict=True)
    gone = Finding("handoff.sample_id", "error", "s-9 is no sample of rollout 1", "sample", "s-9")
    stage = StageResult("sample", "diverged", mismatches=5, divergences=list(divergences))
    assert text(cohort(stage, findings=(*findings, gone))).splitlines()[1:-2] == [
        "[diverged] sample: 5 values",
        "          error handoff.sample_id s-9: s-9 is no sample of rollout 1",
        *(
            f"          handoff.old_log_probs s-0 token {token} (g-0, rank 0): recorded -1.0, "
            "rollout has -2.0, abs 1.0, ratio 0.5"
            for token in range(3)
        ),
        "          and 2 more",
    ]


def test_a_refusal_is_said_once() -> None:
    finding = Finding("refused", "error", "no capture of rank 1")
    shown = text(cohort(refusal="no capture of rank 1", findings=(finding,)))
    assert shown.count("no capture of rank 1") == 1


def test_runs_and_attempts_are_named_where_there_are_several() -> None:
    shown = text(cohort(PASSED), cohort(PASSED, run="r2", attempt=1))
    assert shown.startswith("run r1 attempt 0 rollout 120 step 0 (ranks 0,1): pass\n")
    assert "run r2 attempt 1 rollout 120 step 0 (ranks 0,1): pass\n" in shown


def test_names_and_messages_cannot_steer_the_terminal() -> None:
    evil = "\x1b]0;x\x07\r[red]"
    divergence = Divergence("reward", 1.0, 2.0, sample_id=evil, group_id=evil)
    stage = StageResult("reward.raw", "diverged", message=evil, divergences=[divergence])
    finding = Finding("odd", "warning", evil, "reward.raw", evil)
    shown = text(
        cohort(stage, findings=(finding,), run=evil), cohort(PASSED, refusal=evil, rollout=2)
    )
    assert not set(shown) & {"\x1b", "\x07", "\r"}
    assert "\\x1b]0;x\\x07\\x0d[red]" in shown


def test_verdicts_are_coloured_on_request_only() -> None:
    assert "\x1b[31mdiverged\x1b[0m" in text(cohort(diverged()), color=True)
    assert "\x1b" not in text(cohort(diverged()))


def test_an_empty_report_is_no_pass() -> None:
    assert text() == "unverified: 0 cohorts\n"
