"""Whose configuration it is, as far as the settings that the rules read tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trajreplay.query.preflight.rulefiles import built_in
from trajreplay.query.preflight.rules import FRAMEWORKS, RuleSet

_TIMES = 2  # how many more settings another framework has to know, if it knows all of these too


def unrecognised(config: Mapping[str, Any], framework: str, own: Sequence[RuleSet]) -> str:
    """Why rules say nothing of a configuration: it has none of the settings that they read.

    Nothing compared is no pass, and defaults alone are nothing of the file.

    Args:
        config: The configuration, before any defaults.
        framework: Whose it is said to be.
        own: The rules of that framework, those of users too.

    Returns:
        The reason; empty where the rules read something of it.
    """
    mine = _held(config, own)
    others = {one: _held(config, [built_in(one)]) for one in FRAMEWORKS if one != framework}
    most = max(map(len, others.values()))
    likely = [one for one, held in others.items() if len(held) == most]
    theirs = others[likely[0]]
    if mine and not (mine <= theirs and most >= _TIMES * len(mine)):
        return ""
    read = len(_paths(own))
    told = f"{len(mine) or 'none'} of the {read} settings that the rules of {framework} read"
    reason = f"{told} {'are' if len(mine) > 1 else 'is'} in it"
    if most:
        reason += f"; it looks like one of {' or '.join(likely)}: {', '.join(sorted(theirs)[:3])}"
    return reason


def _held(config: Mapping[str, Any], sets: Sequence[RuleSet]) -> set[str]:
    return {path for path in _paths(sets) if _has(config, path)}


def _paths(sets: Sequence[RuleSet]) -> set[str]:
    return {path for of in sets for rule in of.rules for path in rule.reads}


def _has(config: Mapping[str, Any], path: str) -> bool:
    found: Any = config
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return False
        found = found[name]
    return True
