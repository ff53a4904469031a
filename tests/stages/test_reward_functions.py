"""Raw rewards recomputed by a reward function: what agrees passes, and nothing else does."""

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.plugins import REWARDS, write_package
from tests.helpers.scenes import the_cohort, the_stage, verdicts
from trajreplay import Lake, QueryError, RewardSettings, SampleRecord, Settings, StageError
from trajreplay.stages import CohortReport

RAW, PROCESSED, ESTIMATE = "reward.raw", "reward.post_process", "advantage.estimate"
TEXTS = {"response": "truncate:99", "label": "truncate:99"}
ANSWERS = ("4", "the 4", "5", "four", "seven: 7", "7", "70", "x")
LABELS = ("4",) * 4 + ("7",) * 4
SETTINGS = Settings(reward=RewardSettings(n_samples_per_prompt=4))


def graded(sample: Mapping[str, Any]) -> float:
    """How well a response ends in its label."""
    right = float(sample["response"].endswith(sample["label"]))
    return right - 0.125 * len(sample["response"])


def by_length(sample: Mapping[str, Any]) -> float:
    return float(sample["response_length"])


def _write(
    lake: Lake,
    *,
    redaction: Mapping[str, str] | None = None,
    raw: Mapping[int, float] | None = None,
    used: Mapping[int, float] | None = None,
    settings: Settings = SETTINGS,
    stages: tuple[str, ...] = (RAW, PROCESSED, ESTIMATE),
    score: Callable[[Mapping[str, Any]], float] = graded,
    dtype: str = "float32",
    tokens: bool = False,
    echo: float = 0.0,
    **place: Any,
) -> None:
    """A rollout on two ranks of which some raw rewards are recorded as another number.

    Args:
        lake: Where to.
        redaction: The policy; responses and labels are kept by default.
        raw: By sample, raw rewards that are recorded instead of the scores.
        used: By sample, raw rewards that were used instead.
        settings: The arithmetic.
        stages: Declared stages.
        score: The reward function of the training.
        dtype: dtype of the rewards.
        tokens: Whether token ids are recorded.
        echo: How far raw rewards are off that are recorded beside the column; 0 for none.
        place: Coordinates of the captures.
    """
    samples: list[dict[str, Any]] = [
        {"response": answer, "label": label, "response_length": 2 + len(answer)}
        for answer, label in zip(ANSWERS, LABELS, strict=True)
    ]
    scores = [score(one) for one in samples]
    consumed = np.array([(used or {}).get(i, one) for i, one in enumerate(scores)])
    groups = consumed.reshape(2, 4)
    spread = groups.std(1, ddof=1, keepdims=True) + 1e-6
    rewards = ((groups - groups.mean(1, keepdims=True)) / spread).ravel()
    for rank in (0, 1):
        with lake.capture(
            run_id="r",
            rank=rank,
            expected_ranks=[0, 1],
            settings=settings,
            stages=stages,
            redaction=TEXTS if redaction is None else redaction,
            **{"rollout_id": 0, **place},
        ) as capture:
            rows = range(4 * rank, 4 * rank + 4)
            lengths = [samples[row]["response_length"] for row in rows]
            records = [
                SampleRecord(
                    sample_id=f"s-{row}",
                    group_index=rank,
                    total_length=length + 1,
                    loss_mask=[1] * length,
                    raw_reward=(raw or {}).get(row, scores[row]),
                    reward=float(rewards[row]),
                    **samples[row],
                )
                for row, length in zip(rows, lengths, strict=True)
            ]
            capture.samples(records, reward_dtype=dtype)
            if echo:
                beside = [scores[row] + echo for row in rows]
                capture.expected(RAW, raw_rewards=beside, scope="sample", reduction="mean")
            advantages = [[float(rewards[row])] * n for row, n in zip(rows, lengths, strict=True)]
            capture.tensor("advantages", advantages)
            if tokens:
                capture.tensor(
                    "tokens", [[row] * (n + 1) for row, n in zip(rows, lengths, strict=True)]
                )


