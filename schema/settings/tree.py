"""The tree of all settings, and its stored form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from trajreplay.schema.errors import SchemaError
from trajreplay.schema.settings.advantage import AdvantageSettings, KlSettings
from trajreplay.schema.settings.knobs import check_section, kinds
from trajreplay.schema.settings.layout import LayoutSettings
from trajreplay.schema.settings.loss import LossSettings, ValueSettings
from trajreplay.schema.settings.reward import RewardSettings
from trajreplay.schema.settings.sampling import SamplingSettings
from trajreplay.schema.tables import RESPONSE_LISTS, ROLLOUTS, STEPS

_HANDED_OVER = tuple(
    one.name
    for one in STEPS.columns
    if one.name in ROLLOUTS and one.role not in ("key", "identity")
)
HANDOFFS = ("exact", "masked", "bfloat16", "float16", "recomputed")
SECTIONS: dict[str, type] = {
    "reward": RewardSettings,
    "kl": KlSettings,
    "advantage": AdvantageSettings,
    "loss": LossSettings,
    "value": ValueSettings,
    "layout": LayoutSettings,
    "sampling": SamplingSettings,
}


@dataclass(frozen=True)
class Settings:
    """All settings of a run: a section per stage, one for the layout, one for the sampler.

    Args:
        handoff: How a column changes between the rollout that produced it and the step that
            consumed it, by column name: exact (default), masked (only trainable tokens are kept),
            bfloat16 or float16 (rounded on the way), recomputed (made anew, not compared).

    >>> Settings(kl=KlSettings(estimator="low_var_kl")).kl.value_clamp
    (-10.0, 10.0)
    """

    reward: RewardSettings = field(default_factory=RewardSettings)
    kl: KlSettings = field(default_factory=KlSettings)
    advantage: AdvantageSettings = field(default_factory=AdvantageSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    value: ValueSettings = field(default_factory=ValueSettings)
    layout: LayoutSettings = field(default_factory=LayoutSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    handoff: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for column, how in self.handoff.items():
            if how not in HANDOFFS:
                raise SchemaError(
                    f"settings.handoff[{column!r}] is {how!r}, "
                    f"expected one of {', '.join(HANDOFFS)}"
                )
            if column not in _HANDED_OVER:
                raise SchemaError(
                    f"settings.handoff names {column!r}, expected a column that rollouts and steps "
                    f"both have: {', '.join(_HANDED_OVER)}"
                )
            if how == "masked" and column not in RESPONSE_LISTS:
                raise SchemaError(
                    f"settings.handoff[{column!r}] is 'masked', expected another: it is no list of "
                    "the response's tokens"
                )
        for name in SECTIONS:
            check_section(getattr(self, name))

    def to_json(self) -> dict[str, Any]:
        """The resolved tree as JSON values."""
        return {**_plain(asdict(self)), "handoff": dict(self.handoff)}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Settings:
        """Read a stored tree.

        Raises:
            SchemaError: It names a section, field or value type that this version does not know.
        """
        unknown = sorted(set(tree) - set(SECTIONS) - {"handoff"})
        if unknown:
            raise SchemaError(
                f"settings have the section {unknown[0]!r}, "
                f"expected {', '.join([*SECTIONS, 'handoff'])}",
                hint="They were written by another version: replay them with that, or upgrade.",
            )
        for name in (*SECTIONS, "handoff"):
            if not isinstance(tree.get(name, {}), Mapping):
                raise SchemaError(f"settings.{name} is {tree[name]!r}, expected an object")
        sections: dict[str, Any] = {
            name: _section(kind, name, tree.get(name, {})) for name, kind in SECTIONS.items()
        }
        return cls(**sections, handoff=dict(tree.get("handoff", {})))


_Section = TypeVar("_Section")


def _plain(value: Any) -> Any:
    """Values as JSON has them, where a tuple is a list."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _section(kind: type[_Section], name: str, values: Mapping[str, Any]) -> _Section:
    known = kinds(kind)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise SchemaError(
            f"settings.{name} has the field {unknown[0]!r}, expected {', '.join(known)}",
            hint="They were written by another version: replay them with that, or upgrade.",
        )
    try:
        return kind(**{label: known[label].stored(value) for label, value in values.items()})
    except ValueError as error:
        raise SchemaError(f"settings.{name}: {error}") from error
