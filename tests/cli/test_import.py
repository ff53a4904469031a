"""`trajreplay import`, and verbs that are given files instead of a lake."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from tests.helpers.bundles import CASES, copied, edited, signed
from tests.helpers.cli import run
from tests.helpers.slime_dumps import SLIME
from trajreplay import CaptureError, Lake
from trajreplay.capture.importers import ImportOptions
from trajreplay.cli.main import main


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    monkeypatch.chdir(tmp_path)


def test_an_import_says_what_became_of_each_source(tmp_path: Path) -> None:
    copied("v1_healthy", tmp_path / "in")
    copied("v2_missing_complete", tmp_path / "in")
    found = run("import", "relax-bundle", "in", "--lake", "new", "--format", "json")
    assert found.code == 3
    healthy, missing = json.loads(found.out)["sources"]
    assert (healthy["status"], healthy["samples"], healthy["tokens"]) == ("imported", 8, 29)
    assert healthy["captures"] == [
        {"run_id": "v1_healthy", "attempt": 0, "rollout_id": 7, "step_id": 0, "rank": 0}
    ]
    assert (missing["status"], missing["captures"]) == ("refused", [])
    assert "no COMPLETE" in missing["problem"]
    assert found.err.endswith("2 sources: 1 imported, 1 refused\n")
    assert run("replay", "--lake", "new").code == 0


def test_an_import_makes_the_lake_and_says_so_in_rows(tmp_path: Path) -> None:
    found = run("import", "relax-bundle", CASES / "v1_cohort_complete")
    assert found.code == 0
    header, _, row = found.out.splitlines()
    assert header.split() == ["status", "source", "captures", "samples", "tokens", "problem"]
    assert "v1_cohort_complete rollout 7 step 0 ranks 0, 1" in row
    assert Lake.open(tmp_path / "lake").info().num_rows == 1


def test_run_and_attempt_are_taken_from_the_command_line(tmp_path: Path) -> None:
    done = run("import", "relax-bundle", CASES / "v1_healthy", "--run", "mine", "--attempt", "2")
    assert done.code == 0
    (row,) = Lake.open(tmp_path / "lake").info().to_pylist()
    assert (row["run_id"], row["attempt"]) == ("mine", 2)


def test_a_dry_run_makes_no_lake(tmp_path: Path) -> None:
    found = run("import", "relax-bundle", CASES / "v1_healthy", "-n", "--format", "ndjson")
    assert (found.code, json.loads(found.out)["status"]) == (0, "checked")
    assert list(tmp_path.iterdir()) == []


def test_text_of_a_dump_is_kept_where_it_is_said_how_much(tmp_path: Path) -> None:
    dump = SLIME / "rollout_data"
    assert run("import", "slime", dump, "--redact", "prompt=keep").code == 2
    assert run("import", "slime", dump, "--redact", "prompt=truncate:3", "--run", "a").code == 0
    found = run("import", "relax-bundle", CASES / "v1_healthy", "--redact", "prompt=hash")
    assert found.code == 3
    assert "a bundle holds none" in found.out
    texts = Lake.open(tmp_path / "lake").sql("select prompt, label from rollouts").arrow()
    assert max(map(len, texts["prompt"].to_pylist())) == 3
    assert set(texts["label"].to_pylist()) == {None}


def test_an_unknown_kind_is_a_usage_error() -> None:
    found = run("import", "odd", CASES)
    assert found.code == 2
    assert "unknown kind 'odd', expected one of relax-bundle" in found.err


def test_a_folder_without_bundles_is_refused(tmp_path: Path) -> None:
    assert run("import", "relax-bundle", tmp_path).code == 3


@pytest.mark.parametrize(
    ("name", "code", "verdict", "stage"),
    [
        ("v1_healthy", 0, "pass", None),
        ("v2_cohort_complete/rank-0", 0, "pass", None),
        ("v1_pr65_fault", 1, "diverged", "reward.post_process"),
        ("v1_no_stage_contracts", 3, "unverified", None),
        ("v1_pickle_reduce", 3, "refused", None),
        ("v1_config_kl_type_unknown", 3, "refused", None),
    ],
)
def test_a_bundle_is_replayed_without_a_lake(
    name: str, code: int, verdict: str, stage: str | None, tmp_path: Path
) -> None:
    found = run("replay", CASES / name, "--format", "json")
    report = json.loads(found.out)
    assert (found.code, report["verdict"], report["first_divergent_stage"]) == (
        code,
        verdict,
        stage,
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_many_is_replayed_and_names_those_refused(tmp_path: Path) -> None:
    for name in ("v1_healthy", "v2_entropy_tampered", "v1_pickle_reduce"):
        copied(name, tmp_path)
    found = run("replay", tmp_path)
    assert found.code == 1
    assert "v1_pickle_reduce: refused: " in found.out
    assert found.out.splitlines()[-1].endswith("; 1 source refused")


def test_a_selection_takes_the_ids_of_the_bundle_on_every_rank() -> None:
    cohort = CASES / "v1_cohort_complete" / "rank-1"
    one = run("replay", cohort, "--sample", "s-3", "--stage", "sample", "--format", "json")
    (report,) = json.loads(one.out)["cohorts"]
    (stage,) = (one for one in report["stages"] if one["stage"] == "sample")
    assert (one.code, stage["compared"]) == (0, 8)  # a group of four on each of two ranks
    scoped = run(
        "replay", cohort, "--sample", "rank-1/s-3", "--stage", "sample", "--format", "json"
    )
    (report,) = json.loads(scoped.out)["cohorts"]
    (stage,) = (one for one in report["stages"] if one["stage"] == "sample")
    assert stage["compared"] == 4
    group = run("replay", cohort, "--group", "g-1", "--step", "7:0", "--batch", "mb-0001")
    assert group.code == 0
    absent = run("replay", cohort, "--sample", "s-99")
    assert absent.code == 2


def test_validate_says_what_is_wrong_with_a_bundle(tmp_path: Path) -> None:
    assert run("validate", CASES / "v1_healthy").code == 0
    found = run("validate", CASES / "v1_checksum_payload_size", "--format", "json")
    assert found.code == 3
    (error,) = (one for one in json.loads(found.out) if one["severity"] == "error")
    assert error["check"] == "import"
    assert "1663 bytes" in error["message"]


def test_inspect_shows_the_only_capture_of_a_bundle(tmp_path: Path) -> None:
    found = run("inspect", CASES / "v1_cohort_complete" / "rank-0")
    assert found.code == 0
    assert "rank 1: 8 samples, 29 tokens" in found.out
    refused = run("inspect", CASES / "v1_missing_complete")
    assert (refused.code, refused.out) == (3, "")
    for name in ("v1_healthy", "v2_healthy"):
        copied(name, tmp_path)
    several = run("inspect", tmp_path)
    assert several.code == 2
    assert "--step 7:0" in several.err
    assert run("inspect").code == 2


def test_global_ids_are_asked_for_in_every_form(tmp_path: Path) -> None:
    cohort = copied("v1_cohort_complete", tmp_path)
    found = run("replay", cohort, "--ids", "global")
    assert found.code == 3
    assert "'s-0' is on ranks 0 and 1" in found.out


def test_a_lake_may_be_named_as_a_path(tmp_path: Path) -> None:
    run("import", "relax-bundle", CASES / "v1_healthy", "--lake", "here")
    assert run("replay", "here").code == 0
    both = run("replay", "here", "--lake", "here")
    assert both.code == 2


def test_what_is_neither_a_lake_nor_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    found = run("replay", "odd")
    assert found.code == 3
    assert "nothing at or below it is of a kind that can be read: relax-bundle" in found.err


def test_remarks_on_a_bundle_go_to_stderr() -> None:
    found = run("replay", CASES / "v1_nan_log_probs_recorded_nan")
    assert found.code == 1
    assert "expected.json: NaN or Infinity, which is no JSON" in found.err


def test_a_step_of_an_import_is_not_linked_to_a_rollout_of_other_ids(tmp_path: Path) -> None:
    step = copied("v1_advantage_tampered", tmp_path / "in")
    rollout = copied("v1_healthy", tmp_path / "in")
    edited(rollout, "index.json", lambda t: t["identity"].update(actor_step_id=None, rollout_id=7))
    edited(rollout, "COMPLETE.0", lambda tree: tree.update(actor_step_id=None, rollout_id=7))
    signed(rollout)
    done = run("import", "relax-bundle", step, rollout, "--run", "one", "--format", "json")
    assert done.code == 0
    found = json.loads(run("replay", "--step", "7:0", "--format", "json").out)
    assert found["first_divergent_stage"] == "advantage.estimate"
    (cohort,) = (one for one in found["cohorts"] if one["step_id"] == 0)
    assert "those of an imported file" in json.dumps(cohort["findings"])


@pytest.mark.parametrize("said", [("--profile", "trl"), ("--group-by-position", "4")])
def test_a_bundle_says_itself_what_is_stated_of_dumps(said: tuple[str, str]) -> None:
    found = run("import", "relax-bundle", CASES / "v1_healthy", *said, "--format", "json")
    assert found.code == 3
    assert f"{said[0]} cannot be said of these files" in found.out


def test_a_setting_is_stated_beside_a_profile() -> None:
    found = run("replay", CASES / "v1_healthy", "--state", "reward.epsilon=0")
    assert (found.code, found.out) == (2, "")
    assert "--state changes a setting of a profile: give --profile NAME." in found.err


def test_nothing_is_stated_of_a_lake() -> None:
    assert run("import", "relax-bundle", CASES / "v1_healthy").code == 0
    for target in (["lake"], ["--lake", "lake"]):
        for flag, value in (("--profile", "trl"), ("--ids", "global")):
            found = run("replay", *target, flag, value)
            assert (found.code, found.out) == (2, "")
            assert f"{flag} is said of files, and a lake is looked at" in found.err


def test_help_lists_the_kinds() -> None:
    found = run("import", "--help").out
    kinds = found.partition("\nKinds:\n")[2].partition("\nExit codes:")[0]
    assert [line.split()[0] for line in kinds.splitlines() if line.startswith("  r")] == [
        "relax-bundle",
        "relax-dump",
    ]
    assert "Dumps of slime: rollout_data/*.pt" in kinds


@pytest.mark.parametrize("verb", ["validate", "replay", "explain"])
def test_a_dump_is_looked_at_without_a_lake(verb: str, tmp_path: Path) -> None:
    found = run(verb, SLIME, "--profile", "slime")
    assert (found.code, "Traceback" in found.err) == (0, False)
    assert list(tmp_path.iterdir()) == []


def test_a_dump_is_inspected_with_what_was_stated_of_it() -> None:
    found = run("inspect", SLIME, "--step", "0:0", "--profile", "slime", "--format", "json")
    assert found.code == 0
    assert "slime@1, reward.grouping=group" in found.out


def test_what_a_dump_does_not_state_is_unverified_with_the_reason() -> None:
    found = run("replay", SLIME / "train_data" / "0.pt")
    assert found.code == 3
    assert "state them with --profile" in found.out


REFUSED = "v1_missing_complete"
VERBS: dict[str, tuple[str, ...]] = {
    "replay": ("replay",),
    "replay-explain": ("replay", "--explain"),
    "replay-set": ("replay", "--set", "loss.eps_clip=0.1"),
    "explain": ("explain",),
    "explain-across": ("explain", "--across"),
    "validate": ("validate",),
    "validate-deep": ("validate", "--deep"),
    "inspect": ("inspect",),
    "inspect-step": ("inspect", "--step", "7:0"),
}


def test_every_verb_that_takes_a_path_is_asked_below() -> None:
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    taking = {
        name
        for name, command in commands.items()
        if command is not None and any(one.name == "files" for one in command.params)
    }
    assert taking == {words[0] for words in VERBS.values()}


@pytest.mark.parametrize("form", ["table", "json", "csv"])
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_passes_over_a_source_that_was_refused(
    verb: str, form: str, tmp_path: Path
) -> None:
    alone = run(*VERBS[verb], copied(REFUSED, tmp_path / "in"), "--format", form)
    copied("v1_healthy", tmp_path / "in")
    beside = run(*VERBS[verb], tmp_path / "in", "--format", form)
    for found in (alone, beside):
        assert found.code == 3
        assert REFUSED in found.out + found.err
        assert "no COMPLETE" in found.out + found.err


def test_a_selection_that_only_a_refused_source_could_have_says_so(tmp_path: Path) -> None:
    for name in ("v1_healthy", REFUSED):
        copied(name, tmp_path / "in")
    found = run("replay", tmp_path / "in", "--step", "99:0")
    assert found.code == 2
    assert f"{REFUSED}: " in found.err


def test_what_has_no_place_for_refused_sources_refuses(tmp_path: Path) -> None:
    for name in ("v1_healthy", REFUSED):
        copied(name, tmp_path / "in")
    asked: dict[str, Callable[[Lake], object]] = {
        "diff": lambda lake: lake.diff(),
        "mismatch": lambda lake: lake.mismatch(),
        "route_agreement": lambda lake: lake.route_agreement(),
        "gate": lambda lake: lake.gate("replay-clean"),
        "watch": lambda lake: lake.watch(),
        "export_bundles": lambda lake: lake.export_bundles(tmp_path / "out"),
        "export_lake": lambda lake: lake.export_lake(tmp_path / "other"),
    }
    for name, ask in asked.items():
        with Lake.of_files(tmp_path / "in") as lake, pytest.raises(CaptureError) as caught:
            ask(lake)
        assert "no COMPLETE" in caught.value.message, name


@pytest.mark.parametrize(
    "said", [{"profile": "slime"}, {"group_by_position": 4}, {"ids": "global"}, {"run": "mine"}]
)
def test_nothing_is_stated_of_a_lake_that_was_mailed(said: dict[str, Any], tmp_path: Path) -> None:
    assert run("import", "relax-bundle", CASES / "v1_healthy").code == 0
    assert run("export", "lake", "-o", "mailed.tar.zst").code == 0
    assert run("replay", "mailed.tar.zst").code == 0
    found = run("replay", "mailed.tar.zst", "--profile", "slime", "--group-by-position", "4")
    assert found.code == 3
    assert "group_by_position, profile is said of files" in found.err
    for place in ("lake", "mailed.tar.zst"):
        with (
            pytest.raises(CaptureError, match=f"is a lake, and {next(iter(said))} is said"),
            Lake.of_files(tmp_path / place, options=ImportOptions(**said)),
        ):
            pass
        with (
            pytest.raises(CaptureError, match="is a lake, and the kind 'slime' is said"),
            Lake.of_files(tmp_path / place, kind="slime"),
        ):
            pass
