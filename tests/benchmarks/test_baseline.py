"""The baseline does its work: what is measured against it is not a loop that compares nothing."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import baseline
from benchmarks.workload import make_step

STEP = make_step(0, 16, 32)


def rewrite_stamp(directory: Path, name: str) -> None:
    """Make the manifest agree with a changed file, as one who tampers would."""
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][name] |= baseline.stamp(directory / name)
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for rollout_id in range(3):
        baseline.write_step(tmp_path, rollout_id, STEP)
    return tmp_path


def test_what_was_written_validates_and_replays(root: Path) -> None:
    assert baseline.validate(root) == 3
    assert baseline.replay(root) == []


def test_a_flipped_byte_is_refused(root: Path) -> None:
    payload = root / "rollout_000001_step_0" / "payloads" / "entropy.pt"
    content = bytearray(payload.read_bytes())
    content[len(content) // 2] ^= 1
    payload.write_bytes(content)
    with pytest.raises(ValueError, match=r"entropy\.pt: not the file that was written"):
        baseline.validate(root)


@pytest.mark.parametrize("column", ["old_log_probs", "log_probs", "entropy", "kl", "advantages"])
def test_a_changed_tensor_is_a_difference(root: Path, column: str) -> None:
    directory = root / "rollout_000002_step_0"
    payload = directory / "payloads" / f"{column}.pt"
    torch.save(torch.load(payload, weights_only=True) + 0.5, payload)
    rewrite_stamp(directory, f"payloads/{column}.pt")
    assert baseline.replay(root)


def test_a_rollout_is_found_by_its_index(root: Path) -> None:
    (bundle,) = baseline.find(root, 1)
    assert torch.equal(torch.cat(bundle["tensors"]["kl"]), torch.from_numpy(STEP.kl.reshape(-1)))
