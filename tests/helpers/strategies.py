"""Strategies that tests share beside the public ones of `trajreplay.testing`."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from trajreplay.schema.contracts import STAGE_NAMES, StageContract
from trajreplay.schema.entry import (
    REDUCTIONS,
    ColumnSeal,
    DataFile,
    Entry,
    LogProbOrigin,
    Output,
)
from trajreplay.schema.identity import KINDS, CaptureKey, ParallelCoordinates, ResumePoint
from trajreplay.schema.layout import data_path
from trajreplay.schema.policy import Tolerance
from trajreplay.schema.settings import KlSettings, RewardSettings, Settings
from trajreplay.testing import CaptureData, captures, ids

__all__ = [
    "CaptureData",
    "any_float64",
    "captures",
    "entries",
    "finite",
    "ids",
    "keys",
    "patterns",
]

_COUNTS = st.integers(0, 2**31 - 1)
_WIDE = st.integers(0, 2**63 - 1)
_NAMES = st.sampled_from(["loss", "mb-0", "\u8bad\u7ec3", 'quote"d', "back\\slash", "a: b"])


def finite(limit: float = 4.0) -> st.SearchStrategy[float]:
    """Floats that float32 holds exactly, as losses and log-probs are."""
    return st.floats(-limit, limit, width=32)


@st.composite
def any_float64(draw: st.DrawFn) -> float:
    """Draw every bit pattern of float64."""
    return float(np.frombuffer(draw(st.binary(min_size=8, max_size=8)), np.float64)[0])


def patterns(kind: Any, max_size: int = 40) -> st.SearchStrategy[NDArray[Any]]:
    """Arrays of any bit patterns of a numpy type."""
    width = np.dtype(kind).itemsize
    sizes = st.integers(0, max_size)
    data = sizes.flatmap(lambda n: st.binary(min_size=n * width, max_size=n * width))
    return data.map(lambda one: np.frombuffer(one, kind))


@st.composite
def keys(draw: st.DrawFn) -> CaptureKey:
    """Draw keys of captures of every kind."""
    kind = draw(st.sampled_from(KINDS))
    rollout = draw(_WIDE) if kind != "events" else draw(st.none() | _WIDE)
    step = draw(_WIDE) if kind == "step" else None
    part = draw(st.sampled_from(["data", "dropped"]))
    return CaptureKey(draw(ids()), draw(_COUNTS), kind, rollout, step, draw(_COUNTS), part)


def _seals() -> st.SearchStrategy[ColumnSeal]:
    return st.builds(
        ColumnSeal,
        st.sampled_from(["0" * 64, "f" * 64]),
        _WIDE,
        _COUNTS,
        st.none() | _COUNTS,
        st.none() | st.sampled_from(["float32", "bfloat16"]),
    )


def _outputs() -> st.SearchStrategy[Output]:
    number = st.none() | any_float64()
    meaning = (st.sampled_from(STAGE_NAMES), _NAMES)
    rest = {
        "reduction": st.none() | st.sampled_from(REDUCTIONS),
        "micro_batch_id": st.none() | _NAMES,
        "numerator": number,
        "denominator": number,
        "scale": any_float64(),
    }
    scopes = st.none() | st.sampled_from(["micro_batch", "rank", "global"])
    single = st.builds(Output, *meaning, value=any_float64(), scope=scopes, **rest)
    series = st.lists(any_float64(), max_size=3).map(tuple)
    return single | st.builds(Output, *meaning, values=series, scope=st.just("sample"), **rest)


def _settings() -> st.SearchStrategy[dict[str, Any]]:
    floats = st.floats(-3e38, 3e38)
    return st.builds(
        lambda epsilon, coef, size: Settings(
            reward=RewardSettings(epsilon=epsilon, n_samples_per_prompt=size),
            kl=KlSettings("low_var_kl", coef=coef),
        ).to_json(),
        floats,
        floats,
        st.none() | st.integers(1, 64),
    )


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    """Draw entries with something in every section, or nothing."""
    key = draw(keys())
    groups = tuple(draw(st.lists(st.integers(1, 512), max_size=2)))
    file = DataFile(
        table="steps",
        path=data_path(key, "steps"),
        bytes=draw(_WIDE),
        footer=draw(_NAMES),
        digest=draw(_NAMES),
        first_row_group=draw(_COUNTS),
        row_groups=groups,
        first_row=draw(_COUNTS),
        rows=sum(groups),
        columns=draw(st.dictionaries(_NAMES, _seals(), max_size=3)),
    )
    return Entry(
        key=key,
        expected_ranks=tuple(draw(st.lists(_COUNTS, max_size=3))),
        status=draw(st.sampled_from(["complete", "dropped"])),
        owner=draw(st.booleans()),
        cohort_size=draw(st.none() | _COUNTS),
        created_us=draw(st.integers(0, 253_402_300_799_999_999)),  # up to the year 9999
        producer={"commit": draw(_NAMES), "extra": {}},
        parallel=ParallelCoordinates(tensor_rank=draw(st.integers(0, 1)), tensor_size=2),
        resumed_from=draw(st.none() | st.builds(ResumePoint, _COUNTS, _WIDE)),
        settings_tree=draw(_settings()),
        contracts=draw(
            st.dictionaries(st.sampled_from(STAGE_NAMES), st.just(None), max_size=2).map(
                lambda names: {name: StageContract(name, reason="why") for name in names}
            )
        ),
        tolerances=draw(
            st.dictionaries(_NAMES, st.builds(Tolerance, finite(), finite()), max_size=1)
        ),
        origins=draw(
            st.dictionaries(
                _NAMES, st.builds(LogProbOrigin, _NAMES, st.none() | any_float64()), max_size=1
            )
        ),
        sources=tuple(draw(st.lists(st.tuples(_COUNTS, _WIDE), max_size=2))),
        redaction=draw(st.dictionaries(st.just("prompt"), st.just("hash"), max_size=1)),
        files=draw(st.sampled_from([(), (file,)])),
        outputs=tuple(draw(st.lists(_outputs(), max_size=3))),
        tokens=draw(_WIDE),
        reason=draw(_NAMES),
    )
