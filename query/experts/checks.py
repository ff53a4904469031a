"""Contract checks of captured routes: what no router chooses, and tokens without a route."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from trajreplay.query.experts.captured import Choices, RoutedRows
from trajreplay.query.experts.dummies import FEW_LAYERS, are_lost, chance_of_dummy
from trajreplay.schema.lists import Int64s

Flags = np.ndarray[Any, np.dtype[np.bool_]]
MISSING = -1


@dataclass(frozen=True)
class RouteProblem:
    """What is wrong with the routes of a capture under one name.

    Args:
        check: route.partial, route.duplicate, route.range, route.dummy or route.missing.
        severity: error for what cannot be a route, warning for what can be legal.
        message: Count and first place.
        sample_id: Sample of the first place.
        token: Its response token; None in the prompt.
    """

    check: str
    severity: Literal["error", "warning"]
    message: str
    sample_id: str
    token: int | None


@dataclass
class _Tally:
    """Places of one kind: how many, of how many, and the first."""

    count: int = 0
    first: tuple[str, int, int | None, int | None] | None = None  # sample, position, token, layer
    row: list[int] = field(default_factory=list)  # the choices there


@dataclass
class _Dummies:
    """Tokens before the last with the dummy route, by sample, held against what chance makes."""

    experts: int = 0
    top_k: int = 0
    layers: list[tuple[int, int]] = field(default_factory=list)  # (dummies, tokens with others)
    samples: list[tuple[int, int]] = field(default_factory=list)  # such tokens, those with it

    def take(self, piece: RoutedRows, choices: Choices, dummy: Flags) -> None:
        self.experts = max(self.experts, piece.num_experts or int(choices.values.max()) + 1)
        layers, self.top_k = choices.values.shape[1:]
        here = (choices.values == _route_of_dummies(choices)).all(2)
        # Tokens that have another route in some other layer, by layer.
        others = (here.sum(1)[:, None] - here) < layers - 1
        seen = self.layers or [(0, 0)] * layers
        self.layers = [
            (count + int(more), total + int(tokens))
            for (count, total), more, tokens in zip(
                seen, (here & others).sum(0), others.sum(0), strict=True
            )
        ]
        found = np.concatenate([[0], np.cumsum(dummy)])
        counts = found[choices.ends] - found[choices.ends - choices.tokens]
        inner = choices.tokens - _ends_whole(choices, piece.total)
        self.samples += zip(inner.tolist(), counts.tolist(), strict=True)

    @property
    def are_few_layers(self) -> bool:
        return len(self.layers) <= FEW_LAYERS

    def are_lost(self) -> bool:
        chance = chance_of_dummy(self.experts, self.top_k, self.layers)
        return are_lost((chance * tokens, count) for tokens, count in self.samples)


def route_problems(pieces: Iterable[RoutedRows]) -> list[RouteProblem]:
    """Check the routes of one capture.

    A row of choices is what one token has in one layer. A row of -1 throughout has no route, which
    a replay leaves to the trainer's own router: a warning. Errors are a row that is -1 in part, an
    expert chosen twice, one beyond those there are, and a token before the last that has the
    dummy route 0, 1, 2, ... in every layer, where a sample has more such than chance makes. In one
    or two layers that is a warning: a router that prefers the first experts makes many.

    Args:
        pieces: Its rows.

    Source:
        NVIDIA NeMo-RL, the checks of `NRL_ROUTER_REPLAY_VALIDATE=1`.
    """
    tallies: dict[tuple[str, str], _Tally] = {}
    checked: dict[str, int] = {}
    dummies: dict[str, _Dummies] = {}
    for piece in pieces:
        for name, choices in piece.choices.items():
            values = choices.values
            checked[name] = checked.get(name, 0) + values.shape[0] * values.shape[1]
            if not len(values):
                continue
            for check, wrong in _wrong_rows(values, piece.num_experts).items():
                tally = tallies.setdefault((name, check), _Tally())
                _count(tally, piece, choices, wrong, by_layer=True)
            tally = tallies.setdefault((name, "dummy"), _Tally())
            dummy = _dummy_tokens(choices, piece.total)
            _count(tally, piece, choices, dummy[:, None], by_layer=False)
            dummies.setdefault(name, _Dummies()).take(piece, choices, dummy)
    return [
        _problem(name, check, tally, checked[name], few=dummies[name].are_few_layers)
        for (name, check), tally in tallies.items()
        if tally.count and (check != "dummy" or dummies[name].are_lost())
    ]


def _wrong_rows(values: Any, num_experts: int | None) -> dict[str, Flags]:
    """(N, L) flags by check."""
    ordered = np.sort(values, 2)
    lowest, highest = ordered[:, :, 0], ordered[:, :, -1]
    missing = (lowest == MISSING) & (highest == MISSING)
    partial = (lowest < 0) & ~missing
    found: dict[str, Flags] = {"missing": missing, "partial": partial}
    if num_experts is not None:
        found["range"] = highest >= num_experts
    twice = np.zeros(missing.shape, bool)
    for slot in range(1, values.shape[2]):  # so few that a reduction over them costs more
        twice |= ordered[:, :, slot] == ordered[:, :, slot - 1]
    found["duplicate"] = twice & ~missing & ~partial
    return found


def _dummy_tokens(choices: Choices, total: Int64s) -> Flags:
    """(N,) Tokens with 0, 1, 2, ... in every layer, those that are the last of a sample aside.

    The last token is never fed to the model; a sample without a row of it has no such row.
    """
    values = choices.values
    dummy = np.asarray((values == _route_of_dummies(choices)).all((1, 2)))
    dummy[choices.ends[_ends_whole(choices, total)] - 1] = False
    return dummy


def _route_of_dummies(choices: Choices) -> Any:
    return np.arange(choices.values.shape[2], dtype=choices.values.dtype)


def _ends_whole(choices: Choices, total: Int64s) -> Flags:
    """(S,) Samples that have a row of their last token."""
    return np.asarray((choices.tokens > 0) & (choices.tokens == total))


def _count(
    tally: _Tally, piece: RoutedRows, choices: Choices, wrong: Flags, *, by_layer: bool
) -> None:
    """Take flags of (N, L) rows, or of (N, 1) tokens."""
    count = int(np.count_nonzero(wrong))
    tally.count += count
    if not count or tally.first is not None:
        return
    token, layer = divmod(int(wrong.argmax()), wrong.shape[1])
    ends = choices.ends
    sample = int(np.searchsorted(ends, token, side="right"))
    position = token - int(ends[sample] - choices.tokens[sample])
    # What is computed at a position predicts the token after it.
    predicted = position + 1 - int(piece.total[sample] - piece.response[sample])
    number = piece.layer_numbers[layer] if by_layer else None
    tally.first = piece.sample_ids[sample], position, predicted if predicted >= 0 else None, number
    tally.row = choices.values[token, layer].tolist()


_WHAT = {
    "missing": "have no route: a replay leaves them to the trainer's own router",
    "partial": "are negative in part: a row is a route, or -1 throughout",
    "duplicate": "name an expert twice",
    "range": "name an expert beyond those there are",
    "dummy": "have the dummy route in every layer, and are not the last of their sample",
}


def _problem(name: str, check: str, tally: _Tally, rows: int, *, few: bool) -> RouteProblem:
    assert tally.first is not None
    sample_id, position, token, layer = tally.first
    counted = f"{tally.count} tokens" if check == "dummy" else f"{tally.count} of {rows} rows"
    where = f"position {position}" + ("" if layer is None else f", layer {layer}")
    message = f"{name}: {counted} {_WHAT[check]}; first {where}: {tally.row}"
    severity: Literal["error", "warning"] = "error"
    if check == "missing" or (check == "dummy" and few):
        severity = "warning"
    return RouteProblem(f"route.{check}", severity, message, sample_id, token)
