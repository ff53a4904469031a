"""The gradient witness: what reached each log-probability, against what the loss sends there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from trajreplay.schema import LossSettings
from trajreplay.schema.columns import has_column
from trajreplay.schema.tables import GRADIENTS
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.compose import SHARE
from trajreplay.stages.losses.coverage import POLICY
from trajreplay.stages.losses.sample_losses import SampleLosses
from trajreplay.stages.outputs import Recorded, is_stated
from trajreplay.stages.report import Finding, Severity

_CHECK = "gradient"
_SCOPES = ("micro_batch", "rank", "global")  # the first that is recorded of a loss is the one
# Float32 as the losses have it: some roundings of a difference and its exponential.
_ROUNDOFF = {"bfloat16": 2.0**-6, "float16": 2.0**-9}
_FLOAT32 = 2e-5
_SURROGATES = ("ppo-clip", "cispo", "sapo", "dro", "dppo", "reinforce")
# Settings whose effect on gradients is known; any other has to be as it is by default.
_KNOWN = {
    *("eps_clip", "eps_clip_high", "surrogate", "ratio", "old_source", "log_ratio_clamp"),
    *("dual_clip", "dual_side", "cispo_bounds", "sapo_tau_pos", "sapo_tau_neg", "dro_beta"),
    *("dppo_measure", "dppo_rule", "dppo_form", "dppo_ratio_cap", "dppo_adv_tau", "dppo_kl_tau"),
    *("entropy_coef", "kl_loss_coef", "kl_loss_estimator", "kl_loss_clamp"),
    *(
        "kl_loss_log_ratio_clamp",
        "kl_loss_clamped",
        "kl_loss_source",
        "kl_loss_weighted",
        "kl_loss_weight",
    ),
    *("aggregation", "batch_reduction", "mean_over", "micro_batch_weight", "token_count"),
    *("denominator_rows", "constant_norm", "constant_norm_by_rows", "fragments"),
    *("use_kl_loss", "tis", "opsm", "opd", "per_token", "count_epsilon"),
    # Of the entropy, which is no function of the log-probs here.
    *("entropy_aggregation", "entropy_mean_over"),
    # Of metrics, and of weights that none has here.
    *("metrics_aggregation", "sapo_clipped", "kl_cov_ppo_kl", "undefined_weight"),
}
_OF_KL = {"kl_loss_aggregation", "kl_loss_mean_over"}
_OFF = LossSettings()


def judge_gradients(block: Block, outputs: Sequence[list[Recorded]], losses: SampleLosses) -> None:
    """Compare recorded gradients with those of the recomputed loss; a finding where they differ.

    A loss may be multiplied before it is propagated back, by the scaler of mixed precision for
    one: a factor that is the same at all tokens of a cohort is told, and no difference.

    Args:
        block: The cohorts.
        outputs: Of each, the recorded scalars of the policy loss.
        losses: Its terms.
    """
    for cohort in block.cohorts:
        if GRADIENTS in cohort.lacking:
            _tell(cohort, "warning", "recorded of some samples only, and not compared")
    if not has_column(block.packed.table, GRADIENTS):
        return
    if reason := _not_recomputed(block, losses):
        for cohort in block.cohorts:
            _tell(cohort, "warning", f"recorded and not compared: {reason}")
        return
    shares, covered = _shares(block, outputs, losses)
    terms = losses.of_tokens.gradients()
    undecided = torch.zeros(len(shares), dtype=torch.bool)
    for moved in (SHARE, -SHARE):
        other = losses.of_tokens.gradients(moved)["pg_loss"]
        undecided |= (other - terms["pg_loss"]).abs() > _FLOAT32 * terms["pg_loss"].abs()
    # What is under the mask adds nothing, whatever it is.
    counted = shares != 0
    expected = torch.where(counted, shares * torch.stack([*terms.values()]).sum(0), 0.0)
    size = torch.stack([one.abs() for one in terms.values()]).sum(0)
    sizes = torch.where(counted, shares.abs() * size, 0.0)
    recorded = block.packed.tokens(GRADIENTS).double()
    compared = covered & ~undecided
    for cohort, (start, stop) in zip(block.cohorts, block.spans(GRADIENTS), strict=True):
        here = torch.arange(start, stop)[compared[start:stop]]
        _judge(block, cohort, here, recorded, expected, sizes)


def _not_recomputed(block: Block, losses: SampleLosses) -> str:
    """Why the gradients of a loss are not known, or nothing."""
    settings: LossSettings = block.settings.loss
    known = _KNOWN | (_OF_KL if settings.kl_loss_coef == 0.0 else set())
    other = [one.name for one in fields(settings) if one.name not in known]
    changed = [one for one in other if getattr(settings, one) != getattr(_OFF, one)]
    reasons = {
        "a kernel of the user computes the loss": block.kernel(POLICY) is not None,
        f"the ratio is {settings.ratio}": settings.ratio not in ("token", "one"),
        f"the surrogate is {settings.surrogate}": settings.surrogate not in _SURROGATES,
        "a ratio may weigh the KL": settings.kl_loss_coef != 0.0
        and (settings.kl_loss_weighted or settings.ratio == "one"),
        f"{', '.join(changed)} may change them": bool(changed),
        "no loss is recorded": "loss" not in losses.means,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _shares(
    block: Block, outputs: Sequence[list[Recorded]], losses: SampleLosses
) -> tuple[Tensor, Tensor]:
    """(N,) float64 and bool. What a term adds to the recorded loss, and where one is recorded."""
    samples = torch.zeros(block.packed.sample_bounds[-1], dtype=torch.float64)
    covered = torch.zeros(len(samples), dtype=torch.bool)
    for found in outputs:
        known = [
            one
            for one in found
            if one.output.field == "loss" and one.complete and is_stated(one.output)
        ]
        scopes = [scope for scope in _SCOPES if any(one.output.scope == scope for one in known)]
        for one in known:
            if one.output.scope != scopes[0]:
                continue
            share = one.output.scale / losses.denominators.divisor(one.output, one.samples)
            by_batch = losses.denominators.by_batch(one.output)
            samples[one.samples] += share * (losses.denominators.shares if by_batch else 1.0)
            covered[one.samples] = True
    lengths = block.packed.offsets.diff()
    return samples.repeat_interleave(lengths) * losses.token_shares(), covered.repeat_interleave(
        lengths
    )


def _judge(
    block: Block,
    cohort: LoadedCohort,
    tokens: Tensor,
    recorded: Tensor,
    expected: Tensor,
    sizes: Tensor,
) -> None:
    """Judge the compared tokens of one cohort."""
    given, due, size = recorded[tokens], expected[tokens], sizes[tokens]
    if not len(tokens):
        _tell(cohort, "warning", "recorded and not compared: no loss is recorded of its samples")
        return
    if not bool(given.isfinite().all()):
        _at(block, cohort, tokens[(~given.isfinite()).nonzero()[0]], "is not finite")
        return
    if not bool(due.isfinite().all()):
        odd = tokens[(~due.isfinite()).nonzero()[0]]
        _at(block, cohort, odd, "cannot be held against the recorded loss, whose own is not finite")
        return
    squares = float((due * due).sum())
    factor = float((given * due).sum()) / squares if squares else 1.0
    if factor == 0.0 and not bool(given.any()):
        _tell(cohort, "error", "no gradient reached log_probs, and the recorded loss has one")
        return
    if factor <= 0.0:
        _tell(cohort, "error", "they point the other way than those of the recorded loss")
        return
    roundoff = _ROUNDOFF.get(block.dtypes.get("log_probs", "float32"), _FLOAT32)
    excess = (given - factor * due).abs() - factor * roundoff * (size + 0.01 * size.max())
    worst = int(excess.argmax())
    if float(excess[worst]) > 0.0:
        message = f"is {float(given[worst]):.6g}, and the recorded loss has {float(due[worst]):.6g}"
        count = int((excess > 0.0).sum())
        _at(block, cohort, tokens[worst], f"{message}; {count} of {len(tokens)} tokens differ")
        return
    times = "" if abs(factor - 1.0) <= roundoff * 8 else f" times {factor:.6g}"
    _tell(cohort, "info", f"those of {len(tokens)} tokens are those of the recorded loss{times}")


def _at(block: Block, cohort: LoadedCohort, token: Tensor, message: str) -> None:
    sample, position = block.packed.sample_of(int(token))
    name = block.packed.text("sample_id", sample)
    cohort.report.findings.append(
        Finding(
            _CHECK,
            "error",
            f"gradients: that of log_probs at sample {name} token {position} {message}",
            stage=POLICY,
            sample_id=name,
            token=position,
        )
    )


def _tell(cohort: LoadedCohort, severity: Severity, message: str) -> None:
    cohort.report.findings.append(Finding(_CHECK, severity, f"gradients: {message}", stage=POLICY))
