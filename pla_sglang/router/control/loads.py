"""What one instance has to do, between its reports: the last report, corrected by what was sent and done since.

A report says what the instance had counted when it was made. A request that was sent shortly before may not be in it
yet (it was on the wire, or in the tokenizer), and what came after is not. So the book keeps, for each request of this
router, when it was sent, when its prefill was done and when it ended, and asks of each request: what did the report
count it as, and what is it now? The difference is added to the report. Without any report the requests alone count.

Whether a report has counted a request is told by the number of requests that the instance has received, where the
report gives it; otherwise by time. The number is compared with what this router has sent, from a base that is taken
anew whenever nothing is on its way; others who send to the same instance make it err by what they send meanwhile.
Requests that other routers or clients send are in the reports only.
"""

from __future__ import annotations

import dataclasses
import enum

from pla_sglang.policy.fleet import InstanceView


class Phase(enum.Enum):
    """What a request is to one instance."""

    ABSENT = "absent"
    QUEUED = "queued"  # waits for its prefill here, or is in it
    COMING = "coming"  # its KV will come from another instance
    RUNNING = "running"


# Named once: CPython 3.11 takes 0.2 us to look a member up in its class, and every request meets these.
_ABSENT, _QUEUED, _COMING, _RUNNING = Phase
_DECODES = (_COMING, _RUNNING)


@dataclasses.dataclass(slots=True)
class Amounts:
    """What an ``InstanceView`` counts; see there. Sums, so they can be added and subtracted."""

    queued_prefills: int = 0
    queued_tokens: int = 0
    queued_attention: int = 0
    queued_history_tokens: int = 0
    running: int = 0
    context_tokens: int = 0
    waiting_decodes: int = 0
    waiting_decode_tokens: int = 0

    def add(self, other: Amounts) -> None:
        for name in FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def count(self, request: Tracked, phase: Phase, times: int = 1) -> None:
        """Adds what ``request`` is in ``phase``; ``times`` -1 takes it away. ABSENT counts as nothing."""
        new, history = request.new_tokens, request.history_tokens
        if phase is _QUEUED:
            self.queued_prefills += times
            self.queued_tokens += times * new
            self.queued_attention += times * new * (new + 2 * history)
            self.queued_history_tokens += times * history
        elif phase is _COMING:
            self.waiting_decodes += times
            self.waiting_decode_tokens += times * (new + history)
        elif phase is _RUNNING:
            self.running += times
            self.context_tokens += times * (new + history)


FIELDS = tuple(field.name for field in dataclasses.fields(Amounts))


@dataclasses.dataclass(slots=True, eq=False)
class Tracked:
    """One request at one instance. The first phase begins at ``sent_s``, the last ends at ``ended_s``.

    ``decodes_here`` False: the KV goes to another instance after the prefill.
    """

    new_tokens: int
    history_tokens: int
    sent_s: float
    first_phase: Phase
    decodes_here: bool
    place: int = 0  # among all that this router has sent there, from 1
    started_s: float | None = None  # prefill done, or KV there
    ended_s: float | None = None

    def phase_at(self, time_s: float, *, received: bool = True) -> Phase:
        """As the instance counts it at ``time_s``, if it had ``received`` it by then."""
        if self.ended_s is not None and self.ended_s <= time_s:
            return _ABSENT
        if self.started_s is not None and self.started_s <= time_s:
            return _RUNNING if self.decodes_here else _ABSENT
        return self.first_phase if received else _ABSENT


@dataclasses.dataclass(slots=True)
class Report:
    """One report of an instance, from telemetry or a poll. ``None``: this kind of report does not say."""

    amounts: Amounts
    received: int | None = None  # requests that the instance has received since its start
    kv_used_tokens: int = 0
    kv_capacity_tokens: int | None = None
    token_interval_s: float | None = None
    utilisation: float | None = None
    prefill_age_s: float | None = None


