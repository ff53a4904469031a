"""A factor between what a loss recorded and what is right: of what the cohort counts, if any."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant, varied
from trajreplay.stages.faults.fault import Told, Tries


def _factor_words(block: Block) -> dict[float, str]:
    """Numbers of this cohort that a loss is divided or multiplied by, and what they count."""
    (cohort,) = block.cohorts
    owners = cohort.owners
    context = max(one.parallel.context_size for one in owners)
    found: dict[float, str] = {}
    counts = {
        "the micro-batches of a rank": len({one for _, one in cohort.micro_batches if one}),
        "the micro-batches": sum(one is not None for _, one in cohort.micro_batches),
        "the ranks": len({one.key.rank for one in owners}),
        "the context-parallel ranks": context,
        "the samples": sum(cohort.rows.values()),
        "the data-parallel ranks": max(one.parallel.data_size for one in owners),
    }
    for what, count in counts.items():
        if count > 1:
            known = found.get(float(count))
            found[float(count)] = f"{known} or {what}" if known else what
    return found


# The scalar that a factor of a whole loss shows in.
_WHOLE = {"loss.policy": "loss", "loss.value": "value_loss"}
# A whole number beyond this that nothing of the cohort counts may be one by chance: one more value
# has to share it.
_COUNTLESS = 64


def factors(stage: str) -> Tries:
    """Tries of a factor between what a stage recorded and what is right, if a plausible one."""

    def tries(block: Block) -> Iterable[Told]:
        from trajreplay.stages.counterfactuals.values import recompute

        words = _factor_words(block)
        own = varied(block, Variant(), (stage,))
        differing = [one for one in recompute(own, stage) if bool(one.disagree.any())]
        ratios = torch.cat(
            [(one.recorded / one.recomputed)[one.disagree] for one in differing]
            or [torch.zeros(0, dtype=torch.float64)]
        )
        finite = ratios[torch.isfinite(ratios) & (ratios > 0)]
        if len(finite) != len(ratios) or not len(ratios):
            return
        factor = float(ratios.median())
        whole = round(factor) if factor > 1 else round(1 / factor)
        exact = float(whole) if factor > 1 else 1 / whole
        counted = words.get(float(whole), "")
        if whole < 2 or abs(factor / exact - 1) > 1e-4:
            return
        scales = {one.field: exact for one in differing}
        what = f"{'times' if factor > 1 else 'divided by'} {whole}"
        if _WHOLE[stage] not in {one.field for one in differing}:
            what = f"with {' and '.join(one.field for one in differing)} alone {what}"
        said = f"{what}{f', {counted}' if counted else ''}"
        yield Told(Variant(scales=scales), said, int(whole > _COUNTLESS and not counted))

    return tries
