"""Recipes: which stages of a capture set run, and which columns of it they need."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from trajreplay.query.manifest.capture_sets import CaptureSet
from trajreplay.schema.contracts import CONTRACT_VERSION, STAGE_NAMES, V1_STAGES, StageContract
from trajreplay.schema.entry import Entry
from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import Settings
from trajreplay.schema.tables import GRADIENTS, OWN_LENGTH, SAMPLE_TABLES
from trajreplay.stages.capability import Ability, ability, not_read, reused_ability
from trajreplay.stages.cohorts.sources import TWINS
from trajreplay.stages.contract_checks import CHECKED, columns_of_metrics
from trajreplay.stages.plugins import Plugin
from trajreplay.stages.report import StageResult
from trajreplay.stages.rewards.scoring import SCORED

_ALWAYS = (
    "sample_id",
    "group_id",
    "response_length",
    "total_length",
    "loss_mask",
)
_OF_STEPS = ("source_attempt", "source_rollout_id")
_OPTIONAL = ("returns",)
_TEXTS = frozenset({*SCORED} - {"tokens"})


@dataclass(frozen=True)
class Recipe:
    """What is done with a capture set, as far as its entries say.

    Args:
        abilities: The stages that run, and what each needs.
        results: Results of the stages that do not, as the arguments of a `StageResult`.
        columns: Columns to read.
        reads: Columns that a stage reads.
        unread: Columns that no stage reads and that hold NaN or infinities.
        finite: Columns that hold none.
        not_read: By stage that runs, what is stated of its settings and nothing reads.
    """

    abilities: dict[str, Ability]
    results: tuple[tuple[str, str, str, str, str], ...]
    columns: tuple[str, ...]
    reads: frozenset[str]
    unread: tuple[str, ...]
    finite: frozenset[str]
    not_read: Mapping[str, tuple[str, ...]]

    def not_run(self) -> list[StageResult]:
        """The results of the stages that do not run."""
        return [
            StageResult(stage, verdict, capability, version, message=message)  # type: ignore[arg-type]
            for stage, verdict, capability, version, message in self.results
        ]


class Recipes:
    """The recipes of one replay: captures of one run are alike, and share theirs.

    Args:
        asked: Stages asked for; all declared ones if empty.
        reward: A reward function that recomputes the raw rewards.
        everything: Whether columns that no stage reads are read, too, where they are there.
    """

    def __init__(
        self,
        asked: Collection[str] = (),
        reward: Plugin | None = None,
        *,
        everything: bool = False,
    ) -> None:
        self._asked = tuple(asked)
        self._reward = reward
        self._everything = everything
        self._known: dict[object, tuple[Settings, Mapping[str, StageContract], Recipe]] = {}

    def of(self, captures: CaptureSet, given: frozenset[str] | None = None) -> Recipe:
        """The recipe of a capture set that has an owner.

        Args:
            captures: The capture set.
            given: Of a step, the columns that the rollouts that it consumed from hold; None where
                none of them is there.
        """
        owners = captures.owners
        lead, table = owners[0], SAMPLE_TABLES[captures.kind].name
        files = [file for entry in owners if (file := entry.file(table)) is not None]
        held = frozenset().union(*(file.columns for file in files))
        odd = frozenset(
            name for file in files for name, seal in file.columns.items() if seal.non_finite != 0
        )
        outputs = [one for entry in owners for one in entry.outputs]
        batches = any(one.scope == "micro_batch" for one in outputs)
        logged = frozenset(one.field for one in outputs)
        widest = max((entry.parallel for entry in owners), key=lambda one: one.context_size)
        shape = (
            captures.kind,
            id(lead.settings),
            id(lead.contracts),
            widest,
            held,
            odd,
            batches,
            logged,
            given,
        )
        if shape not in self._known:
            made = self._make(captures.kind, lead, widest, held, odd, (batches, logged), given)
            # What is kept keeps its id; captures of one run share both.
            self._known[shape] = lead.settings, lead.contracts, made
        return self._known[shape][2]

    def _make(
        self,
        kind: str,
        lead: Entry,
        widest: ParallelCoordinates,
        held: frozenset[str],
        odd: frozenset[str],
        scalars: tuple[bool, frozenset[str]],
        given: frozenset[str] | None,
    ) -> Recipe:
        batches, logged = scalars
        table = SAMPLE_TABLES[kind]
        # Values of the critic before its update may be those of the rollout, never newer ones.
        abilities, results = self._choose(lead, widest, held | ((given or set()) & {"old_values"}))
        reads = frozenset(name for one in abilities.values() for name in one.reads)
        sampling = lead.settings.sampling
        if "sample" in abilities and (
            sampling.max_staleness is not None or sampling.partial is False
        ):
            reads |= {"weight_versions"}  # a check of stage sample reads them
        writes = {name for one in abilities.values() for name in one.writes if name in table}
        names = [*_ALWAYS, *(_OF_STEPS if kind == "step" else ())]
        names += ("micro_batch_id",) if batches else ()
        twins = TWINS if given is not None and "sample" in abilities else ()
        optional = [*_OPTIONAL, *twins] if "advantage.estimate" in abilities else [*twins]
        optional += ("group_size",) if "reward.post_process" in abilities else ()
        optional += (GRADIENTS,) if "loss.policy" in abilities and kind == "step" else ()
        optional += ("context_rank", "context_size", "padded_length")
        in_streams = widest.context_size > 1 or "context_size" in held
        if in_streams and lead.settings.layout.context == "all-gather":
            optional.append("micro_batch_id")
        read = {*names, *reads, *writes, *optional}
        unread = sorted(
            name
            for name in odd - {*OWN_LENGTH}
            if name in table and table[name].is_floating and name not in read
        )
        wanted = dict.fromkeys([*names, *sorted(reads | writes), *optional, *unread])
        if "sample" in abilities:
            wanted |= dict.fromkeys((*CHECKED, *columns_of_metrics(logged, abilities)))
        if self._reward is not None and "reward.raw" in abilities:
            wanted |= dict.fromkeys(SCORED)
        if self._everything:
            more = held - {column.name for column in table.columns if column.role == "key"}
            wanted |= dict.fromkeys(sorted(more - _TEXTS))
            reads |= {*TWINS} - _TEXTS
        columns = tuple(name for name in wanted if name in names or name in held)
        own = [name for name, one in abilities.items() if one.kernel is None]
        stated = {name: tuple(not_read(name, lead.settings, held)) for name in own}
        return Recipe(abilities, tuple(results), columns, reads, tuple(unread), held - odd, stated)

    def _choose(
        self, lead: Entry, widest: ParallelCoordinates, held: frozenset[str]
    ) -> tuple[dict[str, Ability], list[tuple[str, str, str, str, str]]]:
        """The stages to run, and what to say of the others.

        A stage that is declared recompute, or asked for, and unsupported is refused.
        """
        chosen: dict[str, Ability] = {}
        results = []
        for name in STAGE_NAMES:
            contract = lead.contracts.get(name)
            if self._asked and name not in self._asked:
                continue
            if contract is None:
                if self._asked or name in V1_STAGES:
                    results.append((name, "not-declared", "not-declared", CONTRACT_VERSION, ""))
            elif self._asked and contract.capability == "unsupported":
                message = f"asked for and declared unsupported: {contract.reason}"
                results.append((name, "refused", "unsupported", contract.version, message))
            elif contract.capability != "recompute":
                results.append(_declared(contract))
            else:
                if contract.kernel is None:
                    found = ability(name, lead.settings, widest, held, contract.version)
                else:
                    found = reused_ability(contract, lead.settings, widest, held)
                if found.capability == "recompute":
                    if contract.scalars:
                        writes = tuple(one for one in found.writes if one in contract.scalars)
                        found = replace(found, writes=writes)
                    chosen[name] = found
                    continue
                if found.capability == "inspect-only":
                    # It was declared to be recomputed, so that not doing it is no pass.
                    message = f"declared recompute and only to be inspected: {found.reason}"
                    shown = ("unverified", found.capability, contract.version, message)
                    results.append((name, *shown))
                    continue
                message = f"declared recompute and unsupported: {found.reason}"
                results.append((name, "refused", "unsupported", contract.version, message))
        return chosen, results


def _declared(contract: StageContract) -> tuple[str, str, str, str, str]:
    capability = contract.capability
    return contract.stage, capability, capability, contract.version, contract.reason
