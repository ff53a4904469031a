"""The plain way, to measure against: a directory a step, `torch.save` files and JSON beside them.

Nothing here is slow on purpose. It is what an engineer writes in an afternoon, and near what the
field uses: packed tensors in `payloads/`, samples in `index.json`, recorded outputs in
`expected.json`, sizes and SHA-256 of all in `manifest.json`; a replay that walks the samples.

    python -m benchmarks.baseline replay|validate DIRECTORY
"""

import hashlib
import io
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import workload
from benchmarks.workload import Step

RELATIVE = 1e-4
ABSOLUTE = 1e-5

Bundle = dict[str, Any]


def write_step(root: Path, rollout_id: int, step: Step) -> None:
    """Write one step into its own directory."""
    directory = root / f"rollout_{rollout_id:06d}_step_0"
    (directory / "payloads").mkdir(parents=True)
    files = {}
    for name, values in step.token_columns().items():
        path = directory / "payloads" / f"{name}.pt"
        torch.save(torch.from_numpy(values), path)
        files[f"payloads/{name}.pt"] = {**stamp(path), "values": values.size}
    contents = {"index.json": _index(rollout_id, step), "expected.json": _expected(step)}
    for name, content in contents.items():
        path = directory / name
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")
        files[name] = stamp(path)
    manifest = {"format_version": "1.0.0", "files": files}
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def validate(root: Path) -> int:
    """Read every step, check its digests and lengths, and return how many there are."""
    directories = sorted(root.iterdir())
    for directory in directories:
        load_step(directory)
    return len(directories)


def replay(root: Path) -> list[str]:
    """Recompute every step from its rewards to its loss, and return what differs."""
    differences = []
    for directory in sorted(root.iterdir()):
        bundle = load_step(directory)
        differences += [f"{directory.name}: {what}" for what in _replay_step(bundle)]
    return differences


def find(root: Path, rollout_id: int) -> list[Bundle]:
    """Load the steps of one rollout, which is looked for in every index."""
    found = []
    for directory in sorted(root.iterdir()):
        index = json.loads((directory / "index.json").read_bytes())
        if index["identity"]["rollout_id"] == rollout_id:
            found.append(load_step(directory))
    return found


