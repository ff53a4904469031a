"""A program of its own that promotes a spool, and is killed at every call that it makes.

python -m tests.helpers.promotions FOLDER

FOLDER holds `spool` and `lake`. Each round works on a copy of both, in which the promotion ends at
its n-th change of a disk, and is done again; what is found in between is printed as JSON.
"""

import json
import os
import shutil
import sys
import tempfile
from functools import partial
from itertools import count
from pathlib import Path

from tests.helpers.writers import fork
from trajreplay import Lake
from trajreplay.capture.writing.spool import promoted, waiting
from trajreplay.schema.layout import ENTRIES, key_of_entry
from trajreplay.schema.localstore import LocalStore

CHANGES = ("mkdir", "rename", "link", "unlink", "fsync")
KILLED = 9


def main(folder: str) -> None:
    """Kill it at each change, until there are no more."""
    os.fsync = lambda fd: None  # the machine goes on; only processes are killed
    rounds = []
    for number in count():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            place = Path(scratch)
            for name in ("spool", "lake"):
                shutil.copytree(Path(folder) / name, place / name)
            spool, lake = str(place / "spool"), str(place / "lake")
            child = fork(partial(dying, spool, lake, number))
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            between = keys(lake), [list(one) for one in waiting(spool)]
            wrong = Lake.open(lake).validate(deep=True).findings
            again = promoted(spool, lake, wait_s=0.0)
            rounds.append(
                {
                    "code": code,
                    "lake": between[0],
                    "spool": between[1],
                    "wrong": [one.check for one in wrong if one.severity == "error"],
                    "problems": [one.message for one in again.problems],
                    "after": keys(lake),
                    "left": len(waiting(spool)),
                    "ok_after": Lake.open(lake).validate().ok,
                    "files": sum(one.is_file() for one in (place / "spool" / "data").rglob("*")),
                }
            )
            if code != KILLED:
                break
    sys.stdout.write(json.dumps(rounds))


def keys(lake: str) -> list[list[object]]:
    """The captures of a lake."""
    return sorted(list(key_of_entry(one.path)) for one in LocalStore(lake).list(ENTRIES))


def dying(spool: str, lake: str, after: int) -> None:
    """Promote, and end at one of the changes as a killed process does."""
    left = [after]

    for name in CHANGES:
        original = getattr(os, name)

        def call(*args: object, original: object = original, **kwargs: object) -> object:
            if not left[0]:
                os._exit(KILLED)
            left[0] -= 1
            return original(*args, **kwargs)  # type: ignore[operator]

        setattr(os, name, call)
    promoted(spool, lake, wait_s=0.0)


if __name__ == "__main__":
    main(sys.argv[1])
