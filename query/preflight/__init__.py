"""Configurations that parse but cannot work or do nothing, refused before a cluster starts."""

from trajreplay.query.preflight.check import PreflightFinding, PreflightReport, preflight
from trajreplay.query.preflight.configs import load_config
from trajreplay.query.preflight.rulefiles import built_in, load_rules
from trajreplay.query.preflight.rules import FRAMEWORKS, Rule, RuleSet

__all__ = [
    "FRAMEWORKS",
    "PreflightFinding",
    "PreflightReport",
    "Rule",
    "RuleSet",
    "built_in",
    "load_config",
    "load_rules",
    "preflight",
]
