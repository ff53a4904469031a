"""The import of replay bundles: every rule that they have to keep, and what becomes of the rest."""

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.bundles import Tree, copied, edited, signed, with_payload
from trajreplay import CaptureError, Lake
from trajreplay.capture.importers import (
    ImportedSource,
    Importer,
    ImportOptions,
    importer_of,
    recognise,
)
from trajreplay.capture.importers import importing as importing_module

Edit = Callable[[Path], object]


def imported(lake: Lake, path: Path, **options: Any) -> ImportedSource:
    (source,) = lake.import_files("relax-bundle", path, options=ImportOptions(**options)).sources
    return source


def index(edit: Callable[[Tree], object]) -> Edit:
    return lambda bundle: edited(bundle, "index.json", edit)


def manifest(edit: Callable[[Tree], object]) -> Edit:
    return lambda bundle: edited(bundle, "manifest.json", edit)


def text(file: str, old: str, new: str) -> Edit:
    def edit(bundle: Path) -> None:
        content = (bundle / file).read_text()
        assert old in content
        (bundle / file).write_text(content.replace(old, new, 1))

    return edit


def payload(tensor: torch.Tensor) -> Edit:
    return lambda bundle: with_payload(bundle, "kl", tensor)


def packed(bundle: Path) -> None:
    """Compress the members of a payload, as a bomb is."""
    path = bundle / "payloads" / "kl.pt"
    with zipfile.ZipFile(path) as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def twice(bundle: Path) -> None:
    """Give a payload two storages of one name: what is verified need not be what is loaded."""
    path = bundle / "payloads" / "kl.pt"
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("kl/data/0", b"\0" * 116)


def renamed(bundle: Path) -> None:
    """Let the manifest verify one payload and name another to be loaded."""
    edited(bundle, "manifest.json", lambda tree: tree["payloads"]["kl"].update(name="advantages"))


def linked(bundle: Path) -> None:
    target = bundle / "payloads" / "kl.pt"
    elsewhere = bundle.parent / "elsewhere.pt"
    shutil.move(target, elsewhere)
    target.symlink_to(elsewhere)


def piped(bundle: Path) -> None:
    (bundle / "expected.json").unlink()
    os.mkfifo(bundle / "expected.json")


def traversing(bundle: Path) -> None:
    def move(tree: Tree) -> None:
        tree["payloads"]["../kl"] = {**tree["payloads"].pop("kl"), "name": "../kl"}

    (bundle / "payloads" / "kl.pt").rename(bundle / "kl.pt")
    edited(bundle, "manifest.json", move)
    edited(bundle, "COMPLETE.0", lambda t: t["payloads"].update({"../kl": t["payloads"].pop("kl")}))


def both_anchors(bundle: Path) -> None:
    edited(bundle, "index.json", lambda tree: tree["identity"].update(rollout_id=7))
    edited(bundle, "COMPLETE.0", lambda tree: tree.update(rollout_id=7))


def no_anchor(bundle: Path) -> None:
    edited(bundle, "index.json", lambda tree: tree["identity"].update(actor_step_id=None))
    edited(bundle, "COMPLETE.0", lambda tree: tree.update(actor_step_id=None))


def sample(**change: object) -> Edit:
    return index(lambda tree: tree["samples"][0].update(change))


def config(**change: object) -> Edit:
    return index(lambda tree: tree["config"].update(change))


