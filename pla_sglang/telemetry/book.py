"""What the router knows of one instance: its last report, and what was sent to it since.

A report is some milliseconds old when it arrives, and a prefill pass may keep an instance from reporting for a second.
In between a burst would go to one instance. So each dispatch is entered here and counts until a report includes it.

Whether it does is told by a count: the report says how many requests the instance has received since its start, and the
book knows how many of them it has sent. Requests of one sender arrive in the order in which they were sent; where
others send too, or connections overtake each other, the count errs by what is under way, until the next report.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from pla_sglang.policy.decisions import PrefillSample
from pla_sglang.policy.fleet import InstanceView
from pla_sglang.policy.types import PrefillClass
from pla_sglang.telemetry.message import Report

ROLE_CLASSES = {"mixed": None, "short": PrefillClass.SHORT, "long": PrefillClass.LONG}


@dataclasses.dataclass(slots=True)
class _Sent:
    """One dispatch: its place among all that went there, L and H."""

    place: int
    new_tokens: int
    history_tokens: int


class InstanceBook:
    """Keeps one ``InstanceView`` up to date. Owns the view's load fields; ``role`` and ``state`` are the caller's."""

    def __init__(self, view: InstanceView) -> None:
        self.view = view
        self.report: Report | None = None
        self.seen_s: float | None = None  # the caller's clock at the last report
        self.lost = 0  # reports, by their sequence
        self._since: deque[_Sent] = deque()
        self._base: int | None = None  # received by the instance before we sent anything
        self._places = 0

    def sent(self, new_tokens: int, history_tokens: int) -> None:
        """A request with L new and H history tokens was dispatched to the instance."""
        self._places += 1
        self._since.append(_Sent(self._places, new_tokens, history_tokens))
        self._add_sent(self._since[-1])

    def lost_send(self) -> None:
        """The last dispatch did not happen after all."""
        self._since.pop()
        self._places -= 1
        self._show()

    def update(self, report: Report, now_s: float) -> PrefillSample | None:
        """Take over ``report``; gives the sums of its prefill passes, if any. One that is older changes nothing."""
        last = self.report
        if last is not None and last.started_s == report.started_s:
            if report.sequence <= last.sequence:
                return None
            self.lost += report.sequence - last.sequence - 1
        elif last is not None:  # another process under the same name: what was sent to the old one is gone
            self._since.clear()
            self._places, self._base = 0, None
        self.report, self.seen_s = report, now_s
        self._forget_included(report)
        self._show()
        return self._sample(report)

    def age_s(self, now_s: float) -> float | None:
        """Since the last report; None before the first."""
        return None if self.seen_s is None else now_s - self.seen_s

    def outstanding(self) -> int:
        """Dispatches that no report includes yet."""
        return len(self._since)

    def _forget_included(self, report: Report) -> None:
        if self._base is None:  # what it has received by now that we have not sent came from others, or before us
            self._base = max(0, report.received - self._places)
        while self._since and self._since[0].place + self._base <= report.received:
            self._since.popleft()

    def _show(self) -> None:
        view, report = self.view, self.report
        if report is None:
            view.queued_prefills = view.queued_tokens = view.queued_attention = view.queued_history_tokens = 0
        else:
            backlog = report.backlog
            view.queued_prefills, view.queued_tokens = backlog.prefills, backlog.tokens
            view.queued_attention, view.queued_history_tokens = backlog.attention, backlog.history_tokens
            view.running, view.context_tokens = report.running, report.context_tokens
            view.waiting_decodes, view.waiting_decode_tokens = report.waiting_decodes, report.waiting_decode_tokens
            view.kv_used_tokens, view.kv_capacity_tokens = report.kv_used_tokens, report.kv_capacity_tokens
            view.token_interval_s, view.ttft_ratio = report.token_interval_s, report.ttft_ratio
            view.utilisation, view.prefill_age_s = report.utilisation, report.prefill_age_s
        for sent in self._since:
            self._add_sent(sent)

    def _add_sent(self, sent: _Sent) -> None:
        view, new, history = self.view, sent.new_tokens, sent.history_tokens
        view.queued_prefills += 1
        view.queued_tokens += new
        view.queued_attention += new * (new + 2 * history)
        view.queued_history_tokens += history

    def _sample(self, report: Report) -> PrefillSample | None:
        done = report.passes
        if not done.passes:
            return None
        return PrefillSample(
            instance=self.view,
            new_tokens=done.new_tokens,
            attention=done.attention,
            history_tokens=done.history_tokens,
            requests=done.requests,
            duration_s=done.duration_s,
        )
