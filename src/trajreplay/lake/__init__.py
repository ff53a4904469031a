"""The lake: one object over everything that can be done with one."""

from __future__ import annotations

from trajreplay.lake.asked import Asked
from trajreplay.lake.compared import Compared
from trajreplay.lake.files import FromFiles
from trajreplay.lake.filled import Filled
from trajreplay.lake.gated import Gated
from trajreplay.lake.judged import Judged
from trajreplay.lake.kept import Kept

__all__ = ["Lake"]


class Lake(Filled, FromFiles, Asked, Gated, Judged, Compared, Kept):
    """A lake of captures in a folder.

    Made by `Lake.create` and `Lake.open`. What a method needs is loaded when it is called, so
    that a trainer that captures loads no duckdb.

    Attributes:
        imported: What became of the files of a lake that `Lake.of_files` made; None of any other.
    """
