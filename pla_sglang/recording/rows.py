"""The lines of a recording (msgspec, one JSON object a line, distinguished by ``type``).

A recording begins with ``Header``. All later lines are in order of time: changes of views before
the decision that used them, reports to the policy in between. Times are seconds of the recorder's clock.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pla_sglang.common.errors import PlaError
from pla_sglang.policy.interface.decisions import (
    Dispatch,
    FleetAction,
    Hold,
    MeasuredPass,
    Migrate,
    Placement,
    ScaleTo,
    SetLengthClass,
    SetRole,
)

SET_ROLE = "set_role"
# 1: without the epochs of roles; 2: without running requests; 3: without moves; 4: without step times and caches;
# 5: without the ends of requests, states of workers, a planner's looks, the time of day and the engines; 6: without the
# chunks of instances.
VERSION = 7


class RecordError(PlaError, ValueError):
    """A recording cannot be read or replayed; the message names the file and the line."""


class Row(msgspec.Struct, tag_field="type", tag=str.lower, omit_defaults=True):
    """Base of all lines."""


class RecordedEngine(msgspec.Struct, omit_defaults=True):
    """How the engines were started, as the first one says: what a simulation of the fleet needs beside the setup.

    ``order``: of prefills, ``temporal`` or SGLang's ``--schedule-policy``. ``chunk_tokens``: None: prompts are not cut.
    """

    order: str = "fcfs"
    chunk_tokens: int | None = None
    mixed: bool = False
    slots: int | None = None
    decode_interval: int = 0
    deadlines: str = "advise"


class Header(Row):
    """The policy's construction.

    Attributes:
        setup: the fields of ``policy.registry.Setup`` that are plain values.
        time_scale: of the devices.
        device_time: all times are those of the device; else, as policies once had them, of the wall, and the steps of
            the profile are to be taken ``time_scale`` times as long.
        clock_start_s: when the clock of the wall was 0, in seconds since 1970 (UTC); None: it is not known.
        engine: None in recordings of former versions.
    """

    policy: str
    profile: str
    setup: dict[str, Any]
    time_scale: float = 1.0
    version: int = 1
    device_time: bool = False
    clock_start_s: float | None = None
    engine: RecordedEngine | None = None


class Views(Row):
    """Changed fields by index of the instance; its first line has all fields that differ from their default.

    ``startup_s``: that of the fleet, where it is known.
    """

    now_s: float
    changed: dict[int, dict[str, Any]]
    startup_s: float | None = None


class Arrival(Row):
    """``on_arrival``; fields as in ``RequestView``."""

    now_s: float
    rid: str
    input_tokens: int
    arrival_s: float
    cached: dict[int, int] = {}
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    output_tokens: float | None = None
    session: str | None = None


class RecordedDecision(msgspec.Struct, omit_defaults=True):
    """A decision as plain values, equal in two identical runs. Instances are indices."""

    reason: str = ""
    prefill: int | None = None
    decode: int | None = None
    predicted_ttft_s: float | None = None
    actions: tuple[tuple[Any, ...], ...] = ()


class Dispatched(Row):
    """``dispatch``. ``cached`` if it has changed since the arrival; ``hidden``: instances kept from the policy."""

    now_s: float
    rid: str
    answer: RecordedDecision
    cached: dict[int, int] | None = None
    hidden: tuple[int, ...] = ()


class Placed(Row):
    """``place_decode``; ``prefilled_on`` as the policy saw it, ``hidden`` as in ``Dispatched``."""

    now_s: float
    rid: str
    prefilled_on: int | None
    answer: RecordedDecision
    hidden: tuple[int, ...] = ()


class RecordedBatch(msgspec.Struct, omit_defaults=True):
    """A ``DecodeBatch``. Of each request: its id, KV tokens, tokens still to come, and whether it may be moved."""

    requests: tuple[tuple[str, int, float | None, bool], ...] = ()
    unlisted_requests: int = 0
    unlisted_tokens: int = 0


class Running(Row):
    """Running requests by index of the instance, as the controller saw them whose line is the next; those that have
    changed since they were last read."""

    now_s: float
    batches: dict[int, RecordedBatch]


class Ticked(Row):
    """``tick`` of the controller with this place in ``PolicySet.controllers``."""

    now_s: float
    controller: int
    answer: RecordedDecision


class Moved(Row):
    """A request goes on at another instance: what came of an order, or of a loss. No policy is told of it as such.

    Attributes:
        source, target: indices of instances.
        how: pull or redo.
        kv_bytes: that went from one to the other, by the profile.
        pause_s: of its client.
    """

    now_s: float
    rid: str
    source: int
    target: int
    how: str
    reason: str
    kv_bytes: int
    pause_s: float


class WorkerChanged(Row):
    """The router has another state for an instance, and why, in its own words: those of views are fewer. It stands
    before the change of the view that it leads to, if it does."""

    now_s: float
    instance: int
    state: str
    reason: str


class Planned(Row):
    """What a planner saw and wanted since the last such line: parts of a ``PlanLog``, its times in device seconds.

    Attributes:
        plans: time, instances there would be, and figure -> load, forecast, and whose that is.
        fleet: time, instances that are ready, starting and draining, and GPU-hours so far, of wall time.
        starts: ordered, ended, outcome.
    """

    now_s: float
    plans: tuple[tuple[float, int, dict[str, tuple[float | None, float | None, str | None]]], ...] = ()
    fleet: tuple[tuple[float, int, int, int, float], ...] = ()
    starts: tuple[tuple[float, float, str], ...] = ()


class Ended(Row):
    """How a request has ended for its client. No policy is told of it as such: see ``Finish``.

    Attributes:
        end: as in ``pla_router_requests_total``.
        failed: its client was owed an answer and did not get one, or not all of it.
        ttft_s, tpot_s: arrival to first token, and mean time per output token; None: it has none.
        ttft_met, tpot_met: its targets; None: it says nothing of them.
    """

    now_s: float
    rid: str
    end: str
    failed: bool
    output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_met: bool | None = None
    tpot_met: bool | None = None


class Prefilled(Row):
    """``on_prefill``."""

    now_s: float
    instance: int
    new_tokens: int
    attention: int
    history_tokens: int
    requests: int
    duration_s: float
    steps: tuple[MeasuredPass, ...] = ()


class FirstToken(Row):
    """``on_first_token``; ``predicted_ttft_s`` as the request carried it."""

    now_s: float
    rid: str
    instance: int
    predicted_ttft_s: float | None = None


class Interval(Row):
    """``on_token_interval``."""

    now_s: float
    instance: int
    interval_s: float


class Finish(Row):
    """``on_finish``."""

    now_s: float
    rid: str
    output_tokens: int


Line = (
    Header
    | Views
    | Arrival
    | Dispatched
    | Placed
    | Running
    | Ticked
    | Moved
    | Ended
    | WorkerChanged
    | Planned
    | Prefilled
    | FirstToken
    | Interval
    | Finish
)  # what a file may hold


def plain_action(action: FleetAction) -> tuple[Any, ...]:
    """An action as a tuple of plain values."""
    reason = action.reason.value
    match action:
        case SetRole():
            return (SET_ROLE, reason, action.instance.index, action.role.value, action.epoch)
        case SetLengthClass():
            length_class = None if action.length_class is None else action.length_class.value
            return ("set_length_class", reason, action.instance.index, length_class)
        case Migrate():
            return ("migrate", reason, action.rid, action.source.index, action.target.index, action.tokens)
        case ScaleTo():
            drain = [instance.index for instance in action.drain]
            return ("scale_to", reason, action.role.value, action.count, action.start, drain)
        case Hold():
            return ("hold", reason)


def answer_of(decision: Dispatch | Placement | list[FleetAction]) -> RecordedDecision:
    """The answer of a dispatcher or a controller as plain values."""
    if isinstance(decision, list):
        return RecordedDecision(actions=tuple(map(plain_action, decision)))
    actions = tuple(map(plain_action, decision.actions))
    decode = None if decision.decode is None else decision.decode.index
    if isinstance(decision, Placement):
        return RecordedDecision(decision.reason.value, None, decode, None, actions)
    prefill = None if decision.prefill is None else decision.prefill.index
    return RecordedDecision(decision.reason.value, prefill, decode, decision.predicted_ttft_s, actions)


def normal(answer: RecordedDecision) -> RecordedDecision:
    """The decision in the form that a file gives back: lists inside actions, numbers of one type."""
    return msgspec.json.decode(msgspec.json.encode(answer), type=RecordedDecision)
