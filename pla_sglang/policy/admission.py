"""Who is let in (soft by default) and, where requests have to wait here, who is next.

Without limits nobody is refused. With a limit on the predicted TTFT, a prediction is believed only as far as it has
earned: it is corrected by what became of earlier predictions, taken at the favourable end of their spread, and refuses
nobody before it has been judged often enough. Of those it would refuse, some are let in all the same, so that a
predictor that has become too pessimistic finds out. A prior that is ten times off must not lock out those who could be
served (a published TTFT gate refused 979 of 1,000 servable requests for that reason).
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import math
from collections import deque
from collections.abc import Sequence

from pla_sglang.common.checks import MILLI, Range, check_fields, knob, require
from pla_sglang.policy.interface.fleet import InstanceView


class AdmissionReason(enum.Enum):
    """Why a request was let in or not."""

    ADMITTED = "admitted"
    LATE_EXPECTED = "late_expected"  # soft: let in although its target will probably be missed
    UNJUDGED = "unjudged"  # the prediction has not been judged often enough to refuse anybody
    PROBE = "probe"  # let in against the prediction, to judge it
    OPEN_LIMIT = "open_limit"  # hard limit on open requests
    TTFT_LIMIT = "ttft_limit"  # hard limit on the predicted TTFT
    TENANT_LIMIT = "tenant_limit"  # its tenant has used its share of prefill time
    QUEUE_LIMIT = "queue_limit"  # hard limit on requests that wait in the router
    DUPLICATE = "duplicate"  # a request with this id is open
    NO_INSTANCE = "no_instance"  # nobody became ready in time
    SAMPLES = "several_samples"  # n > 1, and no unified instance is ready
    ALL_FULL = "all_full"  # an instance has refused it for load, and all others have just refused requests too
    RETRY_BUDGET = "retry_budget"  # an instance has refused it for load, and too many requests were retried already
    UNIFIED_ONLY = "unified_only"  # a pair cannot serve its path, and there is no unified instance
    SESSIONS = "sessions"  # session_params, and no unified instance is ready
    OTHER_MODEL = "other_model"  # no instance has a model of the kind that its path needs
    NO_ADAPTER = "no_adapter"  # no instance serves LoRA adapters
    OVER_CONTEXT = "over_context"  # its prompt is longer than the context of every instance
    FAULT = "fault"  # the choice for it has failed, which is a mistake of the policy's


LETS_IN = frozenset(
    {AdmissionReason.ADMITTED, AdmissionReason.LATE_EXPECTED, AdmissionReason.UNJUDGED, AdmissionReason.PROBE}
)


@dataclasses.dataclass(frozen=True)
class AdmissionKnobs:
    """Hard limits; None: none."""

    open_requests: int | None = knob(
        None, "--max-open-requests", "hard limit: 429 above", allowed=Range(1), heading="admission"
    )
    queued_requests: int | None = knob(
        None, "--max-queued-requests", "hard limit on those waiting here", allowed=Range(0)
    )
    ttft_s: float | None = knob(
        None,
        "--max-ttft-ms MS",
        "hard limit on the predicted TTFT",
        allowed=Range(0, unit="ms", above=True),
        scale=MILLI,
    )
    judged: int = knob(50, allowed=Range(1))  # first tokens that must have been seen before a prediction may refuse
    window: int = 200  # predictions that the correction remembers
    favourable: float = knob(0.1, allowed=Range(0, 1))  # quantile of observed / predicted that is believed
    probe_every: int = knob(50, allowed=Range(2))  # of those refused for their TTFT, one in this many is let in
    retry_max_s: float = knob(60.0, allowed=Range(1))  # longest Retry-After

    def __post_init__(self) -> None:
        check_fields(self, "admission")
        require("admission window", self.window, self.judged)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """``retry_after_s`` where the request is refused."""

    admitted: bool
    reason: AdmissionReason
    retry_after_s: float | None = None


_LET_IN = {reason: Verdict(True, reason) for reason in AdmissionReason}
_ADMITTED = _LET_IN[AdmissionReason.ADMITTED]
_LATE_EXPECTED = _LET_IN[AdmissionReason.LATE_EXPECTED]


class Correction:
    """How predictions have turned out: recent ratios of observed to predicted."""

    def __init__(self, window: int) -> None:
        self.count = 0
        self._window = window
        self._ratios: deque[float] = deque()
        self._sorted: list[float] = []  # the same, kept in order: each request adds one and asks for the median

    def add(self, predicted_s: float, observed_s: float) -> None:
        if predicted_s <= 0:
            return
        self.count += 1
        ratio = observed_s / predicted_s
        self._ratios.append(ratio)
        bisect.insort(self._sorted, ratio)
        if len(self._ratios) > self._window:
            del self._sorted[bisect.bisect_left(self._sorted, self._ratios.popleft())]

    def quantile(self, share: float) -> float:
        """Nearest rank, for a ``share`` in [0, 1]; 1 before anything was seen."""
        if not self._sorted:
            return 1.0
        return self._sorted[max(0, math.ceil(share * len(self._sorted)) - 1)]


class Admission:
    """Decides for one router. Pure but for its own statistics."""

    def __init__(self, knobs: AdmissionKnobs) -> None:
        self.knobs = knobs
        self.correction = Correction(knobs.window)
        self._would_refuse = 0

    def before(self, open_requests: int, *, queued: int = 0) -> Verdict:
        """By counts, before anything is known about the request."""
        knobs = self.knobs
        if knobs.open_requests is not None and open_requests >= knobs.open_requests:
            return Verdict(False, AdmissionReason.OPEN_LIMIT, 1.0)
        if knobs.queued_requests is not None and queued > knobs.queued_requests:
            return Verdict(False, AdmissionReason.QUEUE_LIMIT, 1.0)
        return _ADMITTED

    def judge(self, predicted_ttft_s: float | None, slo_s: float) -> Verdict:
        """By the predicted TTFT of the instance that the policy chose; None: no prediction, nobody is refused."""
        if predicted_ttft_s is None:
            return _ADMITTED
        limit_s = self.knobs.ttft_s
        typical_s = predicted_ttft_s * self.correction.quantile(0.5)
        verdict = _LATE_EXPECTED if typical_s > slo_s else _ADMITTED
        if limit_s is None or predicted_ttft_s * self.correction.quantile(self.knobs.favourable) <= limit_s:
            return verdict
        if self.correction.count < self.knobs.judged:
            return _LET_IN[AdmissionReason.UNJUDGED]
        self._would_refuse += 1
        if self._would_refuse % self.knobs.probe_every == 0:
            return _LET_IN[AdmissionReason.PROBE]
        after_s = min(self.knobs.retry_max_s, max(1.0, math.ceil(typical_s - limit_s)))
        return Verdict(False, AdmissionReason.TTFT_LIMIT, after_s)

    def on_first_token(self, predicted_ttft_s: float | None, observed_s: float) -> None:
        if predicted_ttft_s is not None:
            self.correction.add(predicted_ttft_s, observed_s)


def is_saturated(members: Sequence[InstanceView], hold_tokens: int | None) -> bool:
    """The mean prefill backlog of ``members`` is above ``hold_tokens``: then requests wait in the queue, where
    their order can still be chosen. Never without a limit or without members."""
    if hold_tokens is None:
        return False
    return bool(members) and sum(member.queued_tokens for member in members) > hold_tokens * len(members)
