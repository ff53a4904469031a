"""Replay bundles of Relax to break: copies of healthy ones, edited, and signed again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CASES = Path(__file__).parents[1] / "cases" / "relax_bundles"
VERDICTS: dict[str, dict[str, str]] = json.loads((CASES / "verdicts.json").read_text())
METADATA = ("manifest.json", "index.json", "expected.json")
Tree = dict[str, Any]


def copied(name: str, to: Path) -> Path:
    """A copy of a case, to be edited."""
    return Path(shutil.copytree(CASES / name, to / name))


def edited(bundle: Path, file: str, edit: Callable[[Tree], object]) -> None:
    """Change a metadata file, and leave what was signed."""
    path = bundle / file
    tree = json.loads(path.read_text())
    edit(tree)
    path.write_text(json.dumps(tree, indent=2, sort_keys=True))


def signed(bundle: Path) -> Path:
    """Sign a rank's files as they are now, and those of its cohort if it is one of several."""
    rank = json.loads((bundle / "COMPLETE").read_text())["ranks"][0]
    manifest = json.loads((bundle / "manifest.json").read_text())
    payloads = {}
    for name, spec in manifest["payloads"].items():
        content = (bundle / "payloads" / f"{name}.pt").read_bytes()
        spec |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        payloads[name] = spec["sha256"]
    (bundle / "manifest.json").write_text(json.dumps(manifest, indent=2))
    hashes = {one: hashlib.sha256((bundle / one).read_bytes()).hexdigest() for one in METADATA}
    edited(bundle, "COMPLETE", lambda tree: tree.update(metadata=hashes))
    change = {"metadata": hashes, "payloads": payloads}
    edited(bundle, f"COMPLETE.{rank}", lambda tree: tree.update(change))
    cohort = bundle.parent
    if (cohort / "COMPLETE").is_file():
        edited(cohort, f"COMPLETE.{rank}", lambda tree: tree.update(change))
        edited(cohort, "COMPLETE", lambda tree: tree["shards"][str(rank)].update(change))
    return bundle


def with_payload(bundle: Path, name: str, tensor: torch.Tensor) -> None:
    """Put another tensor in the place of a payload, or add one."""
    torch.save(tensor, bundle / "payloads" / f"{name}.pt")
    spec = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    edited(bundle, "manifest.json", lambda tree: tree["payloads"].update({name: spec}))