def load_step(directory: Path) -> Bundle:
    """Read one step and check its digests and lengths: tensors are split, one a sample."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    contents = {}
    for name, stamp in manifest["files"].items():
        content = (directory / name).read_bytes()
        if len(content) != stamp["bytes"] or hashlib.sha256(content).hexdigest() != stamp["sha256"]:
            raise ValueError(f"{directory / name}: not the file that was written")
        contents[name] = content
    index = json.loads(contents["index.json"])
    lengths = [sample["response_length"] for sample in index["samples"]]
    if lengths != [len(sample["loss_mask"]) for sample in index["samples"]]:
        raise ValueError(f"{directory}: a loss_mask has another length than its response")
    tensors = {}
    for name, content in contents.items():
        if name.endswith(".pt"):
            packed = torch.load(io.BytesIO(content), weights_only=True)
            if packed.numel() != sum(lengths):
                raise ValueError(f"{directory / name}: {packed.numel()} values, not {sum(lengths)}")
            tensors[Path(name).stem] = packed.split(lengths)
    expected = json.loads(contents["expected.json"])
    return {"index": index, "expected": expected, "tensors": tensors}


def stamp(path: Path) -> dict[str, Any]:
    """Measure a file: its size and its SHA-256."""
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _index(rollout_id: int, step: Step) -> dict[str, Any]:
    config = {
        "advantage_estimator": "grpo",
        "n_samples_per_prompt": workload.SAMPLES_PER_PROMPT,
        "grpo_std_normalization": True,
        "kl_loss_type": "k1",
        "kl_coef": workload.KL_COEF,
        "eps_clip": workload.EPS_CLIP,
        "eps_clip_high": workload.EPS_CLIP_HIGH,
        "entropy_coef": workload.ENTROPY_COEF,
    }
    samples = [
        {
            "sample_id": f"s-{row}",
            "group_index": int(step.group_index[row]),
            "response_length": step.response_length,
            "total_length": int(step.prompt_length[row]) + step.response_length,
            "loss_mask": step.loss_mask[row].tolist(),
        }
        for row in range(step.samples)
    ]
    identity = {"run_id": "bench", "rollout_id": rollout_id, "step_id": 0}
    return {"identity": identity, "config": config, "samples": samples}


def _expected(step: Step) -> dict[str, Any]:
    return {
        "reward.raw": {"raw_rewards": step.raw_reward.tolist()},
        "reward.post_process": {"rewards": step.reward.tolist()},
        "loss.policy": step.scalars,
    }


def _replay_step(bundle: Bundle) -> list[str]:
    """Compare each stage with the record, recomputed from what the stage before gave."""
    samples, config = bundle["index"]["samples"], bundle["index"]["config"]
    tensors, expected = bundle["tensors"], bundle["expected"]
    masks = [torch.tensor(sample["loss_mask"], dtype=torch.float32) for sample in samples]
    rewards = _group_rewards(expected["reward.raw"]["raw_rewards"], samples)
    kl = [
        old - ref
        for old, ref in zip(tensors["old_log_probs"], tensors["ref_log_probs"], strict=True)
    ]
    advantages = [torch.full_like(one, reward) for one, reward in zip(kl, rewards, strict=True)]
    differences = []
    for row, (reward, recorded) in enumerate(
        zip(rewards, expected["reward.post_process"]["rewards"], strict=True)
    ):
        if not math.isclose(reward, recorded, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            differences.append(f"reward of sample {row}: {recorded} recorded, {reward} recomputed")
    for name, recomputed in (("kl", kl), ("advantages", advantages)):
        for row, (ours, recorded) in enumerate(zip(recomputed, tensors[name], strict=True)):
            if not torch.allclose(ours, recorded, rtol=RELATIVE, atol=ABSOLUTE):
                differences.append(f"{name} of sample {row}")
    for name, value in _policy_loss(tensors, advantages, masks, config).items():
        recorded = expected["loss.policy"][name]
        if not math.isclose(value, recorded, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            differences.append(f"{name}: {recorded} recorded, {value} recomputed")
    return differences


def _group_rewards(raw: list[float], samples: list[dict[str, Any]]) -> list[float]:
    members = defaultdict(list)
    for row, sample in enumerate(samples):
        members[sample["group_index"]].append(row)
    rewards = [0.0] * len(samples)
    for rows in members.values():
        group = torch.tensor([raw[row] for row in rows])
        centred = group - group.mean()
        normalised = centred / (centred.std() + float(workload.REWARD_EPSILON))
        for row, reward in zip(rows, normalised.tolist(), strict=True):
            rewards[row] = reward
    return rewards


def _policy_loss(
    tensors: dict[str, tuple[Tensor, ...]],
    advantages: list[Tensor],
    masks: list[Tensor],
    config: dict[str, Any],
) -> dict[str, float]:
    low, high = 1 - config["eps_clip"], 1 + config["eps_clip_high"]
    totals = dict.fromkeys(("pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl"), torch.tensor(0.0))
    rows = zip(
        tensors["old_log_probs"],
        tensors["log_probs"],
        tensors["entropy"],
        advantages,
        masks,
        strict=True,
    )
    for old, new, entropy, advantage, mask in rows:
        log_ratio = old - new
        ratio = (-log_ratio).exp()
        unclipped = -ratio * advantage
        clipped = -ratio.clamp(low, high) * advantage
        count = mask.sum().clamp(min=1)
        terms = {
            "pg_loss": torch.maximum(unclipped, clipped),
            "entropy_loss": entropy,
            "pg_clipfrac": (clipped > unclipped).float(),
            "ppo_kl": log_ratio,
        }
        for name, values in terms.items():
            totals[name] = totals[name] + (values * mask).sum() / count
    result = {name: float(total) for name, total in totals.items()}
    result["loss"] = result["pg_loss"] - config["entropy_coef"] * result["entropy_loss"]
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    verb, root = sys.argv[1], Path(sys.argv[2])
    sys.exit(bool(replay(root)) if verb == "replay" else not validate(root))
