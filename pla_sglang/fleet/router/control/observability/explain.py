"""Why a request went where it went, and what its time to the first token was made of.

The stages lie end to end, so they add up to the TTFT:

    arrived ─ queue ─ decided ─ route ─ sent ─ prefill wait ─ prefill ─ done ─ transfer ─ first token ─ seen

Times between messages are measured. What lies between *sent* and *done* is one measured span; it is split by the
prefill time that the policy's predictor expects for the request alone, and so is what lies between *done* and *seen*
by the token interval of the decode instance. ``split`` says so. A unified instance reports no *done*: there the whole
span from *sent* to *seen* is wait and prefill.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pla_sglang.fleet.router.control.observability.move_gains import measure_moves
from pla_sglang.fleet.router.control.requests.request_record import Attempt, Placement, RequestRecord
from pla_sglang.fleet.router.control.workers.exclusions import Exclusion
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.length_errors import LengthPoint
from pla_sglang.policy.interface.fleet import InstanceView, RequestView
from pla_sglang.policy.pairs import PREFILLS, PairChoice

SHOWN_CANDIDATES = 8
FIRST_TRANSFER = "transfer_s has the set-up of the connection between these two instances; no prediction learns from it"
STAGES = ("queue_s", "route_s", "prefill_wait_s", "prefill_s", "transfer_s", "first_token_s")


def note_choice(
    record: RequestRecord,
    choice: PairChoice,
    ready: Sequence[InstanceView],
    clock: DeviceClock,
    *,
    predict_ttft_s: Callable[[RequestView, InstanceView], float] | None,
    excluded: Mapping[InstanceView, Exclusion],
    own_prefill_s: float | None,
) -> None:
    """What the policy chose, what it could have chosen, and what was kept from it. ``own_prefill_s`` and what views say
    is device time."""
    view, cached = record.view, record.view.cached

    def predict_s(instance: InstanceView) -> float | None:
        if predict_ttft_s is None or instance.kind not in PREFILLS:
            return None
        if instance is choice.prefill and choice.predicted_ttft_s is not None:
            return clock.wall_s(choice.predicted_ttft_s)
        return clock.wall_s(predict_ttft_s(view, instance))

    record.present.placement = Placement(
        choice,
        view.history_tokens(choice.prefill),
        clock.known_wall_s(view.predicted_ttft_s),
        clock.known_wall_s(own_prefill_s),
        clock.known_wall_s(choice.decode.token_interval_s),
        tuple(
            [
                (one.name, one.queued_tokens, cached.get(one.index, 0), predict_s(one))
                for one in ready[:SHOWN_CANDIDATES]
            ]
        ),
        tuple([(one.name, reason.value) for one, reason in excluded.items()]) if excluded else (),
    )


def stages(record: RequestRecord) -> dict[str, float] | None:
    """As ``stage_seconds``, by name."""
    seconds = stage_seconds(record)
    return None if seconds is None else dict(zip(STAGES, seconds, strict=True))


def stage_seconds(record: RequestRecord) -> tuple[float, float, float, float, float, float] | None:
    """Seconds by stage, in the order of ``STAGES``; their sum is the TTFT. None before the first token.

    Reports of several processes may cross; a time that would lie before its predecessor is taken to be at it.
    """
    attempt = record.shown_attempt
    if attempt.first_token_s is None:
        return None
    arrived_s, placement = record.ask.arrived_s, attempt.placement
    own_s = None if placement is None else placement.own_prefill_s
    interval_s = None if placement is None else placement.token_interval_s
    seen_s = max(attempt.first_token_s, arrived_s)
    decided_s = _between(arrived_s, attempt.assigned_s, seen_s)
    sent_s = _between(decided_s, attempt.sent_s, seen_s)
    done_s = seen_s
    if attempt.prefill_done_s is not None and placement is not None and attempt.decode is not attempt.prefill:
        done_s = _between(sent_s, attempt.prefill_done_s, seen_s)
    prefill_s = done_s - sent_s if own_s is None else min(done_s - sent_s, own_s)
    last_s = min(seen_s - done_s, interval_s or 0.0)
    return (
        decided_s - arrived_s,
        sent_s - decided_s,
        done_s - sent_s - prefill_s,
        prefill_s,
        seen_s - done_s - last_s,
        last_s,
    )


def _between(low_s: float, time_s: float | None, high_s: float) -> float:
    if time_s is None or time_s < low_s:
        return low_s
    return time_s if time_s < high_s else high_s


class ExplainStore:
    """The latest records, the oldest forgotten first.

    Args:
        wall_s, clock: seconds of the day's clock and of that of the records, at one time.
    """

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        wall_s: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._wall_s, self._clock = wall_s, clock
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def add(self, record: RequestRecord) -> None:
        records = self._records
        if record.rid in records:
            records.move_to_end(record.rid)
        records[record.rid] = record
        if len(records) > self._capacity:
            records.popitem(last=False)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records.values())

    def explain(self, rid: str) -> dict[str, Any] | None:
        """Everything about a request; None if it is not known (any more)."""
        record = self._records.get(rid)
        return None if record is None else explain(record, offset_s=self._wall_s() - self._clock())


def wall_times(record: RequestRecord, offset_s: float) -> dict[str, str | None]:
    """The times of a request by the clock of the day, UTC. ``offset_s``: from the clock of records to that one."""
    attempt = record.shown_attempt
    times = {
        "arrived": record.ask.arrived_s,
        "decided": attempt.assigned_s,
        "sent": attempt.sent_s,
        "prefill_done": attempt.prefill_done_s,
        "first": attempt.first_token_s,
        "ended": record.present.ended_s,
    }
    return {name: None if at_s is None else _utc_text(at_s + offset_s) for name, at_s in times.items()}


def _utc_text(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def explain(record: RequestRecord, *, offset_s: float) -> dict[str, Any]:
    """For /pla/explain; ``offset_s`` as in ``wall_times``. Fields that end with ``_s`` are of the records' clock."""
    attempt, end = record.shown_attempt, record.end
    placement, choice = attempt.placement, attempt.choice
    candidates = () if placement is None else placement.candidates
    explained: dict[str, Any] = {
        "rid": record.rid,
        "times": wall_times(record, offset_s),
        "arrived_s": record.ask.arrived_s,
        "tenant": record.tenant,
        "input_tokens": record.prompt.tokens,
        "exact_tokens": record.prompt.exact,
        "cached_tokens": 0 if placement is None else placement.cached_tokens,
        "slo_ttft_s": record.ttft.slo_s,
        "slo_tpot_s": record.tpot.slo_s,
        "slo_from": {"ttft": record.ttft.source, "tpot": record.tpot.source},
        "admission": record.admission,
        "reason": "" if choice is None else choice.reason.value,
        "placement": "" if choice is None else choice.placement.value,
        "prefill": None if choice is None else choice.prefill.name,
        "decode": None if choice is None else choice.decode.name,
        "placed_s": None if placement is None else placement.placed_s,
        "placed_on": None if placement is None else placement.placed_on,
        "room": attempt.room,
        "predicted_ttft_s": None if placement is None else placement.predicted_ttft_s,
        "own_prefill_s": None if placement is None else placement.own_prefill_s,
        "token_interval_s": None if placement is None else placement.token_interval_s,
        "actions": () if choice is None else [f"{type(one).__name__}:{one.reason.value}" for one in choice.actions],
        "policy_predicts": any(predicted_s is not None for *_, predicted_s in candidates),
        "candidates": {
            name: {"queued_tokens": queued, "cached_tokens": cached, "predicted_ttft_s": predicted_s}
            for name, queued, cached, predicted_s in candidates
        },
        "excluded": {} if placement is None else dict(placement.excluded),
        "decided_s": attempt.assigned_s,
        "sent_s": attempt.sent_s,
        "done_s": attempt.prefill_done_s,
        "first_s": attempt.first_token_s,
        "ended_s": record.present.ended_s,
        "end": None if end is None else end.outcome.label,
        "status": 0 if end is None else end.status,
        "output_tokens": None if end is None else end.output_tokens,
        "exact_output": end is not None and end.exact_tokens,
        "detail": "" if end is None else end.detail,
        "attempts": [describe_attempt(one) for one in record.attempts],
        "moves": [move.to_dict() for move in measure_moves(record)],
    }
    return explained | explain_first_token(record)