# What is done to a healthy bundle before it is signed again, and what the refusal says.
SIGNED: dict[str, tuple[Edit, str]] = {
    "no number in JSON": (text("index.json", '"kl_coef": 0.1', '"kl_coef": NaN'), "standard JSON"),
    "infinite number": (text("index.json", '"kl_coef": 0.1', '"kl_coef": 1e999'), "any float"),
    "key twice": (text("index.json", '"kl_coef": 0.1', '"kl_coef": 0, "kl_coef": 0.1'), "twice"),
    "unknown setting": (config(clip_mode="x"), "clip_mode"),
    "missing setting": (index(lambda tree: tree["config"].pop("eps_clip_high")), "eps_clip_high"),
    "setting of another type": (config(kl_coef="0.1"), "kl_coef is '0.1'"),
    "both anchors": (both_anchors, "both set"),
    "no anchor": (no_anchor, "neither set"),
    "sample twice": (sample(sample_id="s-1"), "'s-1' is there twice"),
    "mask too short": (sample(loss_mask=[1]), "expected response_length = 2"),
    "mask of floats": (sample(loss_mask=[1.0, 1.0]), "loss_mask"),
    "length of another type": (sample(response_length=True), "response_length is True"),
    "id with a control character": (sample(sample_id="s\u0007"), "control characters"),
    "reward that differs": (sample(reward=0.5), "as index.json has it"),
    "unknown stage": (
        manifest(lambda tree: tree["stage_contracts"].update(odd={})),
        "unknown stage 'odd'",
    ),
    "contract of another version": (
        manifest(lambda tree: tree["stage_contracts"]["sample"].update(version="v7")),
        "version is 'v7'",
    ),
    "tolerance that is none": (
        manifest(lambda t: t["comparison_policy"]["tolerances"].update(sample={"atol": -1.0})),
        "numbers from 0 on",
    ),
    "redaction that is none": (
        manifest(lambda tree: tree["redaction"].update(prompt="keep")),
        "redaction of prompt",
    ),
    "minor version": (manifest(lambda tree: tree.update(format_version="1.0")), "expected 1.x.y"),
    "loaded under another name": (renamed, "name is 'advantages', expected 'kl'"),
    "another shape": (payload(torch.zeros(28)), "expected floats of shape (29,)"),
    "two dimensions": (payload(torch.zeros(1, 29)), "expected floats of shape (29,)"),
    "integers": (payload(torch.zeros(29, dtype=torch.int64)), "expected floats"),
    "finer than a lake": (payload(torch.full((29,), 0.1, dtype=torch.float64)), "float32"),
    "repeated by a stride": (payload(torch.zeros(1).expand(92_000_000)), "not contiguous"),
    "compressed": (packed, "compressed"),
    "storage twice": (twice, "members of the same name"),
    "a link": (linked, "is a link"),
    "a pipe": (piped, "is a pipe"),
    "out of the folder": (traversing, "no name of a payload"),
}


@pytest.mark.parametrize("what", SIGNED)
def test_a_signed_bundle_is_refused_for(what: str, lake: Lake, tmp_path: Path) -> None:
    edit, says = SIGNED[what]
    bundle = copied("v1_healthy", tmp_path)
    edit(bundle)
    if what != "a pipe":
        signed(bundle)
    source = imported(lake, bundle)
    assert source.status == "refused"
    assert says in source.problem
    assert lake.info().num_rows == 0


UNSIGNED: dict[str, tuple[Edit, str]] = {
    "index changed": (sample(raw_reward=0.5), "index.json does not have the sha256"),
    "expected changed": (
        lambda b: edited(b, "expected.json", lambda tree: tree.pop("reward.raw")),
        "expected.json does not have the sha256",
    ),
    "no sentinel of the rank": (lambda b: (b / "COMPLETE.0").unlink(), "COMPLETE.0"),
    "another anchor": (
        lambda b: edited(b, "COMPLETE.0", lambda t: t["actor_step_id"].update(step_id=1)),
        "actor_step_id",
    ),
    "anchor of another type": (
        lambda b: edited(b, "COMPLETE.0", lambda t: t.update(rollout_id=False)),
        "rollout_id is False",
    ),
    "payload that nobody signed": (
        lambda b: edited(b, "COMPLETE.0", lambda t: t["payloads"].pop("kl")),
        "expected in both",
    ),
    "payload gone": (lambda b: (b / "payloads" / "kl.pt").unlink(), "is missing"),
    "ranks": (
        lambda b: edited(b, "COMPLETE", lambda t: t.update(ranks=[0, 1], expected_ranks=[0, 1])),
        "not in the folder of its cohort",
    ),
    "metadata unsigned": (
        lambda b: edited(b, "COMPLETE", lambda t: t.pop("metadata")),
        "metadata is missing",
    ),
}


@pytest.mark.parametrize("what", UNSIGNED)
def test_a_bundle_that_was_changed_is_refused_for(what: str, lake: Lake, tmp_path: Path) -> None:
    edit, says = UNSIGNED[what]
    bundle = copied("v1_healthy", tmp_path)
    edit(bundle)
    source = imported(lake, bundle)
    assert source.status == "refused"
    assert says in source.problem


def forgotten(cohort: Path) -> None:
    shutil.rmtree(cohort / "rank-1")


def extra(cohort: Path) -> None:
    shutil.copytree(cohort / "rank-1", cohort / "rank-2")


