"""When a setting is read: the record that the tables of settings are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from trajreplay.schema.settings import Settings


class Read(NamedTuple):
    """When fields of a section are read.

    Args:
        section: The section.
        fields: Its fields.
        where: Whether they are read.
        words: The same in words, after "read only".
    """

    section: str
    fields: tuple[str, ...]
    where: Callable[[Settings], bool]
    words: str
