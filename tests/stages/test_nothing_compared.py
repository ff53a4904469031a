"""A stage of which nothing is compared is no pass, whatever the reason."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cohorts import ALL_STAGES, capture
from tests.helpers.scenes import WAY, drawn, the_cohort, the_stage, write_whole
from tests.helpers.trainer import Sample
from trajreplay import Lake
from trajreplay.stages import CohortReport

OF_TOKENS = ("advantage.kl", "advantage.estimate")


def _unmasked(samples: list[Sample], trained: list[int]) -> list[Sample]:
    """The samples, of which only some have trained tokens."""
    for row, one in enumerate(samples):
        one.mask = [int(row in trained)] * one.length
    return samples


def _cohort(samples: list[Sample], stages: tuple[str, ...]) -> CohortReport:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        write_whole(lake, samples, stages=stages)
        return the_cohort(lake.replay())


@pytest.mark.parametrize("stage", OF_TOKENS)
@given(st.lists(st.integers(0, 7), max_size=3, unique=True))
def test_a_stage_is_judged_by_trained_tokens_or_not_at_all(stage: str, trained: list[int]) -> None:
    samples = _unmasked(drawn(), trained)
    cohort = _cohort(samples, (stage,))
    found = the_stage(cohort, stage)
    assert (found.compared > 0) == bool(trained)
    if trained:
        assert (found.verdict, cohort.verdict) == ("pass", "pass")
    else:
        assert (found.verdict, cohort.verdict) == ("skipped", "unverified")
        assert "nothing to compare" in found.message


def test_what_else_is_compared_still_passes() -> None:
    cohort = _cohort(_unmasked(drawn(), []), ALL_STAGES)
    assert cohort.verdict == "pass", cohort.to_json()
    assert [one.stage for one in cohort.stages if one.verdict == "skipped"] == list(OF_TOKENS)


def test_a_stage_that_has_to_be_compared_is_not_by_being_empty(lake: Lake) -> None:
    samples = _unmasked(drawn(), [])
    capture(lake, {0: samples}, WAY, step_id=0, stages=("sample", *OF_TOKENS))
    report = lake.replay(require_stages=True)
    assert report.verdict == "unverified"