def elsewhere(cohort: Path) -> None:
    edited(cohort, "COMPLETE.1", lambda tree: tree.update(relpath="../other"))
    edited(cohort, "COMPLETE", lambda tree: tree["shards"]["1"].update(relpath="../other"))


def own_step(cohort: Path) -> None:
    step = {"rollout_id": 7, "step_id": 3}
    for path, file in ((cohort / "rank-1", "COMPLETE.1"), (cohort, "COMPLETE.1")):
        edited(path, file, lambda tree: tree.update(actor_step_id=step))
    edited(cohort, "COMPLETE", lambda tree: tree["shards"]["1"].update(actor_step_id=step))


COHORTS: dict[str, tuple[Edit, str]] = {
    "a rank that is gone": (forgotten, "folders of rank 0 are there"),
    "a rank too many": (extra, "folders of rank 0, 1, 2 are there"),
    "no sentinel": (lambda cohort: (cohort / "COMPLETE").unlink(), "not every rank has written"),
    "a rank elsewhere": (elsewhere, "its own folder"),
    "ranks of two steps": (own_step, "of 2 steps or rollouts"),
    "sentinels that disagree": (
        lambda cohort: edited(cohort, "COMPLETE.1", lambda tree: tree.update(payloads={})),
        "disagree on rank 1",
    ),
}


@pytest.mark.parametrize("what", COHORTS)
@pytest.mark.parametrize("target", [".", "rank-0"])
def test_a_cohort_is_refused_for(what: str, target: str, lake: Lake, tmp_path: Path) -> None:
    edit, says = COHORTS[what]
    cohort = copied("v1_cohort_complete", tmp_path)
    edit(cohort)
    source = imported(lake, cohort / target)
    assert source.status == "refused"
    assert says in source.problem
    assert lake.info().num_rows == 0


def test_ids_are_scoped_by_rank_and_the_manifest_says_so(lake: Lake, tmp_path: Path) -> None:
    imported(lake, copied("v1_cohort_complete", tmp_path))
    ids = lake.sql("select sample_id, group_id, micro_batch_id from steps").arrow().to_pylist()
    assert len({one["sample_id"] for one in ids}) == 16
    assert ids[0] == {
        "sample_id": "rank-0/s-0",
        "group_id": "rank-0/g-0",
        "micro_batch_id": "rank-0/mb-0000",
    }
    (capture, _) = lake.inspect(7, 0).to_json()["captures"]
    assert capture["producer"]["extra"]["ids"] == "rank"


def test_global_ids_stay_and_must_not_repeat_over_ranks(lake: Lake, tmp_path: Path) -> None:
    cohort = copied("v1_cohort_complete", tmp_path)
    source = imported(lake, cohort, ids="global")
    assert "'s-0' is on ranks 0 and 1" in source.problem

    def rename(tree: Tree) -> None:
        for place, one in enumerate(tree["samples"]):
            one["sample_id"] = f"t-{place}"

    edited(cohort / "rank-1", "index.json", rename)
    signed(cohort / "rank-1")
    assert imported(lake, cohort, ids="global").status == "imported"
    found = lake.sql("select distinct group_id from steps order by 1").arrow()
    assert found["group_id"].to_pylist() == ["g-0", "g-1"]


def test_a_group_that_is_short_on_its_rank_is_refused_with_a_hint(
    lake: Lake, tmp_path: Path
) -> None:
    cohort = copied("v1_cohort_complete", tmp_path)
    edited(
        cohort / "rank-1", "index.json", lambda tree: tree["config"].update(n_samples_per_prompt=8)
    )
    signed(cohort / "rank-1")
    source = imported(lake, cohort)
    assert "has 4 samples on this rank, expected 8" in source.problem
    assert "--ids global" in source.hint


def test_tensor_parallel_ranks_are_copies(lake: Lake, tmp_path: Path) -> None:
    cohort = copied("v1_cohort_complete", tmp_path)
    for name in ("index.json", "expected.json"):
        shutil.copy(cohort / "rank-0" / name, cohort / "rank-1" / name)
    shutil.rmtree(cohort / "rank-1" / "payloads")
    shutil.copytree(cohort / "rank-0" / "payloads", cohort / "rank-1" / "payloads")
    for rank in ("rank-0", "rank-1"):
        edited(cohort / rank, "index.json", lambda tree: tree["identity"]["rank"].update(tp=2))
        signed(cohort / rank)
    assert imported(lake, cohort).status == "imported"
    (cohort_report,) = lake.replay().cohorts
    assert cohort_report.verdict == "pass"
    assert lake.info()["samples"].to_pylist() == [8]


