"""Packages of users with entry points, and a training whose arithmetic only their kernels know."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch

from tests.helpers.cohorts import Expected
from tests.helpers.trainer import Sample

KERNELS, REWARDS = "trajreplay.kernels", "trajreplay.rewards"
# Every kernel's arithmetic is none that a setting names.
SOURCE = '''
"""Production functions of somebody."""

import torch


def rewards(settings, raw, groups, lengths):
    best = torch.full((int(groups.max()) + 1,), -torch.inf, dtype=raw.dtype)
    return raw - best.scatter_reduce(0, groups, raw, "amax")[groups] + lengths / 8


def centred(settings, raw, groups, lengths):
    return raw - raw.mean()


def kl(settings, policy, reference):
    return (policy - reference).abs() ** 1.5


def advantages(settings, reward, mask, offsets, kl, values):
    lengths = offsets.diff()
    place = torch.arange(len(mask)) - offsets[:-1].repeat_interleave(lengths)
    advantages = reward.repeat_interleave(lengths) * 0.5 ** place - settings.kl.coef * kl
    return advantages, advantages + values


def policy(settings, columns, mask, offsets):
    ratio = (columns["log_probs"] - columns["old_log_probs"]).exp()
    columns["log_probs"].zero_()
    loss = -columns["advantages"] * torch.tanh(ratio - settings.loss.eps_clip)
    return {"pg_loss": loss, "entropy_loss": columns["entropy"], "spread": ratio * ratio}


def value(settings, columns, mask, offsets):
    return {"value_loss": torch.log(torch.cosh(columns["values"] - columns["returns"]))}


def broken(settings, *inputs):
    raise RuntimeError("no such thing\\nas a loss")


def narrow(settings, columns, mask, offsets):
    return {"pg_loss": columns["log_probs"].float()}


def short(settings, columns, mask, offsets):
    return {"pg_loss": columns["log_probs"][:3], "entropy_loss": columns["entropy"]}


def bare(settings, columns, mask, offsets):
    return {"pg_loss": columns["log_probs"]}


def nothing(settings, *inputs):
    return None


def leaves(settings, *inputs):
    raise SystemExit(0)


number = 7
'''
_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.2"
{tables}
"""


def write_package(
    folder: Path, name: str, points: Mapping[str, Mapping[str, str]], source: str = SOURCE
) -> Path:
    """Put a package and its metadata into a folder, as an installer would.

    Args:
        folder: Becomes importable once it is on `sys.path`.
        name: Of the package, which is one module.
        points: By group, the values of entry points by name.
        source: The module.
    """
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = []
    for group, named in points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in named.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def pip_install(
    work: Path, name: str, points: Mapping[str, Mapping[str, str]], source: str = SOURCE
) -> Path:
    """Build such a package and install it into a folder with pip, without network."""
    project, target = work / "project", work / "target"
    project.mkdir()
    (project / f"{name}.py").write_text(source, encoding="utf-8")
    tables = "".join(
        f'\n[project.entry-points."{group}"]\n'
        + "".join(f'"{key}" = "{value}"\n' for key, value in named.items())
        for group, named in points.items()
    )
    (project / "pyproject.toml").write_text(_PROJECT.format(name=name, tables=tables))
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        "--target",
        str(target),
        str(project),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return target


def score(samples: Sequence[Sample]) -> None:
    """Rewards, KL, advantages and returns as the kernels of `SOURCE` have them, in loops."""
    by_group = sorted(samples, key=lambda one: (one.rollout_id, str(one.group)))
    for _, group in groupby(by_group, key=lambda one: (one.rollout_id, one.group)):
        members = list(group)
        best = max(one.raw_reward for one in members)
        for one in members:
            one.reward = one.raw_reward - best + one.length / 8
    for one in samples:
        get = {name: values.double().tolist() for name, values in one.columns.items()}
        pairs = zip(get["old_log_probs"], get["ref_log_probs"], strict=True)
        one.columns["kl"] = torch.tensor([abs(p - r) ** 1.5 for p, r in pairs])
        kl = one.columns["kl"].double().tolist()
        reward = float(one.reward or 0.0)
        advantages = [reward * 0.5**t - 0.1 * kl[t] for t in range(one.length)]
        one.columns["advantages"] = torch.tensor(advantages)
        returns = [a + v for a, v in zip(advantages, get["old_values"], strict=True)]
        one.columns["returns"] = torch.tensor(returns)


def scalars(shares: Mapping[int, Sequence[Sample]]) -> dict[int, list[Expected]]:
    """What each rank records of both losses: sums over samples of means over tokens."""
    meaning = {"scope": "rank", "reduction": "sum"}
    found = {}
    for rank, samples in shares.items():
        sums = dict.fromkeys(("pg_loss", "entropy_loss", "spread", "value_loss"), 0.0)
        for one in samples:
            get = {name: values.double().tolist() for name, values in one.columns.items()}
            counted = max(sum(one.mask), 1)
            for t in (t for t in range(one.length) if one.mask[t]):
                ratio = math.exp(get["log_probs"][t] - get["old_log_probs"][t])
                sums["pg_loss"] -= get["advantages"][t] * math.tanh(ratio - 0.2) / counted
                sums["entropy_loss"] += get["entropy"][t] / counted
                sums["spread"] += ratio * ratio / counted
                error = get["values"][t] - get["returns"][t]
                sums["value_loss"] += math.log(math.cosh(error)) / counted
        value = {"value_loss": sums.pop("value_loss")}
        sums["loss"] = sums["pg_loss"] - 0.01 * sums["entropy_loss"]
        found[rank] = [Expected(sums, meaning), Expected(value, meaning, "loss.value")]
    return found
