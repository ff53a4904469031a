"""The seven tables of a lake, declared once."""

from __future__ import annotations

import pyarrow as pa

from trajreplay.schema.columns import Column, Role, Table, list_of

FORMAT_VERSION = 1

_RUN = Column("run_id", pa.string(), "Training job.", "key")
_ATTEMPT = Column("attempt", pa.int32(), "Restart of the job, 0 for the first.", "key")
_ROLLOUT = Column("rollout_id", pa.int64(), "Round of sampling.", "key")
_STEP = Column("step_id", pa.int64(), "Optimizer step within its rollout.", "key")
_RANK = Column("rank", pa.int32(), "Process that captured the row.", "key")
_ROW = Column("row", pa.int32(), "Position inside the capture.", "key")

SPANS = list_of(
    pa.struct(
        [
            pa.field("start", pa.int32(), nullable=False),
            pa.field("stop", pa.int32(), nullable=False),
            pa.field("version", pa.int64(), nullable=False),
        ]
    )
)

_IDENTITY = (
    Column("sample_id", pa.string(), "One prompt with one response.", "identity"),
    Column("group_id", pa.string(), "Samples of one prompt.", "identity", nullable=True),
    Column(
        "group_size",
        pa.int32(),
        "Members that the group had when it was normalised, where the producer knows.",
        "identity",
        nullable=True,
    ),
)
_SOURCE = (
    Column("source_attempt", pa.int32(), "Attempt that generated the sample.", "identity"),
    Column("source_rollout_id", pa.int64(), "Rollout that generated the sample.", "identity"),
)
_PROVENANCE = (
    Column(
        "rollout_partition_id", pa.string(), "Partition it came in.", "provenance", nullable=True
    ),
    Column(
        "consumer_batch_id",
        pa.string(),
        "Batch it was handed over in.",
        "provenance",
        nullable=True,
    ),
    Column("micro_batch_id", pa.string(), "Forward pass it shared.", "provenance", nullable=True),
    Column(
        "weight_versions",
        SPANS,
        "Weights that sampled the response tokens [start, stop).",
        "provenance",
        nullable=True,
    ),
    Column(
        "trajectory_id",
        pa.string(),
        "Trajectory that it is a fragment of.",
        "provenance",
        nullable=True,
    ),
    Column(
        "context_rank",
        pa.int32(),
        "Which context-parallel shard of the sample the row is, where that is its own.",
        "provenance",
        nullable=True,
    ),
    Column(
        "context_size",
        pa.int32(),
        "How many shards that sample has.",
        "provenance",
        nullable=True,
    ),
    Column(
        "padded_length",
        pa.int32(),
        "Tokens that its sequence was padded to before ranks cut it, where that is a batch's.",
        "provenance",
        unit="token",
        nullable=True,
    ),
    Column(
        "fragment_index",
        pa.int32(),
        "Its place among the fragments of its trajectory, from 0.",
        "provenance",
        nullable=True,
    ),
    Column("agent_id", pa.string(), "Which agent of its environment.", "provenance", nullable=True),
    Column(
        "episode_id",
        pa.string(),
        "The run of an environment that it is from, where several agents act in one.",
        "provenance",
        nullable=True,
    ),
    Column("turns", pa.int32(), "Turns of the model.", "provenance", unit="turn", nullable=True),
    Column(
        "first_message_length",
        pa.int32(),
        "Response tokens of the first message of the model.",
        "provenance",
        unit="token",
        nullable=True,
    ),
    Column("truncated", pa.bool_(), "Cut at the length limit.", "provenance", nullable=True),
)
_TEXT = tuple(
    Column(name, pa.string(), f"{doc}, as the redaction policy allows.", "text", nullable=True)
    for name, doc in (
        ("prompt", "Prompt text"),
        ("response", "Response text"),
        ("label", "Reference answer"),
        ("tool_output", "Output of tools"),
    )
)


def _tokens(name: str, doc: str, role: Role, unit: str = "nat") -> Column:
    return Column(name, list_of(pa.float32()), doc, role, unit=unit, nullable=True)


