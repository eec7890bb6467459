"""What a request takes up while it is at its instances, entered and taken out in one place.

The ledger, the load trackers of its instances, the trials of their breakers, and the prefix index, which is told what
will be in their caches.
"""

from __future__ import annotations

from pla_sglang.fleet.router.control.observability.series import RouterSeries
from pla_sglang.fleet.router.control.requests.ledger import Ledger
from pla_sglang.fleet.router.control.requests.prompts import Prompts
from pla_sglang.fleet.router.control.requests.request_record import Attempt, MoveKind, RequestRecord
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.wire.inference import BY_ENDPOINT
from pla_sglang.load.tracker import Phase, TrackedRequest
from pla_sglang.policy.common.device_clock import DeviceClock

# Named once: see ``fast_enum``.
_QUEUED, _PREFILLING, _COMING = Phase.QUEUED, Phase.PREFILLING, Phase.COMING


class Booking:
    """``begin`` and ``end`` of attempts, whatever their cause.

    Attributes:
        series: of the router, where those who begin and end attempts count them.
        clock: of the devices, in whose time caches live.
    """

    def __init__(self, ledger: Ledger, prompts: Prompts, series: RouterSeries, clock: DeviceClock) -> None:
        self.ledger, self.prompts, self.series, self.clock = ledger, prompts, series, clock

    def begin(self, record: RequestRecord, prefill: Worker, decode: Worker, now_s: float) -> None:
        """The present attempt is about to be sent to these two, or to one that is both. It may be on trial there, and
        its prompt will be in the cache."""
        self.adopt(record, prefill, decode, now_s)
        attempt = record.present
        attempt.assigned_s = now_s
        for worker in attempt.workers():
            worker.breaker.start_trial(record.rid)
        self.note_prompt(record, prefill, now_s)

    def adopt(
        self, record: RequestRecord, prefill: Worker, decode: Worker, now_s: float, *, room: int | None = None
    ) -> None:
        """It is at these two: a former life of the control plane has sent it there. ``room``: that it has then."""
        attempt, view = record.present, record.view
        attempt.prefill, attempt.decode = prefill, decode
        whole = prefill is decode
        self.ledger.assign(record, [worker.number for worker in attempt.workers()], now_s, room=room)
        history = view.history_tokens(prefill.view)
        decodes_here = whole and BY_ENDPOINT[record.ask.endpoint].generates
        queued = TrackedRequest(view.input_tokens - history, history, now_s, _QUEUED, decodes_here=decodes_here)
        prefill.load.add_request(record.key, queued)
        if not whole:
            named = TrackedRequest(view.input_tokens, 0, now_s, _PREFILLING, decodes_here=True)
            decode.load.add_request(record.key, named)

    def end(self, record: RequestRecord, now_s: float) -> None:
        """The present attempt is over at its instances, a trial of their breakers too. So is the candidate."""
        if record.candidate is not None:
            self.end_at(record, record.candidate, now_s)
        self.end_at(record, record.present, now_s)

    def end_at(self, record: RequestRecord, attempt: Attempt, now_s: float) -> None:
        for worker in attempt.workers():
            worker.load.end_request((record.rid, attempt.number), now_s)
            worker.breaker.end_trial(record.rid)

    def begin_candidate(self, record: RequestRecord, tokens: int, now_s: float) -> None:
        """The candidate is about to be sent: its instance receives the KV cache of prompt and answer, ``tokens`` in
        all, or computes it again."""
        attempt = record.candidate
        assert attempt is not None and attempt.decode is not None
        target = attempt.decode
        attempt.assigned_s = now_s
        if attempt.how is MoveKind.REDO:
            history = record.view.history_tokens(target.view)
            booked = TrackedRequest(tokens - history, history, now_s, _QUEUED, decodes_here=True)
        else:
            booked = TrackedRequest(tokens, 0, now_s, _COMING, decodes_here=True)
        target.load.add_request((record.rid, attempt.number), booked)
        self.ledger.send_candidate(record)

    def note_prompt(
        self, record: RequestRecord, worker: Worker, now_s: float, *, answer_tokens: int | None = None
    ) -> None:
        """An instance has its prompt in its cache; see ``Prompts.note_use``."""
        self.prompts.note_use(record.prompt, worker.view, self.clock.device_s(now_s), answer_tokens)
