"""The statistics against what the frameworks' own functions gave on the same numbers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.mismatches import MASK, OLD, ROLLOUT, measured, only_row, write_pair
from trajreplay import Lake


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """The two sequences of the goldens in one step."""
    found = Lake.create(tmp_path_factory.mktemp("goldens") / "lake")
    write_pair(found, OLD, ROLLOUT, MASK)
    return found


PRIME_RL = (0.00517094135, 0.0012294054, 0.0498588085, 0.00127112865, 0.0703201294)  # a token each
# float32 arithmetic of the frameworks: seven digits.
GOLDENS = {
    "NeMo-RL": {
        "token_mult_prob_error": 1.20987928,
        "generation_kl": 0.0255700611,
        "policy_kl": 0.0279961787,
        "js_divergence": 0.0065901042,
        "importance_ratio": 1.02557003,
        "sequence_ratio": 1.06187773,
        "seq_mult_prob_error_min": 1.16876698,
        "seq_mult_prob_error_max": 1.27154803,
    },
    "verl": {
        "generation_kl_k1": 0.0,
        "generation_kl": 0.0255700834,
        "training_ppl": 4.08215141,
        "rollout_ppl": 3.88325286,
        "log_ppl_diff": 0.0291666985,
        "log_ppl_abs_diff": 0.145833373,
        "log_ppl_diff_max": 0.175000072,
        "log_ppl_diff_min": -0.116666675,
        "ppl_ratio": 1.04056406,
        "chi2_token": 0.100571752,
        "chi2_seq": 0.255168796,
        "ess": 0.955679536,
    },
    "TRL": {
        "abs_delta": 0.18,
        "abs_delta_max": 0.4,
        "sequence_ratio_max": 1.4190675,
        "sequence_ratio_min": 0.704688013,
    },
    "slime": {
        "chi2_token_seq": (0.316119671 - 0.222750127) / 2,
        "chi2_seq": (1.01375246 - 0.50341475) / 2,
        "ppl_ratio": (0.88988179 + 1.19124627) / 2,
    },
    "prime-rl": {
        "generation_kl": (
            0.00517094135 + 0.0012294054 + 0.0498588085 + 0.00127112865 + 0.0703201294
        )
        / 5,
    },
}


@pytest.mark.parametrize("framework", GOLDENS)
def test_equals_what_the_framework_itself_computed(framework: str, lake: Lake) -> None:
    row = only_row(lake)
    assert {name: row[name] for name in GOLDENS[framework]} == pytest.approx(
        GOLDENS[framework], rel=2e-6, abs=1e-7
    )


def test_slime_truncates_token_weights_at_its_cap(lake: Lake) -> None:
    weights = [1.10517097, 0.951229393, 1.2, 1.05127108, 0.670319974]
    row = only_row(lake, cap=1.2)
    assert row["importance_ratio_truncated"] == pytest.approx(sum(weights) / 5, rel=1e-6)
    assert row["truncated_share"] == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("index", "chi2_token", "chi2_seq", "ppl_ratio"),
    [(0, 0.316119671, 1.01375246, 0.88988179), (1, -0.222750127, -0.50341475, 1.19124627)],
)
def test_slime_takes_chi_square_and_perplexities_by_sequence(
    index: int, chi2_token: float, chi2_seq: float, ppl_ratio: float, tmp_path: Path
) -> None:
    lake = Lake.create(tmp_path)
    one = slice(index, index + 1)
    write_pair(lake, OLD[one], ROLLOUT[one], MASK[one])
    row = only_row(lake)
    found = {name: row[name] for name in ("chi2_token_seq", "chi2_seq", "ppl_ratio")}
    assert found == pytest.approx(
        {"chi2_token_seq": chi2_token, "chi2_seq": chi2_seq, "ppl_ratio": ppl_ratio}, rel=2e-6
    )


def test_prime_rl_compares_the_current_policy(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, OLD, ROLLOUT, MASK, column="log_probs")
    report = measured(lake, pair="log_probs:rollout_log_probs")
    assert report.table["generation_kl"].to_pylist() == pytest.approx(
        [GOLDENS["prime-rl"]["generation_kl"]], rel=2e-6
    )
    assert report.pair == "log_probs (trainer) against rollout_log_probs (sampler), of steps"


def faults() -> list[dict[str, Any]]:
    """Real faults whose first wrong number is a statistic of the mismatch."""
    path = Path(__file__).parents[2] / "cases" / "fault_cases.json"
    cases = json.loads(path.read_text(encoding="utf-8"))
    return [case for case in cases if case["stage"] == "stats.mismatch"]


def test_importance_ratios_are_reported_before_and_after_truncation(tmp_path: Path) -> None:
    (case,) = (one for one in faults() if one["id"] == "K-042")
    lake = Lake.create(tmp_path)
    ratios = case["inputs"]["ratio"]
    write_pair(lake, [[math.log(one) - 3 for one in ratios]], [[-3.0] * len(ratios)])
    row = only_row(lake, cap=case["config"]["tis_cap"])
    right, wrong = case["right"], case["wrong"]
    assert row["importance_ratio"] == pytest.approx(right["mean_ratio"], rel=1e-6)
    assert row["truncated_share"] == pytest.approx(right["share_truncated"], rel=1e-6)
    assert row["importance_ratio_truncated"] == pytest.approx(wrong["mean_ratio"], rel=1e-6)
