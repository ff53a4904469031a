"""Declarations: tables, settings, contracts, policies and records say what they mean."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trajreplay.schema.canonical import dump_signed, load_signed
from trajreplay.schema.contracts import STAGE_NAMES, STAGES, StageContract, stage_named
from trajreplay.schema.errors import CaptureError, SchemaError, TrajReplayError, listed
from trajreplay.schema.policy import TOLERANCES, Redaction, Tolerance, tolerance_of
from trajreplay.schema.recompute import RecomputeConfig
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.settings import (
    AdvantageSettings,
    KlSettings,
    LossSettings,
    RewardSettings,
    Settings,
)
from trajreplay.schema.tables import ROLLOUTS, SAMPLE_TABLES, STEPS, TABLES, length_column


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_every_column_is_documented_once(table: Any) -> None:
    assert len(set(table.names)) == len(table.columns)
    assert all(column.doc.endswith(".") for column in table.columns)
    assert set(table.key) <= set(table.names)
    assert table.arrow.names == list(table.names)


def test_list_elements_are_never_null() -> None:
    lists = [one for table in TABLES.values() for one in table.columns if one.is_list]
    assert lists
    assert not any(one.type.value_field.nullable for one in lists)


def test_both_sample_tables_hold_the_inputs_of_every_stage() -> None:
    for stage in STAGES:
        for table in SAMPLE_TABLES.values():
            assert set(stage.inputs) | set(stage.outputs) <= set(table.names), stage.name


def test_tokens_count_the_prompt_and_other_tensors_do_not() -> None:
    assert length_column("tokens") == "total_length"
    assert length_column("log_probs") == "response_length"
    assert {"tokens", "log_probs"} <= set(ROLLOUTS.names) & set(STEPS.names)


def test_columns_know_their_kind() -> None:
    assert STEPS["log_probs"].is_list
    assert STEPS["log_probs"].is_floating
    assert not STEPS["tokens"].is_floating
    assert STEPS["sample_id"].is_text
    assert STEPS["loss_mask"].type.value_type == pa.uint8()


def test_settings_come_back_from_their_stored_form() -> None:
    settings = Settings(
        reward=RewardSettings(n_samples_per_prompt=8, epsilon=1e-4),
        kl=KlSettings("low_var_kl", coef=0.01),
        advantage=AdvantageSettings("reinforce"),
        loss=LossSettings(0.1, 0.3, aggregation="sum-of-sample-mean", tis=True),
        handoff={"reward": "bfloat16"},
    )
    assert Settings.from_json(settings.to_json()) == settings
    stored = load_signed(dump_signed(settings.to_json()), "x")
    stored.pop("~blake3", None)
    assert Settings.from_json(stored) == settings


def test_the_short_form_resolves_into_full_settings() -> None:
    resolved = RecomputeConfig(
        n_samples_per_prompt=4,
        grpo_std_normalization=False,
        kl_loss_type="low_var_kl",
        kl_coef=0.5,
        eps_clip=0.1,
        entropy_coef=0.01,
        use_rollout_logprobs=True,
        use_tis=True,
    ).resolve()
    assert resolved.reward == RewardSettings(n_samples_per_prompt=4, divide_by_std=False)
    assert resolved.kl == KlSettings("low_var_kl", 0.5, "rollout", (-10.0, 10.0))
    assert resolved.loss.eps_clip_high == 0.1
    assert (resolved.loss.old_source, resolved.loss.tis) == ("rollout", True)
    assert RecomputeConfig(rewards_normalization=False).resolve().reward.grouping == "none"


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"bonus": {}}, "section 'bonus'"),
        ({"kl": {"color": 1}}, r"settings\.kl has the field 'color'"),
        ({"kl": {"coef": "x"}}, r"settings\.kl: "),
        ({"reward": {"divide_by_std": 1}}, "divide_by_std is 1, expected true or false"),
        ({"reward": {"ddof": -1}}, "non-negative integer"),
        ({"loss": {"eps_clip": "inf"}}, "float32 can hold"),
        ({"loss": {"per_token": 0}}, "true or false"),
        ({"handoff": {"reward": "rounded"}}, "expected one of exact"),
    ],
)
def test_settings_of_another_shape_are_refused(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(SchemaError, match=problem):
        Settings.from_json(tree)


def test_a_stage_is_found_by_name_or_refused_with_the_names() -> None:
    assert [stage_named(name).name for name in STAGE_NAMES] == list(STAGE_NAMES)
    with pytest.raises(SchemaError, match=r"unknown stage 'loss', expected one of sample, .*"):
        stage_named("loss")


def test_a_contract_claims_a_known_capability_of_a_known_stage() -> None:
    assert StageContract("sample").to_json()["capability"] == "recompute"
    with pytest.raises(SchemaError, match="capability is 'maybe'"):
        StageContract("sample", "maybe")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="unknown stage"):
        StageContract("nonsense")


def test_a_tolerance_tightens_and_tells_when_it_loosens() -> None:
    policy = tolerance_of("float32")
    assert policy.tightened(Tolerance(1.0, 1e-9)) == Tolerance(policy.atol, 1e-9)
    assert Tolerance(1.0, 0.0).loosens(policy)
    assert not policy.loosens(policy)
    assert tolerance_of("float8") == TOLERANCES["float32"]


def test_text_is_dropped_unless_something_else_is_said() -> None:
    assert Redaction().apply("prompt", "secret") is None
    assert Redaction({"prompt": "truncate"}).apply("prompt", "x" * 100) == "x" * 64
    hashed = Redaction({"prompt": "hash"})
    stored = hashed.apply("prompt", "secret")
    assert stored
    assert "secret" not in stored
    assert hashed.problem("prompt", stored) == ""
    assert hashed.problem("prompt", "secret") == "is plain text, though the policy says hash"
    assert hashed.problem("response", "secret") == "is stored, though the policy drops it"
    assert Redaction({"label": "truncate:3"}).problem("label", "long").startswith("has 4")
    assert hashed.apply("prompt", None) is None


@pytest.mark.parametrize(
    "rules", [{"color": "drop"}, {"prompt": "keep"}, {"prompt": "hash:3"}, {"prompt": "truncate:x"}]
)
def test_a_redaction_that_means_nothing_is_refused(rules: dict[str, str]) -> None:
    with pytest.raises(SchemaError, match="redaction"):
        Redaction(rules)


def test_a_group_has_one_name() -> None:
    record = SampleRecord("s", 0, 0, np.zeros(0), group_index=7)
    assert record.group == "g-7"
    assert SampleRecord("s", 0, 0, [], group_index=7, group_id="g-7").group == "g-7"
    with pytest.raises(CaptureError, match="group_index 7 and group_id 'x'"):
        _ = SampleRecord("s", 0, 0, [], group_index=7, group_id="x").group


def test_an_error_has_its_hint_on_a_line_of_its_own_and_its_facts() -> None:
    error = TrajReplayError("a: b", hint="Do c.", rank=3)
    assert str(error) == "a: b\n\nDo c."
    assert error.facts == {"rank": 3}


def test_ten_problems_are_listed_and_the_others_counted() -> None:
    assert listed(["a", "b"]) == "a\n  b"
    assert listed(map(str, range(12))).endswith("9\n  and 2 more")
    assert math.isfinite(len(listed([])))