_SAMPLE = (
    Column("response_length", pa.int32(), "Response tokens.", "input", unit="token"),
    Column("total_length", pa.int32(), "Prompt and response tokens.", "input", unit="token"),
    Column(
        "loss_mask", list_of(pa.uint8()), "1 where a response token counts in the loss.", "input"
    ),
    Column(
        "message_faults",
        list_of(pa.uint8()),
        "What is wrong with the message of each response token: 0 nothing, 1 an invalid tool call, "
        "2 malformed thinking.",
        "input",
        nullable=True,
    ),
    Column("raw_reward", pa.float64(), "Score given.", "output", nullable=True),
    Column(
        "reward_components",
        list_of(pa.float64()),
        "Its components, NaN where one is missing, in the order of the names in reward.weights.",
        "output",
        nullable=True,
    ),
    Column(
        "greedy_reward",
        pa.float64(),
        "Score of the greedy response to the same prompt.",
        "input",
        nullable=True,
    ),
    Column(
        "kept_baseline",
        pa.float64(),
        "Baseline that the trainer kept from earlier steps, as it was taken off.",
        "input",
        nullable=True,
    ),
    Column(
        "last_value",
        pa.float64(),
        "Critic's value past the last response token.",
        "input",
        nullable=True,
    ),
    Column("reward", pa.float64(), "Score used, after post-processing.", "output", nullable=True),
    Column("tokens", list_of(pa.int32()), "Token ids, prompt first.", "input", nullable=True),
    _tokens("rollout_log_probs", "Log-probabilities from the sampling engine.", "input"),
    _tokens("old_log_probs", "Trainer's log-probabilities before the update.", "input"),
    _tokens("log_probs", "Log-probabilities of the current policy.", "input"),
    _tokens("ref_log_probs", "Log-probabilities of the frozen reference.", "input"),
    _tokens("entropy", "Entropy of the current policy at each response token.", "input"),
    _tokens("teacher_log_probs", "Log-probabilities of the teacher of a distillation.", "input"),
    _tokens("sum_pi_squared", "Sum over the vocabulary of squared probabilities.", "input", ""),
    _tokens("token_rewards", "Reward of each response token.", "input", ""),
    _tokens("kl", "KL estimate of policy against reference.", "output"),
    _tokens("advantages", "Advantage of each response token.", "output", ""),
    _tokens("returns", "Return of each response token.", "output", ""),
    _tokens("values", "Critic's value of each response token.", "input", ""),
    _tokens("old_values", "Critic's value before the update.", "input", ""),
)

GRADIENTS = "log_prob_gradients"
_WITNESS = _tokens(
    GRADIENTS,
    "Derivative of the loss by each current log-probability, as it was propagated back.",
    "input",
    "1/nat",
)

_STEP_KEY = (_RUN, _ATTEMPT, _ROLLOUT, _STEP, _RANK, _ROW)

ROLLOUTS = Table(
    "rollouts",
    ("run_id", "attempt", "rollout_id", "rank", "row"),
    (_RUN, _ATTEMPT, _ROLLOUT, _RANK, _ROW, *_IDENTITY, *_PROVENANCE, *_TEXT, *_SAMPLE),
    "One sample as generated and rewarded.",
)
STEPS = Table(
    "steps",
    ("run_id", "attempt", "rollout_id", "step_id", "rank", "row"),
    (*_STEP_KEY, *_SOURCE, *_IDENTITY, *_PROVENANCE, *_TEXT, *_SAMPLE, _WITNESS),
    "One sample as consumed by an optimizer step.",
)

_CAPTURE = (
    _RUN,
    _ATTEMPT,
    Column("kind", pa.string(), "rollout, step or events.", "key"),
    Column("rollout_id", pa.int64(), "Round of sampling.", "key", nullable=True),
    Column("step_id", pa.int64(), "Optimizer step, null at rollout level.", "key", nullable=True),
    _RANK,
)
_CAPTURE_KEY = tuple(column.name for column in _CAPTURE)

OUTPUTS = Table(
    "outputs",
    (*_CAPTURE_KEY, "stage", "field", "scope", "micro_batch_id", "sample_id"),
    (
        *_CAPTURE,
        Column("stage", pa.string(), "Stage that computed it.", "identity"),
        Column("field", pa.string(), "Name of the scalar.", "identity"),
        Column(
            "scope",
            pa.string(),
            "sample, micro_batch, rank or global; null if unstated.",
            "identity",
            nullable=True,
        ),
        Column("micro_batch_id", pa.string(), "At scope micro_batch.", "identity", nullable=True),
        Column("sample_id", pa.string(), "At scope sample.", "identity", nullable=True),
        Column(
            "row", pa.int32(), "At scope sample, the row of the capture.", "identity", nullable=True
        ),
        Column("value", pa.float64(), "The recorded scalar.", "output"),
        Column(
            "reduction",
            pa.string(),
            "sum, mean or weighted-mean; null if unstated.",
            "identity",
            nullable=True,
        ),
        Column("numerator", pa.float64(), "Where recorded.", "output", nullable=True),
        Column("denominator", pa.float64(), "Where recorded.", "input", nullable=True),
        Column("scale", pa.float64(), "Factor already inside the value.", "input"),
    ),
    "One recorded scalar of a stage.",
)


def _experts(name: str, doc: str) -> Column:
    return Column(name, list_of(pa.int16()), f"{doc}, by token, layer, slot.", "input", "", True)


