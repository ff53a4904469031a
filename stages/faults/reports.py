"""Reports of real faults that the catalogue refers to: where each was met, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from trajreplay.stages.faults.met import MET


@dataclass(frozen=True)
class Report:
    """A fault that somebody met and wrote about.

    Args:
        id: Its name in the catalogue, as `K-001`.
        where: The frameworks.
        what: What went wrong.
        url: The report.
    """

    id: str
    where: str
    what: str
    url: str

    @property
    def text(self) -> str:
        """The report in a line."""
        return f"{self.id}, {self.where}: {self.what}, {self.url}"


REPORTS: Mapping[str, Report] = {
    name: Report(name, where, what, f"https://github.com/{place}")
    for name, where, what, place in MET
}


def reported(references: Iterable[str]) -> Iterator[str]:
    """References as a reader wants them: reports in a line each, other links as they are.

    >>> next(reported(["K-015"]))
    'K-015, prime-rl: Missing brackets in the z-score, https://github.com/PrimeIntellect-ai/prime-rl/pull/390'
    """
    known = [REPORTS[one] for one in references if one in REPORTS]
    yield from (one.text for one in known)
    links = {one.url for one in known}
    yield from (one for one in references if one not in REPORTS and one not in links)
