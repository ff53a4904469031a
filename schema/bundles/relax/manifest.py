"""What the manifest of a Relax bundle claims: its format, stages and tolerances."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields, shown
from trajreplay.schema.contracts import CAPABILITIES, StageContract, stage_named
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.policy import TOLERANCES, Tolerance

FORMATS = (1, 2)
_VERSION = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")


def major_version(manifest: Fields) -> int:
    """The major number of the format, one of those known."""
    version = manifest.get("format_version", read.text)
    found = _VERSION.fullmatch(version)
    if found is None or int(found[1]) not in FORMATS:
        raise DatasetError(
            f"{manifest.where}: format_version is {shown(version)}, expected 1.x.y or 2.x.y",
            hint="A newer version of trajreplay may know it.",
            path=manifest.where,
        )
    return int(found[1])


def read_contracts(manifest: Fields, major: int) -> Iterator[tuple[str, StageContract]]:
    """What is claimed of each stage; who computed it then says nothing of who does now."""
    for name, claim in manifest.object("stage_contracts").items():
        stage_named(name)
        if claim.get("stage", read.text, name) != name:
            raise claim.error("stage", f"is {shown(claim.tree['stage'])}", f"{name!r}")
        capability = claim.get("capability", read.text)
        if capability not in CAPABILITIES:
            raise claim.error(
                "capability", f"is {shown(capability)}", f"one of {', '.join(CAPABILITIES)}"
            )
        if claim.get("version", read.text) != f"v{major}":
            raise claim.error("version", f"is {shown(claim.tree['version'])}", f"'v{major}'")
        reason = "" if capability == "recompute" else "declared so by the bundle"
        # Both formats are of the arithmetic that contract version v1 froze.
        yield name, StageContract(name, capability, "v1", reason)


def implementations(manifest: Fields) -> str:
    """Whose code the producer's own tool recomputes the stages with."""
    found = {
        name: claim.get("implementation", read.text, "")
        for name, claim in manifest.object("stage_contracts").items()
    }
    return json.dumps({name: one for name, one in found.items() if one})


def read_tolerances(manifest: Fields) -> Iterator[tuple[str, Tolerance]]:
    """The tolerances that the bundle states for itself, by stage."""
    policy = manifest.object("comparison_policy", {}).object("tolerances", {})
    plain = TOLERANCES["float32"]
    for name, one in policy.items():
        stage_named(name)
        one.refuse_unknown(("atol", "rtol"), "a tolerance has these parts")
        atol, rtol = (
            one.get("atol", read.number, plain.atol),
            one.get("rtol", read.number, plain.rtol),
        )
        if not (atol >= 0 and rtol >= 0):
            raise one.error("atol or rtol", f"is {atol:g}, {rtol:g}", "numbers from 0 on")
        yield name, Tolerance(atol, rtol)