def explain_lengths(points: Iterable[LengthPoint], output_tokens: int | None) -> list[dict[str, float | None]]:
    """What was predicted of an answer when. ``output_tokens``: that it has come to; None: it runs."""
    rows = []
    for point in points:
        known = {
            "at_s": point.at_s,
            "generated": point.generated,
            "predicted_tokens": point.remaining,
            "constant_tokens": point.constant,
            "left_tokens": None if output_tokens is None else output_tokens - point.generated,
        }
        rows.append({name: None if value != value else value for name, value in known.items()})  # nan: not known
    return rows


def explain_first_token(record: RequestRecord) -> dict[str, Any]:
    """The stages before it; empty where there was none."""
    attempt, seconds = record.shown_attempt, stages(record)
    if seconds is None or attempt.first_token_s is None:
        return {}
    explained: dict[str, Any] = {
        "ttft_s": max(attempt.first_token_s, record.ask.arrived_s) - record.ask.arrived_s,
        "stages": seconds,
    }
    if attempt.first_transfer:
        explained["first_transfer"] = FIRST_TRANSFER
    explained["split"] = {"prefill_wait_s, prefill_s": "predicted", "transfer_s, first_token_s": "predicted"}
    return explained


def describe_attempt(attempt: Attempt) -> dict[str, Any]:
    """One of all, those that came to nothing included."""
    return {
        "attempt": attempt.number,
        "cause": attempt.cause,
        "how": None if attempt.how is None else attempt.how.value,
        "state": attempt.state.value,
        "delivered_tokens": attempt.delivered_tokens,
        "gap_s": attempt.gap_s,
        "kv_tokens": attempt.kv_tokens,
        "prefill": None if attempt.prefill is None else attempt.prefill.view.name,
        "decode": None if attempt.decode is None else attempt.decode.view.name,
        "decided_s": attempt.assigned_s,
        "first_s": attempt.first_token_s,
        "ended_s": attempt.ended_s,
        "over": None if attempt.over is None else attempt.over.cause.label,
        "detail": attempt.failure if attempt.over is None else attempt.over.detail,
    }
