"""Admission and a fair queue before the dispatcher, by the rules of the router's control plane."""

from __future__ import annotations

import dataclasses
from collections import Counter

from pla_sglang.common.checks import require
from pla_sglang.policy.admission import Admission, AdmissionKnobs, Verdict, is_saturated
from pla_sglang.policy.fair_queue import FairQueue
from pla_sglang.policy.interface.fleet import FleetView
from pla_sglang.sim.core.request import SimRequest


@dataclasses.dataclass(frozen=True)
class AdmissionQueueKnobs:
    """``hold_tokens``: mean prefill backlog of an instance above which requests wait in the queue; None: no limit."""

    admission: AdmissionKnobs = dataclasses.field(default_factory=AdmissionKnobs)
    hold_tokens: int | None = None

    def __post_init__(self) -> None:
        require("front hold_tokens", self.hold_tokens, 1)


class AdmissionQueue:
    """Who is let in, and who of those that wait is dispatched next. ``counts`` gets what was refused, by reason."""

    def __init__(self, knobs: AdmissionQueueKnobs, counts: Counter[str]) -> None:
        self.queue: FairQueue[SimRequest] = FairQueue()
        self._knobs = knobs
        self._admission = Admission(knobs.admission)
        self._counts = counts
        self._dispatched_s: dict[str, float] = {}  # until the first token, by request

    def admits(self, open_requests: int) -> bool:
        """By counts, at arrival."""
        return self._note(self._admission.before(open_requests, queued=len(self.queue)))

    def admits_dispatch(self, request: SimRequest, slo_s: float, now_s: float) -> bool:
        """By the predicted TTFT, once an instance is chosen. Takes the request out of the queue."""
        verdict = self._admission.judge(request.fleet.predicted_ttft_s, slo_s)
        if self.queue.remove(request.rid) is not None and verdict.admitted:
            self.queue.charge(request.tenant, request.cost_tokens)
            self._dispatched_s[request.rid] = now_s
        return self._note(verdict)

    def _note(self, verdict: Verdict) -> bool:
        if not verdict.admitted:
            self._counts[f"refused_{verdict.reason.value}"] += 1
        return verdict.admitted

    def next_request(self, fleet: FleetView) -> SimRequest | None:
        """Whose turn it is; None while all wait, or nobody does."""
        return None if is_saturated(fleet.prefill_capable(), self._knobs.hold_tokens) else self.queue.head()

    def on_first_token(self, request: SimRequest, now_s: float) -> None:
        dispatched_s = self._dispatched_s.pop(request.rid, None)
        if dispatched_s is not None:
            self._admission.on_first_token(request.fleet.predicted_ttft_s, now_s - dispatched_s)

    def on_end(self, request: SimRequest, output_tokens: int) -> None:
        self.queue.remove(request.rid)
        self.queue.charge(request.tenant, output_tokens)
        self._dispatched_s.pop(request.rid, None)