def _replayed(lake: Lake, reward: Any = graded, **options: Any) -> CohortReport:
    return the_cohort(lake.replay(reward=reward, **options), step_id=None)


def _unverified(cohort: CohortReport) -> str:
    assert verdicts(cohort)[RAW] == "unverified", cohort.to_json()
    assert cohort.verdict == "unverified"
    assert {verdicts(cohort)[PROCESSED], verdicts(cohort)[ESTIMATE]} == {"pass"}
    assert the_stage(cohort, PROCESSED).chained is None
    return the_stage(cohort, RAW).message


def test_scores_that_agree_pass_and_are_chained(lake: Lake) -> None:
    _write(lake)
    cohort = _replayed(lake)
    assert cohort.verdict == "pass"
    assert the_stage(cohort, RAW).compared == 8
    assert (the_stage(cohort, PROCESSED).isolated, the_stage(cohort, PROCESSED).chained) == (
        "pass",
        "pass",
    )
    (said,) = (one for one in cohort.findings if one.check == "reward.function")
    assert said.message.endswith("test_reward_functions:graded")


def test_without_a_function_nothing_is_different(lake: Lake) -> None:
    _write(lake, raw={5: 9.0}, used={5: 9.0})
    cohort = the_cohort(lake.replay(), step_id=None)
    assert cohort.verdict == "pass"
    assert the_stage(cohort, PROCESSED).chained is None
    assert cohort.findings == []


def test_a_reward_that_is_not_the_functions_diverges_and_what_follows_inherits(lake: Lake) -> None:
    _write(lake, raw={5: 9.0, 2: -1.0}, used={5: 9.0, 2: -1.0})
    cohort = _replayed(lake)
    raw = the_stage(cohort, RAW)
    assert (cohort.first_divergent_stage, raw.message) == (RAW, "2 of 8 samples")
    assert [(one.field, one.sample_id, one.rank, one.recorded) for one in raw.divergences] == [
        ("raw_reward", "s-2", 0, -1.0),
        ("raw_reward", "s-5", 1, 9.0),
    ]
    assert [one.recomputed for one in raw.divergences] == [-0.125, 0.875]
    later = [the_stage(cohort, stage) for stage in (PROCESSED, ESTIMATE)]
    assert [(one.verdict, one.inherited, one.chained) for one in later] == [
        ("pass", True, "diverged")
    ] * 2


def test_a_record_that_is_not_what_was_used_is_the_suspect(lake: Lake) -> None:
    _write(lake, raw={5: 9.0})
    cohort = _replayed(lake)
    assert cohort.first_divergent_stage == RAW
    assert the_stage(cohort, RAW).suspect == "recorded-intermediate"
    assert (the_stage(cohort, PROCESSED).isolated, the_stage(cohort, PROCESSED).chained) == (
        "diverged",
        "pass",
    )
    assert "what reward.raw recorded is not what was consumed" in (
        the_stage(cohort, PROCESSED).message
    )


@pytest.mark.parametrize(
    ("dtype", "error", "verdict"),
    [("float32", 1e-6, "pass"), ("float32", 1e-4, "diverged"), ("float64", 1e-6, "diverged")],
)
def test_the_tolerance_is_that_of_the_dtype(
    lake: Lake, dtype: str, error: float, verdict: str
) -> None:
    wrong = {row: graded({"response": ANSWERS[row], "label": LABELS[row]}) for row in (0,)}
    wrong[0] += error
    _write(lake, raw=wrong, used=wrong, dtype=dtype)
    assert verdicts(_replayed(lake))[RAW] == verdict


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("drop", "response was dropped by the redaction policy of the capture"),
        ("hash", "response was replaced by its hash by the redaction policy of the capture"),
        ("truncate:5", "response may have been cut by the redaction policy truncate:5"),
    ],
)
@pytest.mark.parametrize("how", ["plain", "swallowing", "asking"])
def test_text_that_was_redacted_verifies_nothing(
    lake: Lake, rule: str, reason: str, how: str
) -> None:
    def swallowing(sample: Mapping[str, Any]) -> float:
        try:
            return graded(sample)
        except KeyError:
            return 0.0

    def asking(sample: Mapping[str, Any]) -> float:
        return graded(sample) if "response" in sample else 0.0

    functions = {"plain": graded, "swallowing": swallowing, "asking": asking}
    _write(lake, redaction={**TEXTS, "response": rule})
    message = _unverified(_replayed(lake, functions[how]))
    where = "s-1 (rank 0)" if rule == "truncate:5" else "s-0 (rank 0)"
    assert message == (
        f"sample {where}: the reward function reads what is not there: {reason}; capture it with "
        "redaction={'response': 'truncate:N'}, N more than its characters"
    )


