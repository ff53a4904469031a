"""Replay bundles of Relax, healthy and broken: imported, validated and replayed."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.bundles import CASES, VERDICTS
from trajreplay import Lake
from trajreplay.capture.importers import ImportedSource
from trajreplay.stages import CohortReport

CANARY = Path(tempfile.gettempdir()) / "relax_pickle_canary"


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[ImportedSource, CohortReport | None]]]:
    """What became of each bundle, all of them in one lake."""
    lake = Lake.create(tmp_path_factory.mktemp("cases") / "lake")
    report = lake.import_files("relax-bundle", CASES)
    assert report.exit_code == 3
    assert lake.validate().ok
    cohorts = {one.run_id: one for one in lake.replay().cohorts}
    yield {Path(one.path).name: (one, cohorts.get(Path(one.path).name)) for one in report.sources}
    assert not CANARY.exists()


def silent(cohort: CohortReport) -> bool:
    """Whether it passes and says nothing but what is true of all that these cases were made of.

    Their log-probs are drawn at random, some above 0.
    """
    passed = cohort.verdict in ("pass", "precision")
    said = {one.check for one in cohort.findings if one.severity != "info"}
    return passed and said <= {"log-prob.positive"}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_bundle_gets_its_sound_verdict(
    name: str, found: dict[str, tuple[ImportedSource, CohortReport | None]]
) -> None:
    source, cohort = found[name]
    sound = VERDICTS[name]["sound_verdict"]
    if cohort is None or cohort.verdict == "refused":
        assert "refuse" in sound or name.endswith("expected_rewards_short"), source.problem
    elif sound == "pass":
        assert silent(cohort)
        kinds = {one.verdict for one in cohort.stages}
        assert cohort.verdict in ("pass", "precision")
        assert kinds <= {"pass", "precision", "unsupported", "not-declared", "skipped"}
    elif "silent pass" in sound or "clean pass" in sound or "warning" in sound:
        assert not silent(cohort)
        if sound.startswith("no stage diverges"):
            assert cohort.first_divergent_stage is None
            assert "group.one-block" in {one.check for one in cohort.findings}
    elif "unverified" in sound:
        assert {one.stage: one.verdict for one in cohort.stages}["loss.policy"] == "unverified"
    else:
        assert cohort.verdict == "diverged"
        assert cohort.first_divergent_stage == sound.split()[0]


def test_a_divergence_names_the_sample_and_its_numbers(
    found: dict[str, tuple[ImportedSource, CohortReport | None]],
) -> None:
    _, cohort = found["v1_advantage_tampered"]
    assert cohort is not None
    (stage,) = (one for one in cohort.stages if one.stage == "advantage.estimate")
    (first,) = stage.divergences
    # Flat index 10 of responses of 2, 3, 4, 5, ... tokens is token 1 of the fourth.
    assert (first.sample_id, first.token, first.group_id) == ("rank-0/s-3", 1, "rank-0/g-0")
    assert first.abs_error == pytest.approx(0.5, abs=1e-6)


def test_both_ranks_of_a_cohort_are_judged(
    found: dict[str, tuple[ImportedSource, CohortReport | None]],
) -> None:
    source, cohort = found["v2_cohort_complete"]
    assert cohort is not None
    assert (source.samples, source.tokens, cohort.ranks) == (16, 58, [0, 1])


def test_what_is_refused_says_where_and_why(
    found: dict[str, tuple[ImportedSource, CohortReport | None]],
) -> None:
    refused = {name: one for name, (one, _) in found.items() if one.status == "refused"}
    assert "a call of os.makedirs" in refused["v1_pickle_reduce"].problem
    assert "payloads/advantages.pt: 1663 bytes" in refused["v2_checksum_payload_size"].problem
    assert "999" in refused["v1_shard_anchor_mismatch"].problem
    assert all(name in one.problem and one.hint for name, one in refused.items())
