"""The load of one instance between its reports: the last report, corrected by later dispatches and events.

A report contains what the instance had counted when it was made. A request that was sent shortly before may be missing
(on the wire, or in the tokenizer), and later ones are missing. So the tracker keeps, for each request of
this sender, the times of dispatch, end of prefill and end, and compares its phase in the report with its current
phase. The difference is added to the report. Without any report only these requests count.

Whether a report has counted a request is known from the number of requests that the instance has received, if the
report contains it; otherwise from time. The number is compared with that of this sender, relative to a base that is
updated whenever no request is on its way; other senders to the same instance cause an error of their
requests since then. Requests of other senders are in the reports only.

A report may also be ahead of the sender: a prefill has ended, and its first token is on its way through detokenizer,
HTTP and relay. The number of prefills in the report says how many of this sender's requests these are. Their events,
which come next, change nothing: what the report has left out already must not be taken off again.

An instance counts a decode that was named for it from its dispatch on, and cannot tell whether its prefill at another
instance is done. The sender can, of its own requests: so ``prefilling_decode_tokens`` is the sender's alone.

A router follows its requests to their end. The dispatcher of the pools inside one server gets no later events of them,
so there a request counts until a report has counted it (``follows_requests`` False). The simulator has no tracker: it
reads the load of its instances directly, without delay; it shares ``LoadAmounts``.
"""

from __future__ import annotations

import dataclasses
import enum

from pla_sglang.load.instance_load import InstanceLoad, combine_ranks
from pla_sglang.load.report import Report
from pla_sglang.load.window import SIGNAL_WINDOW_S, WindowMean
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.interface.fleet import InstanceView, LoadAmounts


class Phase(enum.Enum):
    """Phase of a request at one instance."""

    ABSENT = "absent"
    QUEUED = "queued"  # waits for its prefill here, or is in it
    PREFILLING = "prefilling"  # its decode was named for here, and its prefill at another instance is not done
    COMING = "coming"  # its KV comes from another instance
    RUNNING = "running"


# Named once: see ``fast_enum``.
_ABSENT, _QUEUED, _PREFILLING, _COMING, _RUNNING = Phase
_DECODES = (_PREFILLING, _COMING, _RUNNING)


@dataclasses.dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request at one instance. The first phase begins at ``sent_s``, the last ends at ``ended_s``.

    ``first_phase`` PREFILLING becomes COMING (``LoadTracker.note_prefilled``). ``decodes_here`` False: the KV goes to
    another instance after the prefill.
    """

    new_tokens: int
    history_tokens: int
    sent_s: float
    first_phase: Phase
    decodes_here: bool
    place: int = 0  # among all that this sender has sent there, from 1
    started_s: float | None = None  # prefill done, or KV there
    ended_s: float | None = None

    def phase_at(self, time_s: float, *, received: bool = True) -> Phase:
        """Its phase in the instance's count at ``time_s``, if the instance had ``received`` it by then."""
        if self.ended_s is not None and self.ended_s <= time_s:
            return _ABSENT
        if self.started_s is not None and self.started_s <= time_s:
            return _RUNNING if self.decodes_here else _ABSENT
        return self.first_phase if received else _ABSENT


def count_request(total: LoadAmounts, request: TrackedRequest, phase: Phase, times: int = 1) -> None:
    """Adds the load of ``request`` in ``phase`` to ``total``; ``times`` -1 subtracts it. ABSENT counts as nothing."""
    new, history = request.new_tokens, request.history_tokens
    if phase is _QUEUED:
        total.queued_prefills += times
        total.queued_tokens += times * new
        total.queued_attention += times * new * (new + 2 * history)
        total.queued_history_tokens += times * history
    elif phase is _COMING or phase is _PREFILLING:
        total.waiting_decodes += times
        total.waiting_decode_tokens += times * (new + history)
        if phase is _PREFILLING:
            total.prefilling_decode_tokens += times * (new + history)
    elif phase is _RUNNING:
        total.running += times
        total.context_tokens += times * (new + history)


LOST_S = 2.0  # a request that was sent so long ago counts as received


class ReportEffect(enum.Enum):
    """How the tracker used a report."""

    APPLIED = "applied"
    OUTDATED = "outdated"  # late, or of a process that is gone: it changed nothing
    RESTARTED = "restarted"  # the first of another process: whoever asked decides what becomes of the requests


