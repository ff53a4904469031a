"""Reports of real faults that the catalogue refers to: where each was met, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """A fault that somebody met and wrote about.

    Args:
        id: Its name in the catalogue, as `K-001`.
        where: The frameworks.
        what: What went wrong.
        url: The report.
    """

    id: str
    where: str
    what: str
    url: str

    @property
    def text(self) -> str:
        """The report in a line."""
        return f"{self.id}, {self.where}: {self.what}, {self.url}"


# Name, frameworks, what went wrong, and the pull request, issue or commit.
_MET = (
    (
        "K-001",
        "Relax",
        "Streamed prompt groups normalised as one block",
        "redai-studio/Relax/pull/65",
    ),
    (
        "K-003",
        "AReaL",
        "Fixed stride over a batch with a short group",
        "areal-project/AReaL/issues/1419",
    ),
    (
        "K-005",
        "TRL, prime-rl",
        "Group and batch scaling branches swapped",
        "huggingface/trl/issues/3991",
    ),
    (
        "K-006",
        "slime",
        "Whitening reduced over a group without context parallel",
        "THUDM/slime/pull/2235",
    ),
    ("K-008", "NeMo-RL", "Group filter run on the shaped reward", "NVIDIA-NeMo/RL/pull/2478"),
    (
        "K-010",
        "prime-rl, Molt",
        "Empty rollouts removed after the group was closed",
        "PrimeIntellect-ai/prime-rl/pull/2014",
    ),
    (
        "K-011",
        "verl",
        "Critic values masked before the dynamic-batch order is undone",
        "verl-project/verl/pull/1440",
    ),
    ("K-012", "slime", "Fan-out trajectories counted once per fragment", "THUDM/slime/pull/2381"),
    ("K-013", "NeMo-RL", "Prompt key and mask derived from chat roles", "NVIDIA-NeMo/RL/pull/2176"),
    (
        "K-014",
        "slime",
        "Whole-batch rewards paired with rank-local samples",
        "THUDM/slime/pull/2234",
    ),
    ("K-015", "prime-rl", "Missing brackets in the z-score", "PrimeIntellect-ai/prime-rl/pull/390"),
    (
        "K-016",
        "miles, Atropos, NeMo-RL",
        "Equal rewards with a non-zero float32 spread",
        "radixark/miles/issues/570",
    ),
    (
        "K-018",
        "ms-swift",
        "One missing reward turns the whole batch into NaN",
        "modelscope/ms-swift/issues/8123",
    ),
    ("K-019", "ROLL", "Whitening with a single valid token", "alibaba/ROLL/pull/476"),
    (
        "K-021",
        "OpenRLHF",
        "Per-row statistics broadcast along the wrong axis; no-op estimator at n=1",
        "OpenRLHF/OpenRLHF/pull/1250",
    ),
    ("K-022", "OpenRLHF", "A score of 0.0 read as 'no score'", "OpenRLHF/OpenRLHF/pull/1219"),
    ("K-024", "ROLL", "Critic value of a masked slot used as bootstrap", "alibaba/ROLL/pull/447"),
    (
        "K-025",
        "miles, verl",
        "GAE steps through tool and environment tokens",
        "radixark/miles/pull/1827",
    ),
    ("K-027", "slime", "The recorded KL was overwritten in place", "THUDM/slime/pull/2114"),
    (
        "K-028",
        "OpenRLHF, verl",
        "Response length measured as a span over tool tokens",
        "OpenRLHF/OpenRLHF/pull/1252",
    ),
    ("K-029", "AReaL", "Sequence advantage averaged over padding", "areal-project/AReaL/pull/1346"),
    (
        "K-030",
        "NeMo-RL",
        "A span penalty written into a broadcast view",
        "NVIDIA-NeMo/RL/pull/2787",
    ),
    (
        "K-031",
        "TRL, slime, NeMo-RL, OpenRLHF, AReaL",
        "Sampling temperature on one side of the ratio only",
        "huggingface/trl/issues/4159",
    ),
    (
        "K-034",
        "NeMo-RL",
        "Log-prob of the most likely token recorded instead of the sampled one",
        "NVIDIA-NeMo/RL/pull/3297",
    ),
    (
        "K-035",
        "ms-swift, TRL",
        "Processed log-probs normalised over the top-p/top-k set",
        "modelscope/ms-swift/pull/8442",
    ),
    (
        "K-037",
        "prime-rl, xtuner",
        "Packed log-probs one entry short per sample",
        "PrimeIntellect-ai/prime-rl/pull/605",
    ),
    (
        "K-038",
        "verl, Search-R1",
        "Attention mask used as loss mask in multi-turn runs",
        "verl-project/verl/pull/2543",
    ),
    ("K-039", "slime", "Rollout log-probs stored in bfloat16", "THUDM/slime/pull/245"),
    (
        "K-040",
        "rLLM, verl, NeMo-RL, prime-rl",
        "Re-encoded text paired with the engine's log-probs",
        "rllm-org/rllm/issues/816",
    ),
    ("K-042", "NeMo-RL", "Importance ratio reported after truncation", "NVIDIA-NeMo/RL/pull/3900"),
    (
        "K-043",
        "slime, ROLL, TRL",
        "Correction weight from the current policy",
        "THUDM/slime/pull/179",
    ),
    (
        "K-044",
        "OpenRLHF",
        "Sequence mask times an infinite weight",
        "OpenRLHF/OpenRLHF/issues/1295",
    ),
    (
        "K-046",
        "NeMo-RL",
        "Correction weight summed over a long sequence",
        "NVIDIA-NeMo/RL/pull/2269",
    ),
    ("K-047", "verl", "Routes shifted by dense layers", "verl-project/verl/pull/5037"),
    (
        "K-049",
        "SGLang, vLLM, SkyRL",
        "Stale or zero routes for cached prompt tokens",
        "sgl-project/sglang/issues/26975",
    ),
    (
        "K-050",
        "OpenRLHF, MaxText, transformers",
        "Log-softmax over bfloat16 logits",
        "OpenRLHF/OpenRLHF/pull/634",
    ),
    (
        "K-051",
        "slime, Tianshou",
        "Dual clip applied to positive advantages",
        "THUDM/slime/commit/2b10784d862ce8b15153c9096f9cab5d693bca73",
    ),
    ("K-053", "verl", "Clip-fraction metric always 0", "verl-project/verl/pull/972"),
    (
        "K-055",
        "verl",
        "Length-normalised sum without the mean over sequences",
        "verl-project/verl/issues/3741",
    ),
    (
        "K-056",
        "prime-rl, TRL, OpenRLHF",
        "Each rank divides by its own token count",
        "PrimeIntellect-ai/prime-rl/pull/2562",
    ),
    (
        "K-057",
        "ms-swift, TRL",
        "Global token mean divided again by the accumulation steps",
        "modelscope/ms-swift/issues/10117",
    ),
    (
        "K-059",
        "prime-rl",
        "Smaller instead of larger of token count and 1",
        "PrimeIntellect-ai/prime-rl/pull/816",
    ),
    ("K-060", "slime, TRL", "Tool or truncated tokens in the denominator", "THUDM/slime/pull/365"),
    ("K-061", "verl", "KL loss subtracted in a minimisation", "verl-project/verl/pull/179"),
    ("K-062", "SkyRL", "KL term computed without gradient", "NovaSky-AI/SkyRL/pull/1353"),
    (
        "K-064",
        "SkyRL, verl",
        "NaN on a masked token leaks through multiplication",
        "NovaSky-AI/SkyRL/pull/1635",
    ),
    ("K-065", "NeMo-RL, verl, slime, ROLL", "All tokens masked", "NVIDIA-NeMo/RL/issues/158"),
    (
        "K-066",
        "SkyRL, slime",
        "Loss counted once per context-parallel rank",
        "NovaSky-AI/SkyRL/pull/1420",
    ),
    (
        "K-068",
        "ChatLLaMA, TRL",
        "Entropy bonus with the wrong sign; threshold over padding",
        "nebuly-ai/optimate/pull/250",
    ),
    (
        "K-069",
        "miles, SkyRL, minimind, torchforge",
        "Old log-probs recomputed with newer weights",
        "radixark/miles/pull/1829",
    ),
    ("K-071", "AReaL", "Dumped weight version always 0", "areal-project/AReaL/pull/941"),
    (
        "K-073",
        "NeMo-RL, prime-rl, TRL, SkyRL, verl",
        "New weights or fresh caches never reach the engine",
        "NVIDIA-NeMo/RL/pull/4018",
    ),
    ("K-075", "slime, OpenRLHF", "Completed groups thrown away", "THUDM/slime/pull/2238"),
    (
        "K-076",
        "OpenRLHF, NeMo-RL",
        "Resume skips generated but untrained prompts",
        "OpenRLHF/OpenRLHF/issues/1322",
    ),
    ("K-078", "Molt", "One rollout across two weight versions", "NVIDIA-NeMo/labs-molt/pull/124"),
    (
        "K-079",
        "slime",
        "Mask, log-prob or version missing for resumed or aborted parts",
        "THUDM/slime/pull/1445",
    ),
)


REPORTS: Mapping[str, Report] = {
    name: Report(name, where, what, f"https://github.com/{place}")
    for name, where, what, place in _MET
}


def reported(references: Iterable[str]) -> Iterator[str]:
    """References as a reader wants them: reports in a line each, other links as they are.

    >>> next(reported(["K-015"]))
    'K-015, prime-rl: Missing brackets in the z-score, https://github.com/PrimeIntellect-ai/prime-rl/pull/390'
    """
    known = [REPORTS[one] for one in references if one in REPORTS]
    yield from (one.text for one in known)
    links = {one.url for one in known}
    yield from (one for one in references if one not in REPORTS and one not in links)