def test_context_parallel_bundles_are_refused_by_the_replay(lake: Lake, tmp_path: Path) -> None:
    bundle = copied("v1_healthy", tmp_path)
    edited(bundle, "index.json", lambda tree: tree["identity"]["rank"].update(cp=2))
    imported(lake, signed(bundle))
    (cohort,) = lake.replay().cohorts
    assert cohort.verdict == "refused"


def test_placeholders_of_a_loss_alone_become_null(lake: Lake, tmp_path: Path) -> None:
    bundle = copied("v1_loss_only", tmp_path)

    def blank(tree: Tree) -> None:
        for one in tree["samples"]:
            one.update(group_index=0, raw_reward=0.0, reward=0.0)

    edited(bundle, "index.json", blank)
    edited(bundle, "expected.json", lambda t: [t.pop("reward.raw"), t.pop("reward.post_process")])
    assert imported(lake, signed(bundle)).status == "imported"
    rows = lake.sql("select distinct group_id, raw_reward, reward from steps").arrow().to_pylist()
    assert rows == [{"group_id": None, "raw_reward": None, "reward": None}]
    assert lake.replay().verdict == "pass"


def test_settings_that_a_bundle_does_not_state_stay_unstated(lake: Lake, tmp_path: Path) -> None:
    imported(lake, copied("v2_healthy", tmp_path))
    (capture,) = lake.inspect(7, 0).to_json()["captures"]
    assert capture["producer"]["extra"]["unstated"] == (
        "reward.n_samples_per_prompt, reward.divide_by_std"
    )
    assert capture["settings"]["reward"]["n_samples_per_prompt"] is None
    assert lake.sql("select count(raw_reward) as n from steps").arrow()["n"].to_pylist() == [0]


def test_a_rollout_bundle_becomes_a_rollout_capture(lake: Lake, tmp_path: Path) -> None:
    bundle = copied("v1_healthy", tmp_path)
    edited(bundle, "index.json", lambda t: t["identity"].update(actor_step_id=None, rollout_id=12))
    edited(bundle, "COMPLETE.0", lambda tree: tree.update(actor_step_id=None, rollout_id=12))
    edited(bundle, "manifest.json", lambda tree: tree["stage_contracts"].pop("loss.policy"))
    for name in ("manifest.json", "index.json"):
        edited(bundle, name, lambda tree: tree.update(bundle_id="replay-rollout-12"))
    source = imported(lake, signed(bundle))
    assert source.captures == [("replay", 0, 12, None, 0)]
    assert lake.replay(rollouts=[12]).verdict == "pass"


def test_the_producers_own_reuse_changes_no_verdict(lake: Lake, tmp_path: Path) -> None:
    imported(lake, copied("v1_healthy", tmp_path))
    (capture,) = lake.inspect(7, 0).to_json()["captures"]
    theirs = json.loads(capture["producer"]["extra"]["implementation"])
    assert theirs["loss.policy"] == "reuse"
    assert capture["contracts"]["loss.policy"]["implementation"] == "reimplemented"
    assert lake.replay().verdict == "pass"


def test_an_import_done_again_changes_nothing(lake: Lake, tmp_path: Path) -> None:
    cohort = copied("v1_cohort_complete", tmp_path)
    assert imported(lake, cohort).status == "imported"
    before = sorted(Path(lake.path).rglob("*"))
    assert imported(lake, cohort / "rank-1").status == "unchanged"
    assert sorted(Path(lake.path).rglob("*")) == before


def test_an_import_that_was_cut_short_is_completed(lake: Lake, tmp_path: Path) -> None:
    cohort = copied("v1_cohort_complete", tmp_path)
    imported(lake, cohort)
    entries = Path(lake.path) / "_manifest" / "entries"
    (gone,) = entries.rglob("step.0.1.data.json")
    gone.unlink()
    lake.refresh()
    assert lake.replay().verdict == "refused"
    assert imported(lake, cohort).status == "imported"
    assert lake.replay().verdict == "pass"


def test_other_content_under_the_same_step_is_refused(lake: Lake, tmp_path: Path) -> None:
    imported(lake, copied("v1_healthy", tmp_path), run="r")
    source = imported(lake, copied("v1_entropy_tampered", tmp_path), run="r")
    assert source.status == "refused"
    assert "committed with other content" in source.problem