class LoadTracker:
    """Keeps the figures of one ``InstanceView`` up to date. ``role`` and ``state`` are the caller's.

    Args:
        settle_s: time after sending in which an instance may not have counted a request yet, if only time is known.
        clock: of its device: what the view says of times is in device seconds.
        follows_requests: whether ``start_request`` and ``end_request`` are called. Otherwise a request is dropped once
            it has been received, and the TTFT ratio is that of the report.
    """

    def __init__(
        self,
        view: InstanceView,
        *,
        settle_s: float = 0.05,
        follows_requests: bool = True,
        clock: DeviceClock | None = None,
    ) -> None:
        self.view = view
        self.reported_s: float | None = None
        self.reports: dict[int, Report] = {}  # the last one of each rank that sends any
        self.lost_reports = 0  # by their sequence numbers
        self._settle_s = settle_s
        self._follows_requests = follows_requests
        self._clock = clock or DeviceClock()
        self._sent = 0
        self._base: int | None = None  # what the instance has received that this sender has not sent
        self._reported_place = 0  # of the last request of this sender that the last report has counted
        self._unannounced = 0  # prefills that the last report knows to be done, and no event has said so
        self._total = LoadAmounts()  # may fall below 0 for a moment, where a report left out what it was sent
        self._tracked: dict[tuple[str, int], TrackedRequest] = {}
        self._ttft_ratios = WindowMean(SIGNAL_WINDOW_S)

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, key: tuple[str, int], request: TrackedRequest) -> None:
        """A request was sent to the instance. ``key``: request id and attempt."""
        self._sent += 1
        request.place = self._sent
        self._tracked[key] = request
        self._shift(request, _ABSENT, request.first_phase)

    def note_prefilled(self, key: tuple[str, int]) -> None:
        """The prefill elsewhere of a decode that was named for here is done: its KV comes. Idempotent."""
        request = self._tracked.get(key)
        if request is None or request.first_phase is not _PREFILLING:
            return
        request.first_phase = _COMING
        if request.started_s is None:
            self._shift(request, _PREFILLING, _COMING)

    def start_request(self, key: tuple[str, int], now_s: float) -> None:
        """Its prefill is done here, or its KV has arrived."""
        request = self._tracked.get(key)
        if request is None or request.started_s is not None:
            return
        known = self._is_reported_done(request)
        request.started_s = now_s
        if not known:
            self._shift(request, request.first_phase, _RUNNING if request.decodes_here else _ABSENT)

    def end_request(self, key: tuple[str, int], now_s: float) -> None:
        """The instance holds nothing for it any more. Idempotent."""
        request = self._tracked.pop(key, None)
        if request is None:
            return
        before = request.phase_at(now_s)
        if self._is_reported_done(request):
            before = _RUNNING if request.decodes_here else _ABSENT
        request.ended_s = now_s
        self._shift(request, before, _ABSENT)

    def note_full(self, now_s: float, avoid_s: float) -> None:
        """The instance has refused a request for load. ``avoid_s``: of device time, in which its queue gets shorter."""
        self.view.full_until_s = now_s + self._clock.wall_s(avoid_s)

    def note_ttft_ratio(self, ratio: float, now_s: float) -> None:
        """A request had its first token after ``ratio`` times its target."""
        self._ttft_ratios.add(ratio, self._clock.device_s(now_s))
        self.age_ttft_ratio(now_s)

    def age_ttft_ratio(self, now_s: float) -> None:
        """Lets the TTFT ratio of an instance without new requests expire. Call a few times a second."""
        self.view.ttft_ratio = self._ttft_ratios.mean(self._clock.device_s(now_s))

    def open_requests(self) -> int:
        """This sender's requests there."""
        return len(self._tracked)

    def is_idle(self) -> bool:
        """True if the instance has no known requests of any sender."""
        return not self._tracked and not self.view.requests()

    # -- reports -----------------------------------------------------------------------------------------------------

    def on_report(self, report: Report, now_s: float) -> ReportEffect:
        """Takes the report of one rank; the reports of all ranks are added up."""
        last = self.reports.get(report.dp_rank)
        if last is not None:
            if last.started_s != report.started_s:
                return ReportEffect.RESTARTED if report.started_s > last.started_s else ReportEffect.OUTDATED
            if report.sequence <= last.sequence:
                return ReportEffect.OUTDATED
            self.lost_reports += report.sequence - last.sequence - 1
        self.reports[report.dp_rank] = report
        self.on_load(combine_ranks(self.reports.values()), now_s)
        return ReportEffect.APPLIED

    def on_load(self, load: InstanceLoad, now_s: float) -> None:
        """Takes new figures, corrected by what they cannot include yet."""
        self.reported_s = now_s
        total = self._total = dataclasses.replace(load.amounts)
        self._anchor(load.received, now_s)
        if not self._follows_requests:
            self._drop_received(load.received, now_s)
            self.view.ttft_ratio = load.ttft_ratio
        place = None if load.received is None or self._base is None else load.received - self._base
        waiting = 0  # of its requests, prefills that the instance has received and of whose end no event has come
        for request in self._tracked.values():  # what has ended is in no report that comes now
            if place is not None and request.started_s is None and request.first_phase is _QUEUED:
                waiting += request.place <= place
            counted = request.phase_at(now_s, received=self._received(request, load.received, now_s))
            if counted is _PREFILLING:
                counted = _COMING  # see the top of this file
            now = request.phase_at(now_s)
            if counted is not now:
                count_request(total, request, now)
                count_request(total, request, counted, -1)
        # Requests of other senders hide some: then fewer are unannounced, never more.
        self._reported_place = place or 0
        self._unannounced = max(0, waiting - load.amounts.queued_prefills) if self._follows_requests else 0
        self._publish_prefills()
        self._publish_decodes()
        self._publish_rest(load)

    def restart(self) -> None:
        """Another process has replaced the instance: its reports start again; callers that follow requests end them."""
        self.reports.clear()
        if not self._follows_requests:
            self._tracked.clear()
            self._sent, self._base = 0, None

    def is_fresh(self, now_s: float, limit_s: float) -> bool:
        return self.reported_s is not None and now_s - self.reported_s <= limit_s

    def _is_reported_done(self, request: TrackedRequest) -> bool:
        """True if the last report has left out the prefill of ``request``, of which an event comes now; counts it."""
        if not self._unannounced or request.place > self._reported_place:
            return False
        if request.started_s is not None or request.first_phase is not _QUEUED:
            return False
        self._unannounced -= 1
        return True

    def _drop_received(self, received: int | None, now_s: float) -> None:
        gone = [key for key, request in self._tracked.items() if self._received(request, received, now_s)]
        for key in gone:
            del self._tracked[key]

    def _received(self, request: TrackedRequest, received: int | None, now_s: float) -> bool:
        age_s = now_s - request.sent_s
        if received is None or self._base is None:
            return age_s >= self._settle_s
        return request.place <= received - self._base or age_s >= LOST_S

    def _anchor(self, received: int | None, now_s: float) -> None:
        """Updates the base when the number of received requests of this sender is certain."""
        if received is None:
            self._base = None
            return
        waiting = [request for request in self._tracked.values() if request.started_s is None]
        on_their_way = sum(now_s - request.sent_s < self._settle_s for request in waiting)
        if self._base is None or not waiting:
            self._base = received - (self._sent - on_their_way)

    def _shift(self, request: TrackedRequest, before: Phase, after: Phase) -> None:
        if before is after:
            return
        total = self._total
        if after is not _ABSENT:
            count_request(total, request, after)
        if before is not _ABSENT:
            count_request(total, request, before, -1)
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
        waiting = view.waiting_decode_tokens = total.waiting_decode_tokens if total.waiting_decode_tokens > 0 else 0
        prefilling = total.prefilling_decode_tokens
        view.prefilling_decode_tokens = prefilling if prefilling < waiting else waiting

    def _publish_rest(self, load: InstanceLoad) -> None:
        view = self.view
        view.kv_used_tokens = load.kv_used_tokens
        if load.kv_capacity_tokens:
            view.kv_capacity_tokens = load.kv_capacity_tokens
        interval_s = load.token_interval_s
        view.token_interval_s = None if interval_s is None else self._clock.device_s(interval_s)
        if load.utilisation is not None:
            view.utilisation = min(1.0, max(0.0, load.utilisation))
        view.prefill_age_s = self._clock.device_s(load.prefill_age_s or 0.0)
