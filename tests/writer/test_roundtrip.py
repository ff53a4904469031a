"""Whatever a trainer may hand over comes back from the lake bit for bit."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.captures import data_files, entries_of, read_rows, record, sample, values_of
from tests.helpers.strategies import CaptureData, captures, patterns
from trajreplay import Lake, SampleRecord
from trajreplay.schema.dtypes import restore
from trajreplay.schema.tables import TABLES
from trajreplay.writer.parquet import seal_columns

KEEP = dict.fromkeys(("prompt", "response", "label", "tool_output"), "truncate:99")
_rollouts = count()


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return Lake.create(tmp_path_factory.mktemp("round") / "lake")


def same_floats(found: Sequence[float | None], given: Sequence[float | None]) -> bool:
    """Whether two columns of nullable floats have the same bits."""
    return [None if one is None else np.float64(one).tobytes() for one in found] == [
        None if one is None else np.float64(one).tobytes() for one in given
    ]


def spans_of(record: SampleRecord) -> list[dict[str, int]] | None:
    if record.weight_versions is None:
        return None
    return [
        dict(zip(("start", "stop", "version"), one, strict=True)) for one in record.weight_versions
    ]


@pytest.mark.parametrize("kind", ["rollout", "step"])
@given(data=st.data())
def test_every_legal_capture_comes_back_bit_for_bit(
    lake: Lake, kind: str, data: st.DataObject
) -> None:
    drawn: CaptureData = data.draw(captures(kind))
    rollout, step = next(_rollouts), 0 if kind == "step" else None
    entry = record(lake, drawn.hand_over, rollout_id=rollout, step_id=step, redaction=KEEP)
    records = drawn.records
    assert entry.rows == len(records)
    if not records:
        assert entry.files == ()
        return
    rows = read_rows(lake, entry)
    table = TABLES[f"{kind}s"]
    assert {name: one.digest for name, one in seal_columns(rows, {}).items()} == {
        name: one.digest for name, one in entry.files[0].columns.items()
    }

    def column(name: str) -> list[Any]:
        return rows[name].to_pylist() if name in rows.column_names else [None] * len(records)

    for name in ("raw_reward", "reward", "greedy_reward"):
        assert same_floats(column(name), [getattr(one, name) for one in records])
    assert column("weight_versions") == [spans_of(one) for one in records]
    assert column("loss_mask") == [list(one.loss_mask) for one in records]
    plain = ["sample_id", "group_id", "group_size", "response_length", "total_length", "truncated"]
    plain += ["trajectory_id", "fragment_index"]
    plain += ["rollout_partition_id", "consumer_batch_id", "micro_batch_id", *KEEP]
    for name in plain:
        assert column(name) == [getattr(one, name) for one in records], name
    if kind == "step":
        own = [
            rollout if one.source_rollout_id is None else one.source_rollout_id for one in records
        ]
        assert column("source_rollout_id") == own
    for name, tensors in drawn.tensors.items():
        present = [one for one in tensors if one is not None]
        assert (name in rows.column_names) == bool(present)
        if present:
            assert rows[name].is_valid().to_pylist() == [one is not None for one in tensors]
            expected = np.concatenate(present)
            found = np.asarray(values_of(rows, name))
            bits = f"u{found.itemsize}"
            np.testing.assert_array_equal(found.view(bits), expected.view(bits))
            assert rows.schema.field(name) == table[name].field


@given(patterns(np.uint16), st.sampled_from(["bfloat16", "float16"]))
def test_half_precision_comes_back_bit_for_bit_through_the_file(
    lake: Lake, bits: Any, dtype: str
) -> None:
    tensor = torch.from_numpy(bits.view(np.int16).copy()).view(getattr(torch, dtype))
    entry = record(
        lake,
        lambda c: c.samples([sample(0, len(bits))]),
        lambda c: c.tensor("log_probs", [tensor]),
        rollout_id=next(_rollouts),
    )
    seal = entry.files[0].columns["log_probs"]
    assert seal.source_dtype == dtype
    found = restore(np.asarray(values_of(read_rows(lake, entry), "log_probs")), dtype)
    np.testing.assert_array_equal(found.view(np.uint16), bits)
    assert seal.non_finite == np.count_nonzero(~np.isfinite(tensor.double().numpy()))


def test_every_file_has_its_entry(lake: Lake) -> None:
    named = {file.path for entry in entries_of(lake) for file in entry.files}
    assert named == data_files(lake)
