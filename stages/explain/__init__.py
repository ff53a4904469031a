"""Saying what is wrong: the known mistake that reproduces a divergence."""

from trajreplay.stages.explain.across import Cluster, clusters
from trajreplay.stages.explain.explanation import Explanation, Hypothesis
from trajreplay.stages.explain.non_finite import FirstNonFinite
from trajreplay.stages.explain.rounding import Rounded
from trajreplay.stages.explain.run import Explained, explain

__all__ = [
    "Cluster",
    "Explained",
    "Explanation",
    "FirstNonFinite",
    "Hypothesis",
    "Rounded",
    "clusters",
    "explain",
]
