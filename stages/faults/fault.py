"""A fault: a known way to get a stage wrong, as data, and the variants of a cohort that show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.compose import PolicyTerms
from trajreplay.stages.counterfactuals.variants import Variant


@dataclass(frozen=True, eq=False)
class Told:
    """One way in which a fault can have happened to a cohort.

    Args:
        variant: What the fault changes.
        detail: Words for the braces of the fault's sentence, about this cohort.
        taken: How many numbers or choices of it are read off what was recorded, for which nothing
            else speaks. So many fit by themselves, so that more values than these have to differ
            before it proves anything.
    """

    variant: Variant
    detail: str = ""
    taken: int = 0


Tries = Callable[[Block], Iterable[Told]]


@dataclass(frozen=True)
class Handed:
    """A column that a step took over from its rollouts, as both have it.

    Args:
        column: The column.
        recorded: (N,) or (S,) float64. What the step consumed.
        origin: What the rollouts recorded, in the order of the step.
        offsets: (S+1,) int64. Where the values of each sample begin.
        mask: (N,) bool. The mask of the rollouts, or all True where it was not recorded.
        others: Other columns of the rollouts with as many values.
        owns: Other columns of the step with as many values.
        ranks: (S,) int64. The rank of each sample, where that is asked for.
        earlier: By words, log-probs with as many values that were captured of the samples before.
    """

    column: str
    recorded: Tensor
    origin: Tensor
    offsets: Tensor
    mask: Tensor
    others: Mapping[str, Tensor]
    owns: Mapping[str, Tensor]
    ranks: Tensor = torch.zeros(0, dtype=torch.int64)  # noqa: RUF009
    earlier: Mapping[str, Tensor] = field(default_factory=dict)


# Values and words; and, where numbers of these are read off what was recorded, how many.
Made = tuple[Tensor, str] | tuple[Tensor, str, int]
Hands = Callable[[Handed], Iterable[Made]]


@dataclass(frozen=True)
class Fault:
    """A known mistake.

    Args:
        id: Its name for programs, as `reward.grouped-by-batch`.
        name: What people call it.
        stage: The stage at which it shows first.
        sentence: What the recorded values equal, to follow "recorded values equal"; `{}` stands for
            the detail. Of a fault that a check finds, what is wrong.
        look: Setting or code to look at.
        references: Reports and papers.
        tries: The variants of a cohort that it may have been; None where something else finds it.
        hands: What it makes of a column that a step takes over, each with a detail.
        alone: Whether it is never one of two at once, since it changes much already.
        touches: The recorded scalars that it can change; of others that disagree it is no reason.
            Empty where it may change any.
        origin: The entry point and the package that added it; empty for our own.
    """

    id: str
    name: str
    stage: str
    sentence: str
    look: str
    references: tuple[str, ...] = ()
    tries: Tries | None = None
    hands: Hands | None = None
    alone: bool = False
    touches: tuple[str, ...] = ()
    origin: str = ""

    def says(self, detail: str) -> str:
        """The sentence about one cohort."""
        return self.sentence.replace("{}", detail)


@dataclass(frozen=True)
class WrongRewards:
    """Other arithmetic for reward.post_process: settings, raw, groups and lengths to rewards."""

    function: Callable[[Settings, Tensor, Tensor, Tensor], Tensor]
    what: str = "variant"

    def rewards(self, settings: Settings, raw: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        """(S,) Processed rewards."""
        return self.function(settings, raw, groups, lengths)


@dataclass(frozen=True)
class WrongKl:
    """Other arithmetic for advantage.kl: settings, policy and reference to the KL of each token."""

    function: Callable[[Settings, Tensor, Tensor], Tensor]
    what: str = "variant"

    def kl(self, settings: Settings, policy: Tensor, reference: Tensor) -> Tensor:
        """(N,) The KL."""
        return self.function(settings, policy, reference)


@dataclass(frozen=True)
class WrongAdvantages:
    """Other arithmetic for advantage.estimate, called as `AdvantageKernel` is."""

    function: Callable[..., tuple[Tensor, Tensor]]
    what: str = "variant"

    def advantages(self, settings: Settings, *given: Any) -> tuple[Tensor, Tensor]:
        """(N,) each. Advantages and returns."""
        return self.function(settings, *given)


@dataclass(frozen=True)
class WrongLosses:
    """Other arithmetic for loss.policy, called as `LossKernel` is.

    It gives the terms of each token by scalar or, where not all trained tokens are summed and
    counted, `PolicyTerms`.
    """

    function: Callable[
        [Settings, Mapping[str, Tensor], Tensor, Tensor], PolicyTerms | dict[str, Tensor]
    ]
    what: str = "variant"

    def losses(
        self, settings: Settings, columns: Mapping[str, Tensor], mask: Tensor, offsets: Tensor
    ) -> PolicyTerms | dict[str, Tensor]:
        """The terms of each token, by scalar."""
        return self.function(settings, columns, mask, offsets)


def under(detail: str = "", **changes: Any) -> Tries:
    """Tries of a fault that is nothing but other settings: `reward__ddof=0` is reward.ddof."""
    named = {name.replace("__", ".", 1): value for name, value in changes.items()}

    def tries(block: Block) -> Iterable[Told]:
        if any(setting(block, name) != value for name, value in named.items()):
            yield Told(Variant(named), detail)

    return tries


def each(name: str, values: Iterable[Any], say: Callable[[Any], str] = str) -> Tries:
    """Tries of a setting that has another of some values."""
    found = tuple(values)

    def tries(block: Block) -> Iterable[Told]:
        for value in found:
            if value != setting(block, name):
                yield Told(Variant({name: value}), say(value))

    return tries


def other_batch(block: Block) -> Iterable[Told]:
    """Tries of statistics over the step where they are of the rollout, and the other way round."""
    words = {
        "step": "over the samples of the step instead of those of the rollout",
        "rollout": "over the samples of each rollout instead of those of the step",
    }
    own = setting(block, "layout.batch")
    for one, said in words.items():
        if own in words and one != own:
            yield Told(Variant({"layout.batch": one}), said)


def setting(block: Block, name: str) -> Any:
    """A setting in force, named `section.field`."""
    section, _, label = name.partition(".")
    return getattr(getattr(block.settings, section), label)


def held(block: Block, *names: str) -> bool:
    """Whether columns were captured of every sample."""
    table = block.packed.table
    return all(one in table.column_names and not table[one].null_count for one in names)
