"""`trajreplay routes`: verdict, exit codes, policies, formats."""

import json
from pathlib import Path

from tests.helpers.cli import run

CASES = Path(__file__).parents[1] / "cases" / "r3_traces"


def test_a_healthy_trace_passes_and_says_what_it_covers() -> None:
    outcome = run("routes", CASES / "tq_healthy", "--contract", "transfer-queue")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == (
        "pass under transfer-queue: 30 rules pass, 2 not-applicable; 112 records, 2 ranks, "
        "layers 2, 3, 4, traced prev-logprob step 1; train step 1\n"
    )


def test_a_defect_is_a_difference() -> None:
    outcome = run("routes", CASES / "la_verify_mismatch", "--contract", "legacy-async")
    assert outcome.code == 1
    assert outcome.out.splitlines()[0].startswith(
        "failure verify.match: rank 1, layer 3, train at step 1 (r3_trace_nid001000_pid41002.jsonl"
    )


def test_a_trace_of_two_attempts_is_checked_no_further() -> None:
    outcome = run("routes", CASES / "tq_stale_same_pid", "--contract", "transfer-queue")
    assert outcome.code == 1
    assert outcome.out.endswith("224 records, of which nothing more was checked\n")


def test_the_contract_must_be_stated() -> None:
    outcome = run("routes", CASES / "tq_healthy")
    assert (outcome.code, outcome.out) == (2, "")
    assert "contract is missing" in outcome.err
    assert "never inferred" in outcome.err


def test_a_policy_file_states_it_and_options_count_before_it(tmp_path: Path) -> None:
    policy = tmp_path / "routes.toml"
    policy.write_text('contract = "transfer-queue"\nlayers = [2, 3, 4]\nmax_fallback_share = 0.0\n')
    assert run("routes", CASES / "tq_healthy", "--policy", policy).code == 0
    changed = run("routes", CASES / "tq_healthy", "--policy", policy, "--contract", "legacy-async")
    assert changed.code == 1


def test_a_policy_that_is_malformed_is_a_usage_error(tmp_path: Path) -> None:
    policy = tmp_path / "routes.toml"
    for text, reason in [
        ("contract = ", "no policy can be read"),
        ('contract = "guess"', "expected one of legacy-async, transfer-queue"),
        ('contract = "transfer-queue"\nlayer = [1]', "unknown layer"),
        ('preset = "router-replay"\n', "preset, as in the policy of a gate"),
        ("[checks.routes]\n", "Put what stands below [checks.routes] there"),
        ('contract = "transfer-queue"\nlayers = [true]', "layers is [True]"),
        ('contract = "transfer-queue"\nmax_fallback_share = 2', "expected 0 to 1"),
        ('contract = "transfer-queue"\nrequire = ["all"]', "require has 'all'"),
        ('contract = "transfer-queue"\nstages = []', "stages is empty"),
    ]:
        policy.write_text(text)
        outcome = run("routes", CASES / "tq_healthy", "--policy", policy)
        assert (outcome.code, outcome.out) == (2, ""), text
        assert reason in outcome.err


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    outcome = run("routes", tmp_path / "none", "--contract", "legacy-async")
    assert (outcome.code, outcome.out) == (3, "")


def test_findings_are_rows_and_the_whole_report_is_json() -> None:
    defect = (CASES / "tq_fetch_hash", "--contract", "transfer-queue", "--format")
    document = json.loads(run("routes", *defect, "json").out)
    assert (document["verdict"], document["rules"]["fetch.hash"]) == ("fail", "fail")
    (row,) = run("routes", *defect, "ndjson").out.splitlines()
    assert json.loads(row)["where"].startswith("stage=train rank=1 sample_idx=2 key=")
