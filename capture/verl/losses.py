"""The actor of verl: every policy loss of an optimizer step, and the terms added to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trajreplay.capture.taking.values import kept
from trajreplay.capture.verl.engine import Worker
from trajreplay.capture.verl.rows import lengths_of
from trajreplay.capture.verl.settings import (
    Terms,
    loss_contract,
    loss_meaning,
    loss_settings,
)
from trajreplay.schema.contracts import StageContract

_TRAINER = {"source": "trainer"}


@dataclass
class Whole:
    """What is known of a loss while verl's own function still adds to it.

    Attributes:
        name: The policy loss in the registry.
        given: What that was called with.
        policy: What it came to, before anything was added, in place, to it.
        terms: What was added.
    """

    name: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    policy: Any = None
    terms: Terms = field(default_factory=Terms)


class Actor(Worker):
    """Records the policy losses of one process.

    A policy loss of the registry is one micro-batch. Where verl's own `ppo_loss` asks for it, it is
    recorded once that returns, with entropy and KL; elsewhere it stands for the whole loss.
    """

    _in_graph = "log_prob"
    _whole: Whole | None = None

    def after(self, name: str, given: Mapping[str, Any], result: Any) -> None:
        """Record one micro-batch with its loss, or keep it until terms are added."""
        whole = Whole(name, given, kept(result[0].detach()))
        if self._whole is None:
            self._record(whole, result[0])
        else:
            self._whole = whole

    def enter(self) -> None:
        """A function of verl begins, which adds terms to a policy loss."""
        self._whole = Whole()

    def penalised(self, reference: Any, kind: str, penalty: Any) -> None:
        """A KL penalty was computed, of each token."""
        if self._whole is not None:
            self._whole.terms.ref_log_probs, self._whole.terms.kl_kind = reference, kind
            self._whole.terms.penalty = penalty

    def aggregated(self, values: Any, result: Any) -> None:
        """Values of tokens became one number: those of the KL penalty, else the entropy."""
        if self._whole is None:
            return
        terms = self._whole.terms
        if terms.penalty is not None and values is terms.penalty:
            terms.kl_loss = result
        else:
            terms.entropy, terms.entropy_loss = values, result

    def leave(self, result: Any = None) -> None:
        """That function returned a loss with what it logs, or failed."""
        whole, self._whole = self._whole, None
        if result is not None and whole is not None and whole.given:
            self._record(whole, result[0])

    def _record(self, whole: Whole, loss: Any) -> None:
        recorder = self._recorder
        assert recorder is not None
        name, given, terms = whole.name, whole.given, whole.terms
        mode, config, mask = given["loss_agg_mode"], given["config"], given["response_mask"]
        with recorder.guard("policy loss"):
            weighted = given.get("rollout_is_weights") is not None
            self.begin(
                lambda: {
                    "settings": loss_settings(name, mode, config, terms),
                    "stages": [
                        StageContract("sample"),
                        loss_contract(
                            name,
                            mode,
                            weighted=weighted,
                            terms=terms,
                            told=config.global_batch_info,
                        ),
                    ],
                }
            )
            number = self.next_micro_batch()
            if not recorder.is_recording("step"):  # of its values only the heartbeat is made
                recorder.record_policy_loss(number, [], {"loss": loss})
                return
            log_probs = given["log_prob"]
            recorder.record_policy_loss(
                number,
                self.records(lengths_of(mask)),
                scalars={"loss": loss, "pg_loss": whole.policy, **terms.scalars},
                # Where verl propagates another gradient than that of the loss, none is compared.
                log_probs=log_probs.detach() if terms.passes_through else log_probs,
                old_log_probs=given["old_log_prob"],
                advantages=given["advantages"],
                ref_log_probs=terms.ref_log_probs,
                origins={"log_probs": _TRAINER, "old_log_probs": _TRAINER},
                columns={"loss_mask": mask, "entropy": terms.entropy},
                **loss_meaning(name, mode, config.global_batch_info, mask.shape[1]),
            )
