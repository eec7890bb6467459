"""An open request, what its relay is told about it, and what its relay's last word means."""

from __future__ import annotations

import dataclasses

from pla_sglang.policy.fleet import RequestView
from pla_sglang.router import messages as m
from pla_sglang.router.control.admission import AdmissionReason, Verdict
from pla_sglang.router.control.driver import Choice, PolicyDriver
from pla_sglang.router.control.entries import End
from pla_sglang.router.control.explain import Story
from pla_sglang.router.control.prompts import Prompt
from pla_sglang.router.control.workers import Worker

ENDS = {
    m.Outcome.OK: End.FINISHED,
    m.Outcome.CLIENT_ERROR: End.FINISHED,
    m.Outcome.REFUSED: End.REFUSED,
    m.Outcome.CLIENT_GONE: End.CLIENT_GONE,
    m.Outcome.UPSTREAM_ERROR: End.UPSTREAM_ERROR,
    m.Outcome.UPSTREAM_LOST: End.UPSTREAM_ERROR,
    m.Outcome.PREFILL_FAILED: End.PREFILL_ABORTED,
    m.Outcome.TIMED_OUT: End.TIMEOUT,
    m.Outcome.ABORTED: End.DECODE_ABORTED,
    m.Outcome.NO_CONTROL: End.TIMEOUT,
    m.Outcome.DRAINED: End.ROUTER_DRAIN,
}
COMPLETE = frozenset({m.Outcome.OK, m.Outcome.CLIENT_ERROR})
_REFUSED_AS = {AdmissionReason.NO_INSTANCE.value: End.NO_INSTANCE, AdmissionReason.FAULT.value: End.FAULT}
_STATUS = {
    AdmissionReason.DUPLICATE: 409,
    AdmissionReason.NO_INSTANCE: 503,
    AdmissionReason.SAMPLES: 400,
    AdmissionReason.FAULT: 500,
}
_MESSAGES = {
    AdmissionReason.OPEN_LIMIT: "too many requests are open; try again later",
    AdmissionReason.QUEUE_LIMIT: "too many requests are waiting; try again later",
    AdmissionReason.TTFT_LIMIT: "the first token would come too late; try again later",
    AdmissionReason.DUPLICATE: "a request with this id is open",
    AdmissionReason.NO_INSTANCE: "no instance is ready",
    AdmissionReason.FAULT: "the router has failed on this request; its log says why",
    AdmissionReason.SAMPLES: "n > 1 is not served by a prefill and decode pair; send n requests, or a batch of prompts",
}


@dataclasses.dataclass(slots=True, eq=False)
class Open:
    """One request that has not ended, and where it is. ``key`` names its attempt in the load books; ``ask`` and it
    change together, by ``ask_again``."""

    ask: m.Ask
    view: RequestView
    prompt: Prompt
    story: Story
    arrived: bool = False  # the policy has been told
    prefill: Worker | None = None
    decode: Worker | None = None
    dispatched_s: float | None = None
    failed: tuple[Worker, Worker] | None = None  # prefill and decode between which the last KV transfer failed
    end_as: End | None = None  # why this side has ended it, where the relay only knows that it was told to
    key: tuple[str, int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.ask.rid, self.ask.attempt)

    def ask_again(self, ask: m.Ask) -> None:
        """Another attempt: it is nowhere yet."""
        self.ask, self.key = ask, (ask.rid, ask.attempt)
        self.prefill = self.decode = self.dispatched_s = None


def end_of(request: Open, outcome: m.Outcome) -> End:
    """How a request has ended of which its relay says ``outcome``; the relay does not know why it was refused."""
    end = request.end_as or ENDS[outcome]
    return _REFUSED_AS.get(request.story.admission, end) if end is End.REFUSED else end


def other_pair(request: Open, driver: PolicyDriver) -> Choice | None:
    """For a request whose KV transfer has failed; None for others."""
    if request.failed is None:
        return None
    prefill, decode = request.failed
    return driver.choose_other(request.view, prefill.view, decode.view)


def assign_message(request: Open, room: int | None, reason: str) -> m.Assign:
    """What the relay is told of a choice."""
    prefill, decode, ask = request.prefill, request.decode, request.ask
    assert prefill is not None and decode is not None
    if prefill is decode:
        return m.Assign(ask.rid, ask.attempt, decode.number, reason=reason)
    assert room is not None and prefill.description is not None
    return m.Assign(
        ask.rid,
        ask.attempt,
        decode.number,
        prefill.number,
        bootstrap_host=prefill.address.host,
        bootstrap_port=prefill.description.bootstrap_port or 0,
        bootstrap_room=room,
        reason=reason,
    )


def refusal(ask: m.Ask, verdict: Verdict) -> m.Refuse:
    """What the relay is told of a refusal."""
    reason = verdict.reason
    status = _STATUS.get(reason, 429)
    return m.Refuse(ask.rid, ask.attempt, status, reason.value, _MESSAGES[reason], verdict.retry_after_s)
