"""Files of torch.save: what repeats itself to far more than the file is refused."""

import io
import pickle
from typing import Any

import pytest
import torch

from trajreplay.schema import DatasetError
from trajreplay.schema.bundles import unpickle
from trajreplay.schema.bundles.torchfile import read_torch


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


TEXT = "x" * 100_000
REPEATED: dict[str, Any] = {
    "text": [TEXT] * 10_000,
    "text in rows": [{"prompt": TEXT}] * 10_000,
    "keys": [{TEXT: number} for number in range(10_000)],
    "lists": [[1] * 10_000] * 10_000,
}


@pytest.mark.parametrize("what", REPEATED)
def test_a_file_is_refused_that_repeats_the_same(what: str) -> None:
    with pytest.raises(DatasetError, match="the same values again and again"):
        read_torch(saved(REPEATED[what]), "x")


def test_samples_of_one_prompt_may_share_its_text() -> None:
    rows = [{"prompt": TEXT, "index": number} for number in range(32)]
    assert read_torch(saved(rows), "x") == rows


def test_numbers_are_bound_by_the_bytes_of_the_file_and_lists_by_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unpickle, "MAX_CONTAINERS", 200)

    def load(content: object) -> object:
        return unpickle.Unpickler("x", lambda _: b"").load(pickle.dumps(content, protocol=2))

    tokens = {"tokens": list(range(50_000)), "mask": [True, False] * 50_000}
    assert load(tokens) == tokens
    with pytest.raises(DatasetError, match="more than 200 lists or tuples"):
        load([[] for _ in range(300)])
