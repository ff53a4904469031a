"""The arithmetic in force, as data: a tree of small frozen dataclasses, stored resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from trajreplay.schema.canonical import read_float
from trajreplay.schema.errors import SchemaError

LOW_VAR_KL_CLAMP = (-10.0, 10.0)  # slime and Relax clamp low_var_kl, not k3
HANDOFFS = ("exact", "masked", "bfloat16", "float16", "recomputed")


@dataclass(frozen=True)
class RewardSettings:
    """Reward post-processing.

    Args:
        grouping: Which samples share statistics: `group`, or `none` for rewards used as given.
        n_samples_per_prompt: Members that every group must have; None leaves it unchecked.
        baseline: Subtracted from the reward: `mean` or `none`.
        divide_by_std: Whether the centred reward is divided by its standard deviation.
        ddof: Delta degrees of freedom of that deviation.
        epsilon: Added to the deviation.
    """

    grouping: str = "group"
    n_samples_per_prompt: int | None = None
    baseline: str = "mean"
    divide_by_std: bool = True
    ddof: int = 1
    epsilon: float = 1e-6


@dataclass(frozen=True)
class KlSettings:
    """KL of policy against reference.

    Args:
        estimator: `k1`, `k2`, `k3` or `low_var_kl` (k3 with its output clamped).
        coef: Its coefficient; 0 makes the recorded KL all zeros and needs no reference.
        policy_source: Which log-probs stand for the policy: `old` or `rollout`.
        value_clamp: Bounds of the estimate; low_var_kl brings (-10, 10).
    """

    estimator: str = "k1"
    coef: float = 0.0
    policy_source: str = "old"
    value_clamp: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.estimator == "low_var_kl" and self.value_clamp is None:
            object.__setattr__(self, "value_clamp", LOW_VAR_KL_CLAMP)


@dataclass(frozen=True)
class AdvantageSettings:
    """Advantage estimation: `grpo` broadcasts the reward over the response tokens."""

    estimator: str = "grpo"


@dataclass(frozen=True)
class LossSettings:
    """The policy loss.

    Args:
        eps_clip: The ratio is clipped below at 1 - eps_clip.
        eps_clip_high: The ratio is clipped above at 1 + eps_clip_high; equals eps_clip if None.
        entropy_coef: Coefficient of the entropy bonus.
        aggregation: `seq-mean-token-mean`; `sum-of-sample-mean` is it with batch_reduction sum.
        batch_reduction: How sample means become one number: `sum` or `mean`.
        old_source: Denominator of the ratio: `old` or `rollout` log-probs.
        use_kl_loss, tis, opsm, opd, per_token: Whether this term was in force: true, false, or
            None where the producer does not say.
    """

    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    entropy_coef: float = 0.0
    aggregation: str = "seq-mean-token-mean"
    batch_reduction: str = "sum"
    old_source: str = "old"
    use_kl_loss: bool | None = None
    tis: bool | None = None
    opsm: bool | None = None
    opd: bool | None = None
    per_token: bool | None = None

    def __post_init__(self) -> None:
        if self.eps_clip_high is None:
            object.__setattr__(self, "eps_clip_high", self.eps_clip)
        if self.aggregation == "sum-of-sample-mean":
            object.__setattr__(self, "aggregation", "seq-mean-token-mean")
            object.__setattr__(self, "batch_reduction", "sum")


LOSS_TERMS = ("use_kl_loss", "tis", "opsm", "opd", "per_token")


@dataclass(frozen=True)
class Settings:
    """All settings of a run, one section per stage.

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
    handoff: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for column, how in self.handoff.items():
            if how not in HANDOFFS:
                raise SchemaError(
                    f"settings.handoff[{column!r}] is {how!r}, "
                    f"expected one of {', '.join(HANDOFFS)}"
                )
        for section in (self.reward, self.kl, self.advantage, self.loss):
            _check_types(section)

    def to_json(self) -> dict[str, Any]:
        """The resolved tree as JSON values."""
        return asdict(self) | {"handoff": dict(self.handoff)}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Settings:
        """Read a stored tree.

        Raises:
            SchemaError: It names a section, field or value type that this version does not know.
        """
        known = {"reward": RewardSettings, "kl": KlSettings}
        known |= {"advantage": AdvantageSettings, "loss": LossSettings}
        unknown = sorted(set(tree) - set(known) - {"handoff"})
        if unknown:
            raise SchemaError(
                f"settings have the section {unknown[0]!r}, "
                f"expected {', '.join([*known, 'handoff'])}",
                hint="They were written by a newer version: upgrade trajreplay to replay them.",
            )
        for name in (*known, "handoff"):
            if not isinstance(tree.get(name, {}), Mapping):
                raise SchemaError(f"settings.{name} is {tree[name]!r}, expected an object")
        sections: dict[str, Any] = {
            name: _section(kind, name, tree.get(name, {})) for name, kind in known.items()
        }
        return cls(**sections, handoff=dict(tree.get("handoff", {})))


_Section = TypeVar("_Section")


def _section(kind: type[_Section], name: str, values: Mapping[str, Any]) -> _Section:
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise SchemaError(
            f"settings.{name} has the field {unknown[0]!r}, expected {', '.join(names)}",
            hint="They were written by a newer version: upgrade trajreplay to replay them.",
        )
    try:
        return kind(**{field: _stored(field, value) for field, value in values.items()})
    except ValueError as error:
        raise SchemaError(f"settings.{name}: {error}") from error


def _stored(name: str, value: Any) -> Any:
    """A stored value; floats are stored as exact text."""
    if name == "value_clamp" and value is not None:
        return tuple(read_float(bound) for bound in value)
    return read_float(value) if name in _NUMBERS and isinstance(value, str) else value


_FLAGS = {*LOSS_TERMS, "divide_by_std"}
_NUMBERS = {"epsilon", "coef", "eps_clip", "eps_clip_high", "entropy_coef"}
_INTEGERS = {"ddof", "n_samples_per_prompt"}


def _check_types(section: object) -> None:
    """Refuse a value of another type: 1 for True or "0.2" for 0.2 would compare unequal."""
    for one in fields(section):  # type: ignore[arg-type]
        value = getattr(section, one.name)
        if value is None and one.name not in ("divide_by_std", "epsilon", "coef", "eps_clip"):
            continue
        where = f"{type(section).__name__}.{one.name}"
        if one.name in _FLAGS:
            expected, right = "true or false", isinstance(value, bool)
        elif one.name in _NUMBERS:
            expected = "a finite number"
            right = type(value) in (int, float) and abs(value) < float("inf")
        elif one.name in _INTEGERS:
            expected, right = "a non-negative integer", type(value) is int and value >= 0
        elif one.name == "value_clamp":
            expected = "a pair (low, high)"
            right = isinstance(value, tuple) and len(value) == 2 and value[0] <= value[1]
        else:
            expected, right = "a name", isinstance(value, str) and bool(value)
        if not right:
            raise SchemaError(f"{where} is {value!r}, expected {expected}")