ROUTES = Table(
    "routes",
    (*_CAPTURE_KEY, "row"),
    (
        *_CAPTURE,
        Column("row", pa.int32(), "Row of the sample in its capture.", "key"),
        Column("sample_id", pa.string(), "The routed sample.", "identity"),
        Column("layers", pa.int32(), "MoE layers recorded.", "input"),
        Column("top_k", pa.int32(), "Experts chosen per token and layer.", "input"),
        Column(
            "num_experts", pa.int32(), "Experts of a layer, where known.", "input", nullable=True
        ),
        Column(
            "layer_numbers",
            list_of(pa.int32()),
            "Number of each recorded layer in the model, where it is not its place among them.",
            "input",
            nullable=True,
        ),
        _experts("rollout_experts", "Choices of the sampling engine"),
        _experts("old_experts", "Choices of the trainer where it made old_log_probs"),
        _experts("experts", "Choices of the trainer where it made log_probs"),
    ),
    "One sample's expert choices in a mixture-of-experts model.",
)
EVENTS = Table(
    "events",
    (*_CAPTURE_KEY, "seq"),
    (
        *_CAPTURE,
        Column("seq", pa.int64(), "Order inside the capture.", "key"),
        Column("time", pa.timestamp("us", tz="UTC"), "When it happened.", "meta", nullable=True),
        Column("event", pa.string(), "generated, scored, filtered, consumed, ...", "identity"),
        Column("sample_id", pa.string(), "The sample concerned.", "identity", nullable=True),
        Column("reason", pa.string(), "Why, for a filtered sample.", "provenance", nullable=True),
        Column(
            "detail",
            pa.string(),
            "JSON with whatever else was known; of a heartbeat the rollout_id and step_id of its "
            "step, where the columns number the capture that holds it.",
            "meta",
            nullable=True,
        ),
    ),
    "One trace event, or one entry of the sample ledger.",
)
MANIFEST = Table(
    "manifest",
    (*_CAPTURE_KEY, "part"),
    (
        *_CAPTURE,
        Column("part", pa.string(), "data, or dropped.", "key"),
        Column("status", pa.string(), "complete or dropped.", "meta"),
        Column("owner", pa.bool_(), "False for a parallel copy of another rank.", "meta"),
        Column("expected_ranks", list_of(pa.int32()), "Ranks of the capture set.", "meta"),
        Column("rows", pa.int64(), "Samples.", "meta", unit="row"),
        Column("tokens", pa.int64(), "Response tokens.", "meta", unit="token"),
        Column("bytes", pa.int64(), "Size of the data file.", "meta", unit="byte"),
        Column("path", pa.string(), "Data file, relative to the lake.", "meta", nullable=True),
        Column("created", pa.timestamp("us", tz="UTC"), "When it was committed.", "meta"),
        Column("producer", pa.string(), "Producer as JSON.", "provenance"),
        Column("parallel", pa.string(), "Parallel ranks and sizes as JSON.", "provenance"),
        Column("settings", pa.string(), "Arithmetic in force, resolved, as JSON.", "meta"),
        Column("contracts", pa.string(), "Declared stages as JSON.", "meta"),
        Column("sources", pa.string(), "Rollouts consumed from, as JSON.", "provenance"),
        Column("redaction", pa.string(), "Redaction policy as JSON.", "meta"),
    ),
    "One committed capture.",
)
CHECKSUMS = Table(
    "checksums",
    (*_CAPTURE_KEY, "table", "column"),
    (
        *_CAPTURE,
        Column("table", pa.string(), "Table of the column.", "identity"),
        Column(
            "column",
            pa.string(),
            "Column name; null on the file's own row.",
            "identity",
            nullable=True,
        ),
        Column(
            "digest",
            pa.string(),
            "Of the column, or of the file.",
            "meta",
            nullable=True,
        ),
        Column("values", pa.int64(), "Values at the innermost level, or rows of the file.", "meta"),
        Column("non_finite", pa.int64(), "NaN and infinite values.", "meta", nullable=True),
        Column(
            "source_dtype", pa.string(), "dtype as the producer held it.", "meta", nullable=True
        ),
        Column(
            "bytes",
            pa.int64(),
            "Size of the file, on the file's own row.",
            "meta",
            unit="byte",
            nullable=True,
        ),
    ),
    "One column of one capture, and one row per file.",
)

TABLES = {
    table.name: table for table in (ROLLOUTS, STEPS, OUTPUTS, ROUTES, EVENTS, MANIFEST, CHECKSUMS)
}
SAMPLE_TABLES = {"rollout": ROLLOUTS, "step": STEPS}
ROW_TABLES = SAMPLE_TABLES | {"events": EVENTS}  # what the rows of a capture of each kind are
MAX_CHOICES = 1 << 20  # of one token: a thousand layers of a thousand experts
EXPERT_LISTS = tuple(one.name for one in ROUTES.columns if one.type == list_of(pa.int16()))


# Lists of which the tokens of a sample do not say how long they are.
OWN_LENGTH = ("weight_versions", "reward_components")


def length_column(name: str) -> str:
    """The column that says how many values a row of a tensor column has."""
    return "total_length" if name == "tokens" else "response_length"


RESPONSE_LISTS = tuple(
    dict.fromkeys(
        column.name
        for table in SAMPLE_TABLES.values()
        for column in table.columns
        if column.is_list and length_column(column.name) == "response_length"
        if column.name not in OWN_LENGTH
    )
)