def test_what_a_function_does_not_read_may_be_redacted(lake: Lake) -> None:
    _write(lake, redaction={}, score=by_length)
    assert _replayed(lake, by_length).verdict == "pass"


def test_who_takes_all_of_a_sample_takes_its_redacted_text(lake: Lake) -> None:
    _write(lake, score=by_length)
    message = _unverified(_replayed(lake, lambda sample: by_length(dict(sample))))
    assert "prompt was dropped by the redaction policy" in message
    kept = dict.fromkeys(("prompt", "response", "label", "tool_output"), "truncate:99")
    _write(lake, score=by_length, redaction=kept, rollout_id=1)
    lake.refresh()
    report = lake.replay(reward=lambda sample: by_length(dict(sample)), rollouts=[1])
    assert report.verdict == "pass"


def test_tokens_are_given_where_they_were_captured(lake: Lake, tmp_path: Path) -> None:
    def first(sample: Mapping[str, Any]) -> float:
        assert len(sample["tokens"]) == len(sample["loss_mask"]) + 1
        return float(sample["tokens"][0])

    wanted = {row: float(row) for row in range(8)}
    _write(lake, raw=wanted, used=wanted, tokens=True)
    assert _replayed(lake, first).verdict == "pass"
    other = Lake.create(tmp_path / "other")
    _write(other)
    assert "tokens were not captured" in _unverified(_replayed(other, first))


def _raising(sample: Mapping[str, Any]) -> float:
    return float(1 / (sample["sample_id"] != "s-6"))


def _ending(sample: Mapping[str, Any]) -> float:
    raise SystemExit(0)


_calls = itertools.count()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            _raising,
            "sample s-6 (rank 1): the reward function raised ZeroDivisionError: division by zero",
        ),
        (_ending, "sample s-0 (rank 0): the reward function raised SystemExit: 0"),
        (
            lambda sample: math.nan,
            "sample s-0 (rank 0): the reward function gives nan, expected a finite number",
        ),
        (
            lambda sample: -math.inf,
            "sample s-0 (rank 0): the reward function gives -inf, expected a finite number",
        ),
        (
            lambda sample: None,
            "sample s-0 (rank 0): the reward function gives a NoneType, expected a finite number",
        ),
        (
            lambda sample: "1.0",
            "sample s-0 (rank 0): the reward function gives '1.0', expected a finite number",
        ),
        (
            lambda sample: next(_calls),
            "sample s-0 (rank 0): the reward function gives ",
        ),
    ],
)
def test_a_function_that_fails_verifies_nothing(lake: Lake, function: Any, reason: str) -> None:
    _write(lake)
    assert _unverified(_replayed(lake, function)).startswith(reason)


def test_a_function_that_changes_its_mind_is_found(lake: Lake) -> None:
    _write(lake)
    message = _unverified(_replayed(lake, lambda sample: next(_calls)))
    assert "called again" in message
    assert "make it deterministic" in message


def test_what_was_recorded_beside_it_still_diverges_where_a_function_fails(lake: Lake) -> None:
    _write(lake, echo=0.5)
    cohort = _replayed(lake, _raising)
    assert verdicts(cohort)[RAW] == "diverged"
    assert {one.field for one in the_stage(cohort, RAW).divergences} == {"raw_rewards"}


