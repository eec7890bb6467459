"""What a request adds to the load trackers of its instances. It is booked there by its id and its attempt."""

from __future__ import annotations

from pla_sglang.fleet.router.control.requests.pair_limits import decodes_after
from pla_sglang.fleet.router.control.requests.request_record import RequestRecord
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.wire.messages import MoveKind
from pla_sglang.load.tracker import Phase, TrackedRequest

_QUEUED, _PREFILLING, _COMING = Phase.QUEUED, Phase.PREFILLING, Phase.COMING  # named once: see ``fast_enum``
_REDO = MoveKind.REDO


def book_request(record: RequestRecord, prefill: Worker, decode: Worker, now_s: float) -> None:
    """It is about to be sent to these two, or to one that is both."""
    view = record.view
    history = view.history_tokens(prefill.view)
    whole = prefill is decode
    decodes_here = whole and decodes_after(record.ask)
    queued = TrackedRequest(view.input_tokens - history, history, now_s, _QUEUED, decodes_here=decodes_here)
    prefill.load.add_request(record.key, queued)
    if not whole:
        named = TrackedRequest(view.input_tokens, 0, now_s, _PREFILLING, decodes_here=True)
        decode.load.add_request(record.key, named)


def close_bookings(record: RequestRecord, now_s: float) -> None:
    """The present hop is over: at its instances, a trial of their breakers too. So is a pending one."""
    close_pending(record, now_s)
    for worker, _ in record.hop.workers():
        worker.load.end_request(record.key, now_s)
        worker.breaker.end_trial(record.rid)


def book_pending(record: RequestRecord, target: Worker, tokens: int, now_s: float) -> None:
    """``target`` is about to receive the KV cache of prompt and answer, ``tokens`` in all, or to compute it again."""
    assert record.pending is not None
    if record.pending.how is _REDO:
        history = record.view.history_tokens(target.view)
        booked = TrackedRequest(tokens - history, history, now_s, _QUEUED, decodes_here=True)
    else:
        booked = TrackedRequest(tokens, 0, now_s, _COMING, decodes_here=True)
    target.load.add_request(record.pending.key, booked)


def close_pending(record: RequestRecord, now_s: float) -> None:
    """Nothing comes of the pending hop, as far as there is one."""
    pending = record.pending
    if pending is not None and pending.decode is not None:
        pending.decode.load.end_request(pending.key, now_s)
