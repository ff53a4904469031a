"""What could not be written and takes few bytes: tried again until the lake holds it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from trajreplay.schema.errors import CaptureError, SchemaError

if TYPE_CHECKING:
    from trajreplay.capture.writing.handoff import Handoff

_MOST = 1 << 14  # of a lake that is gone for good


class Notes:
    """Captures without their data, and events, that the lake lacks because a write failed.

    Args:
        write: Writes one.

    Attributes:
        left: How many the lake lacks, those that are not tried again included.
    """

    def __init__(self, write: Callable[[Handoff], None]) -> None:
        self._write = write
        self._waiting: deque[Handoff] = deque()
        self.left = 0

    def add(self, handoff: Handoff) -> None:
        """Take over one; where too many wait, the oldest is not tried again."""
        self._waiting.append(handoff)
        self.left += 1
        if len(self._waiting) > _MOST:
            self._waiting.popleft()

    def retry(self) -> None:
        """Write what waits, in order, as long as the lake takes it."""
        while self._waiting:
            try:
                self._write(self._waiting[0])
                self.left -= 1
            except (CaptureError, SchemaError):  # it never will be: something else has its place
                pass
            except Exception:  # noqa: BLE001 - the lake is not there yet
                return
            self._waiting.popleft()