def test_only_the_cohort_that_cannot_be_scored_is_unverified(lake: Lake) -> None:
    for rollout_id in range(3):
        _write(lake, rollout_id=rollout_id, redaction={} if rollout_id == 1 else None)
    report = lake.replay(reward=graded)
    assert [one.verdict for one in report.cohorts] == ["pass", "unverified", "pass"]


@pytest.mark.parametrize("missing", ["keep", "exclude"])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("scored", [False, True])
def test_a_sample_without_a_reward_is_left_out_where_the_function_has_none_either(
    lake: Lake, missing: str, recorded: bool, scored: bool
) -> None:
    def partly(sample: Mapping[str, Any]) -> float | None:
        return graded(sample) if scored or sample["sample_id"] != "s-3" else None

    settings = Settings(reward=RewardSettings(missing=missing))
    raw = {} if recorded else {3: math.nan}
    _write(lake, raw=raw, settings=settings, stages=(RAW,))
    found = the_stage(_replayed(lake, partly), RAW)
    if scored:
        assert found.verdict == ("pass" if recorded else "diverged")
    elif missing == "keep":
        assert found.verdict == ("unverified" if recorded else "diverged")  # NaN is never right
        assert recorded == ("gives a NoneType, expected a finite number" in found.message)
    else:
        assert found.verdict == ("diverged" if recorded else "pass")


def test_a_handoff_that_differs_chains_as_before_without_a_function(lake: Lake) -> None:
    _write(lake, stages=("sample", RAW, PROCESSED))
    _write(lake, raw={5: 9.0}, used={5: 9.0}, step_id=0, stages=("sample", PROCESSED, ESTIMATE))
    processed = the_stage(the_cohort(lake.replay()), PROCESSED)
    assert (processed.verdict, processed.chained, processed.inherited) == ("pass", None, False)


def test_a_step_inherits_what_its_rollout_scores_otherwise(lake: Lake) -> None:
    place = {"stages": ("sample", RAW, PROCESSED)}
    _write(lake, raw={5: 9.0}, used={5: 9.0}, **place)  # type: ignore[arg-type]
    _write(lake, raw={5: 9.0}, used={5: 9.0}, step_id=0, stages=("sample", PROCESSED, ESTIMATE))
    step = the_cohort(lake.replay(reward=graded))
    assert [one.stage for one in step.stages if one.inherited] == [PROCESSED, ESTIMATE]


def test_a_function_that_would_not_be_called_is_refused(lake: Lake) -> None:
    _write(lake, stages=(PROCESSED, ESTIMATE))
    with pytest.raises(QueryError, match="no selected capture declares that it can"):
        lake.replay(reward=graded)
    _write(lake, rollout_id=1)
    lake.refresh()
    with pytest.raises(QueryError, match=r"only reward\.post_process are to be recomputed"):
        lake.replay(reward=graded, stages=[PROCESSED])


SOURCE = """
def lengths(sample):
    print("scoring")
    return float(sample["response_length"])


class Scorer:
    @staticmethod
    def score(sample):
        return float(sample["response_length"])
"""


def test_a_function_is_found_by_name(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {REWARDS: {"lengths": "acme_rewards:lengths"}}
    site = write_package(tmp_path / "site", "acme_rewards", points, SOURCE)
    monkeypatch.syspath_prepend(str(site))
    _write(lake, score=by_length)
    for name in ("lengths", "acme_rewards:lengths", "acme_rewards:Scorer.score"):
        assert _replayed(lake, name).verdict == "pass"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere", "entry point 'nowhere' of the group trajreplay.rewards is not installed"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("math:nothing", "the module 'math' has no 'nothing'"),
        ("math:pi", "'math:pi' is a float, expected a function"),
        ("math:", "expected module:function"),
        (":f", "expected module:function"),
    ],
)
def test_a_function_that_is_not_there_is_refused(lake: Lake, name: str, problem: str) -> None:
    with pytest.raises(StageError, match=problem):
        lake.replay(reward=name)