class LoadBook:
    """Keeps the figures of one ``InstanceView`` up to date.

    Args:
        settle_s: how long after sending an instance may not have counted a request yet, where only time can tell.
        lost_s: a request older than this has been received, or never will be.
    """

    def __init__(self, view: InstanceView, *, settle_s: float = 0.05, lost_s: float = 2.0) -> None:
        self.view = view
        self.reported_s: float | None = None
        self.reports = 0
        self._settle_s = settle_s
        self._lost_s = lost_s
        self._sent = 0
        self._base: int | None = None  # what the instance has received that this router has not sent
        self._total = Amounts()  # may fall below 0 for a moment, where a report left out what it was sent
        self._tracked: dict[tuple[str, int], Tracked] = {}

    def send(self, key: tuple[str, int], request: Tracked) -> None:
        """A request was sent to the instance. ``key``: request id and attempt."""
        self._sent += 1
        request.place = self._sent
        self._tracked[key] = request
        self._shift(request, _ABSENT, request.first_phase)

    def start(self, key: tuple[str, int], now_s: float) -> None:
        """Its prefill is done here, or its KV has arrived."""
        request = self._tracked.get(key)
        if request is None or request.started_s is not None:
            return
        request.started_s = now_s
        self._shift(request, request.first_phase, _RUNNING if request.decodes_here else _ABSENT)

    def end(self, key: tuple[str, int], now_s: float) -> None:
        """The instance holds nothing for it any more. Repeats change nothing."""
        request = self._tracked.pop(key, None)
        if request is None:
            return
        before = request.phase_at(now_s)
        request.ended_s = now_s
        self._shift(request, before, _ABSENT)

    def report(self, report: Report, now_s: float) -> None:
        """A report has arrived; it is corrected by what it cannot have counted."""
        self.reported_s = now_s
        self.reports += 1
        total = self._total = dataclasses.replace(report.amounts)
        self._anchor(report.received, now_s)
        for request in self._tracked.values():  # what has ended is in no report that comes now
            counted = request.phase_at(now_s, received=self._received(request, report.received, now_s))
            now = request.phase_at(now_s)
            if counted is not now:
                total.count(request, now)
                total.count(request, counted, -1)
        self._publish_prefills()
        self._publish_decodes()
        self._publish_rest(report)

    def _received(self, request: Tracked, received: int | None, now_s: float) -> bool:
        age_s = now_s - request.sent_s
        if received is None or self._base is None:
            return age_s >= self._settle_s
        return request.place <= received - self._base or age_s >= self._lost_s

    def _anchor(self, received: int | None, now_s: float) -> None:
        """Takes the base anew where it is certain what the instance has received of this router's."""
        if received is None:
            self._base = None
            return
        waiting = [one for one in self._tracked.values() if one.started_s is None]
        on_their_way = sum(now_s - one.sent_s < self._settle_s for one in waiting)
        if self._base is None or not waiting:
            self._base = received - (self._sent - on_their_way)

    def is_idle(self) -> bool:
        """Neither this router's requests nor anybody else's are there, as far as it is known."""
        return not self._tracked and not self.view.requests()

    def is_fresh(self, now_s: float, limit_s: float) -> bool:
        return self.reported_s is not None and now_s - self.reported_s <= limit_s

    def open_requests(self) -> int:
        """This router's requests there."""
        return len(self._tracked)

    def _shift(self, request: Tracked, before: Phase, after: Phase) -> None:
        if before is after:
            return
        total = self._total
        if after is not _ABSENT:
            total.count(request, after)
        if before is not _ABSENT:
            total.count(request, before, -1)
        if before is _QUEUED or after is _QUEUED:
            self._publish_prefills()
        if before in _DECODES or after in _DECODES:
            self._publish_decodes()

    # Written out, and without calls of max(), as it happens five times a request.

    def _publish_prefills(self) -> None:
        view, total = self.view, self._total
        view.queued_prefills = total.queued_prefills if total.queued_prefills > 0 else 0
        view.queued_tokens = total.queued_tokens if total.queued_tokens > 0 else 0
        view.queued_attention = total.queued_attention if total.queued_attention > 0 else 0
        view.queued_history_tokens = total.queued_history_tokens if total.queued_history_tokens > 0 else 0

    def _publish_decodes(self) -> None:
        view, total = self.view, self._total
        view.running = total.running if total.running > 0 else 0
        view.context_tokens = total.context_tokens if total.context_tokens > 0 else 0
        view.waiting_decodes = total.waiting_decodes if total.waiting_decodes > 0 else 0
        view.waiting_decode_tokens = total.waiting_decode_tokens if total.waiting_decode_tokens > 0 else 0

    def _publish_rest(self, report: Report) -> None:
        view = self.view
        view.kv_used_tokens = report.kv_used_tokens
        if report.kv_capacity_tokens:
            view.kv_capacity_tokens = report.kv_capacity_tokens
        view.token_interval_s = report.token_interval_s
        if report.utilisation is not None:
            view.utilisation = min(1.0, max(0.0, report.utilisation))
        view.prefill_age_s = report.prefill_age_s or 0.0
