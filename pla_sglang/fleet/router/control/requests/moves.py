"""Moves of running requests, as policies order them: who carries them out, and which requests rest.

A request rests after every order, whatever comes of it, and after a move that came to nothing: without that a policy
would order the same move again at each of its ticks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from pla_sglang.common.checks import MILLI, Choice, Range, check_fields, knob
from pla_sglang.fleet.router.control.requests.request_record import STREAMING, RequestRecord
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState
from pla_sglang.fleet.router.wire.rids import find_rid
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.learned import LearnedPredictor
from pla_sglang.policy.common.survival import SurvivalPredictor
from pla_sglang.policy.interface.decisions import Migrate
from pla_sglang.policy.interface.fleet import InstanceView
from pla_sglang.policy.interface.remaining_length import NoPrediction, Oracle, RemainingPredictor
from pla_sglang.policy.runner import Refusal

STATED = "stated"  # by a bench, of its answers (``running_requests.py``); ``launch_router`` refuses it elsewhere
# What is known of answers to come.
LENGTHS: Mapping[str, Callable[[], RemainingPredictor]] = {
    "none": NoPrediction,
    "survival": SurvivalPredictor,
    "learned": LearnedPredictor,
    STATED: Oracle,
}
DISPATCH, PREFILLED = "dispatch", "prefilled"
COOL_DOWN_S = 10.0  # of device time, after a move that came to nothing
# Likewise, where its instance is to be empty: after the first one; then twice as long each time.
DRAIN_COOL_DOWN_S = 0.5
NO_MOVER, NOT_THERE = "nothing here can move requests", "it does not run at the source"


@dataclasses.dataclass(frozen=True)
class MoveKnobs:
    """Knobs of policies that move running requests. Times are device time."""

    interval_s: float = knob(
        0.5,
        "--move-interval-ms MS",
        "load-migration, star, combined: between two decisions about moves, in device time",
        allowed=Range(10, unit="ms"),
        scale=MILLI,
    )
    rest_s: float = knob(
        5.0,
        "--move-rest-ms MS",
        "how long a request stays put after a move or an order to move, in device time",
        allowed=Range(0, unit="ms"),
        scale=MILLI,
    )
    pause_s: float = knob(
        0.02,
        "--move-pause-ms MS",
        "predicted pause of a move, without the transfer of KV cache, in device time",
        allowed=Range(0, unit="ms"),
        scale=MILLI,
    )
    gain: float = knob(
        1.0,
        "--move-gain",
        "a request moves only where its answer gains so many times the predicted pause",
        allowed=Range(0),
    )
    lengths: str = knob(
        "none",
        f"--lengths {{{','.join(LENGTHS)}}}",
        "what policies that move requests know of answers to come; survival: the median by those that have ended; "
        "learned: what the instance predicts; stated: what header x-answer-tokens says, in benches only",
        allowed=Choice(tuple(LENGTHS)),
    )

    def __post_init__(self) -> None:
        check_fields(self)


# Moves the request of this id to this instance, for this reason. None: under way; otherwise why it cannot be.
MoveRequest = Callable[[str, Worker, str], str | None]


def note_failed_move(record: RequestRecord, now_s: float, clock: DeviceClock) -> None:
    """It rests. Failures are in a row where each follows shortly on the one before."""
    last_s = record.move_failed_s
    in_a_row = last_s is not None and now_s - last_s < 2 * clock.wall_s(COOL_DOWN_S)
    record.move_failed_s, record.moves_failed = now_s, record.moves_failed + 1 if in_a_row else 1


def rests_from_failure(record: RequestRecord, now_s: float, clock: DeviceClock) -> bool:
    """True if its last move has come to nothing a short while ago."""
    source = record.present.decode
    if record.move_failed_s is None or source is None:
        return False
    drains = source.state is WorkerState.DRAINING
    rest_s = min(COOL_DOWN_S, DRAIN_COOL_DOWN_S * 2 ** (record.moves_failed - 1)) if drains else COOL_DOWN_S
    return now_s - record.move_failed_s < clock.wall_s(rest_s)


class MoveOrders:
    """What policies order, and what came of it.

    Args:
        clock: wall seconds.
        device_clock: in whose seconds ``rest_s`` is.
        move_request: None: every order is refused.
        records: the open requests by id.
    """

    def __init__(
        self,
        rest_s: float,
        *,
        clock: Callable[[], float],
        device_clock: DeviceClock,
        find_worker: Callable[[InstanceView], Worker],
        records: Mapping[str, RequestRecord],
        move_request: MoveRequest | None,
    ) -> None:
        self.move_request, self.records = move_request, records
        self.ordered = 0
        self.refused: Counter[str] = Counter()  # by why
        self._rest_s = rest_s
        self._clock = clock
        self._device_clock = device_clock
        self._find_worker = find_worker

    def order_move(self, action: Migrate) -> Refusal | None:
        """Has the request moved, if it is where the policy has seen it."""
        rid, _ = find_rid(action.rid)  # to a policy the rest of an answer is a request of its own
        record = self.records.get(rid)
        if record is not None:
            record.rests_until_s = self._clock() + self._device_clock.wall_s(self._rest_s)
        if self.move_request is None:
            self.refused[NO_MOVER] += 1
            return Refusal.UNSUPPORTED
        if record is None or record.state is not STREAMING or not _is_at(record, action.source):
            self.refused[NOT_THERE] += 1
            return Refusal.NOT_MOVABLE
        why_not = self.move_request(rid, self._find_worker(action.target), action.reason.value)
        if why_not is not None:
            self.refused[why_not] += 1
            return Refusal.NOT_MOVABLE
        if record.candidate is not None:
            record.candidate.predicted_gain = action.gain
        self.ordered += 1
        return None

    def is_cooling_down(self, record: RequestRecord) -> bool:
        """True if a request is to stay where it is: it was ordered to move, or came there, a short while ago."""
        now_s = self._clock()
        if record.rests_until_s > now_s:
            return True
        if rests_from_failure(record, now_s, self._device_clock):
            return True
        joined_s = None if record.present.how is None else record.present.assigned_s
        return joined_s is not None and now_s - joined_s < self._device_clock.wall_s(self._rest_s)

    def count_cooling_down(self) -> int:
        """Requests that were ordered to move and rest."""
        now_s = self._clock()
        return sum(record.rests_until_s > now_s for record in self.records.values())

    def to_dict(self) -> dict[str, Any]:
        """For /pla/state."""
        return {
            "can_move": self.move_request is not None,
            "ordered": self.ordered,
            "refused": dict(self.refused),
            "resting": self.count_cooling_down(),
        }


def _is_at(record: RequestRecord, source: InstanceView) -> bool:
    decode = record.present.decode
    return decode is not None and decode.view is source
