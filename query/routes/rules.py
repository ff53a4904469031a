"""The rules of router-replay traces, declared once: what each demands, and under which contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Contract = Literal["legacy-async", "transfer-queue"]
CONTRACTS: tuple[Contract, ...] = get_args(Contract)
_QUEUE: tuple[Contract, ...] = ("transfer-queue",)
_LEGACY: tuple[Contract, ...] = ("legacy-async",)


@dataclass(frozen=True)
class RouteRule:
    """One rule.

    Args:
        name: What findings and policies call it.
        demand: What must hold.
        contracts: Transport contracts under which it is checked.
        both_stages: Whether it compares the two stages, so that nothing is left of it with one.
        of_attempt: Whether it needs to be told of the attempt: a folder alone cannot decide it.
        by_previews: Whether hashes alone cannot decide it: it stays unverified where previews do
            not hold whole tensors, or lengths are not known.
    """

    name: str
    demand: str
    contracts: tuple[Contract, ...] = CONTRACTS
    both_stages: bool = False
    of_attempt: bool = False
    by_previews: bool = False


# From the cause to what follows from it: a finding of an earlier rule explains later ones.
RULES = (
    RouteRule("trace.json", "Every line is one JSON object, whole."),
    RouteRule("trace.record", "Every line is a record of a known event with its fields."),
    RouteRule("trace.empty", "There are records."),
    RouteRule(
        "trace.one_attempt",
        "Records are of one attempt: no rank has two processes, no counter starts twice.",
    ),
    RouteRule(
        "trace.attempt",
        "In a gate: records are of processes, ranks, steps and samples that the attempt captured.",
        of_attempt=True,
    ),
    RouteRule("contract.mixed", "There are no producers and no fetches.", _LEGACY),
    RouteRule("stage.forbidden", "Only the stages that the policy states replay routes."),
    RouteRule("rank.coverage", "Every rank of the job has records of every stated stage."),
    RouteRule("producer.coverage", "Producers were recorded, whole.", _QUEUE),
    RouteRule("producer.duplicate", "A key put again has the hashes it had.", _QUEUE),
    RouteRule("producer.input_ids", "Producers recorded the tokens beside the routes.", _QUEUE),
    RouteRule(
        "fetch.coverage",
        "Every produced key is fetched for every stated stage, by all ranks of a replica.",
        _QUEUE,
    ),
    RouteRule("fetch.hash", "What is fetched has the hashes of what was produced.", _QUEUE),
    RouteRule("tensor.shape", "Shapes, lengths and dtypes of tensors agree with one another."),
    RouteRule(
        "tensor.hash", "Tensors of one hash show the same values, and whole ones their hash."
    ),
    RouteRule(
        "assign.coverage",
        "Every stated stage assigns routes to layers, in every step from the first to the last of "
        "prev-logprob, and to every sample that its ranks fetched, once.",
    ),
    RouteRule(
        "layer.coverage",
        "Every rank replays all layers it owns, and the ranks of a replica every MoE layer.",
    ),
    RouteRule("assign.count", "A rank assigns each layer once a micro-batch."),
    RouteRule("action.coverage", "Every assignment is set to replay forward once."),
    RouteRule(
        "backward.count",
        "In train a layer replays backward as often as forward; in other stages never.",
    ),
    RouteRule("verify.coverage", "Every replayed forward was verified."),
    RouteRule("verify.match", "Every verification matched."),
    RouteRule(
        "verify.contradiction",
        "A verification that matched without fallback rows shows equal hashes.",
    ),
    RouteRule("verify.expected", "What a verification expected is what was installed."),
    RouteRule("installed.action", "What an action installs was assigned to its layer."),
    RouteRule("cp.coverage", "Every context-parallel rank recorded its shard of a micro-batch."),
    RouteRule("cp.identity", "Of every micro-batch some token identities were verified."),
    RouteRule(
        "cp.reassembly",
        "The shards of a micro-batch hold every position exactly once, and count what they hold.",
        by_previews=True,
    ),
    RouteRule(
        "installed.payload",
        "Assigned routes are those of the shard, and shards put together those that were fetched.",
        by_previews=True,
    ),
    RouteRule(
        "stage.routes",
        "Train replays the routes of prev-logprob for the same tokens, all of them.",
        both_stages=True,
    ),
    RouteRule(
        "route.values",
        "Experts of a token are distinct, in range, or all -1, and not the dummy route throughout.",
    ),
    RouteRule("route.fallback", "No more rows than allowed are left to the trainer's own router."),
)
RULES_BY_NAME = {rule.name: rule for rule in RULES}