def test_one_bad_rank_leaves_nothing_of_the_good_ones(lake: Lake, tmp_path: Path) -> None:
    cohort = copied("v1_cohort_complete", tmp_path)
    with_payload(cohort / "rank-1", "kl", torch.full((29,), 0.1, dtype=torch.float64))
    signed(cohort / "rank-1")
    source = imported(lake, cohort)
    assert "float32" in source.problem
    assert [one.name for one in Path(lake.path).rglob("*") if one.is_file()] == ["lake.json"]


def test_half_precision_keeps_its_bits(lake: Lake, tmp_path: Path) -> None:
    bundle = copied("v1_loss_only", tmp_path)
    values = torch.load(bundle / "payloads" / "entropy.pt").bfloat16()
    with_payload(bundle, "entropy", values)
    assert imported(lake, signed(bundle)).status == "imported"
    (capture,) = lake.inspect(7, 0).to_json()["captures"]
    assert capture["files"][0]["columns"]["entropy"]["source_dtype"] == "bfloat16"
    held = lake.sql("select entropy from steps order by row").arrow()["entropy"].to_pylist()
    assert [one for row in held for one in row] == values.float().tolist()


def test_unfinished_folders_and_other_files_are_passed_over(lake: Lake, tmp_path: Path) -> None:
    copied("v1_healthy", tmp_path)
    copied("v2_healthy", tmp_path).rename(tmp_path / ".v2_healthy.tmp-17")
    (tmp_path / "notes.txt").write_text("x")
    assert imported(lake, tmp_path).path == str(tmp_path / "v1_healthy")


def test_what_is_no_part_of_a_bundle_is_named(lake: Lake, tmp_path: Path) -> None:
    bundle = copied("v1_healthy", tmp_path)
    (bundle / "payloads" / "odd.pt").write_bytes(b"x")
    edited(bundle, "index.json", lambda tree: tree.update(odd=1))
    with_payload(bundle, "opd_log_probs", torch.zeros(29))
    edited(bundle, "COMPLETE.0", lambda tree: tree["payloads"].update(opd_log_probs=""))
    notes = imported(lake, signed(bundle)).notes
    assert [one.removeprefix(f"{tmp_path}/") for one in notes] == [
        "v1_healthy: 'payloads/odd.pt' is no part of the bundle: ignored",
        "v1_healthy/index.json: label_hash of samples has no column: not taken",
        "v1_healthy/index.json: 'odd' is not known: not taken",
        "v1_healthy/payloads: opd_log_probs has no column: verified, not taken",
    ]


def test_an_unknown_kind_and_a_path_without_bundles_are_refused(lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="unknown kind 'odd', expected one of relax-bundle"):
        lake.import_files("odd", tmp_path)
    with pytest.raises(CaptureError, match="nothing of the kind relax-bundle"):
        lake.import_files("relax-bundle", tmp_path)
    with pytest.raises(CaptureError, match="is not there"):
        lake.import_files("relax-bundle", tmp_path / "odd")


def test_bundles_are_recognised(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="nothing at or below it"):
        recognise([tmp_path])
    copied("v1_missing_complete", tmp_path)
    assert recognise([tmp_path]).kind == "relax-bundle"


def test_a_dry_run_reads_all_and_writes_nothing(tmp_path: Path) -> None:
    copied("v1_healthy", tmp_path)
    report = importing_module.import_files(None, importer_of("relax-bundle"), [tmp_path])
    (source,) = report.sources
    assert (source.status, source.samples) == ("checked", 8)
    assert json.loads(json.dumps(report.to_json()))["sources"][0]["captures"][0]["rollout_id"] == 7


def test_a_reader_that_runs_out_of_memory_refuses_its_source(lake: Lake, tmp_path: Path) -> None:
    def read(*_: object) -> list[object]:
        raise MemoryError

    broken = Importer("x", "x", lambda path: [path], read)  # type: ignore[arg-type]
    store = importing_module.import_files(None, broken, [tmp_path])
    assert store.sources[0].problem == f"{tmp_path} cannot be read: MemoryError"


def test_a_bare_pickle_is_no_tensor_file(lake: Lake, tmp_path: Path) -> None:
    bundle = copied("v1_healthy", tmp_path)
    stream = io.BytesIO()
    torch.save(torch.zeros(29), stream, _use_new_zipfile_serialization=False)
    (bundle / "payloads" / "kl.pt").write_bytes(stream.getvalue())
    source = imported(lake, signed(bundle))
    assert "a bare pickle" in source.problem
