"""Messages between relays and the control plane (msgspec, as arrays: field order is part of the format).

Order of a request's messages, all from the relay that holds the client's connection unless said otherwise:

    Ask  ->  Assign | Refuse   (from control, at once or later)
         ->  Progress ...      (SENT, then PREFILL_DONE, FIRST_TOKEN as they happen)
         ->  Ended             (exactly once for every Ask, whatever happened, also where the answer was Refuse)

A *hop* is one stay of a request at its instances; the first is that of its Assign. With ``--migration on``:

         ->  Lost              (the hop is over before the answer is)
    Continue | End             (from control: where it goes on, if anywhere)
         ->  Joined            (the next hop is the answer from here on)

A request that runs is moved: control holds it at its instance, and then

    Continue(pull)             (from control)
         ->  Joined | Lost     (of the hop that Continue has named; after Lost the present one goes on)

A relay may Ask again for the same rid (``attempt`` + 1) when it is certain that no instance holds anything of the
request (any more) and its client has not received a byte; ``retry_reason`` says why. The control plane then rolls the
former Assign back and forgets its Progress. An ``Abort`` from control may cross ``Completed``: the relay ignores it.

Times ``*_s`` are CLOCK_MONOTONIC seconds, the same clock for all processes of a machine.
"""

from __future__ import annotations

import msgspec

from pla_sglang.fleet.router.wire.codes import Endpoint as Endpoint
from pla_sglang.fleet.router.wire.codes import FailureKind as FailureKind
from pla_sglang.fleet.router.wire.codes import Leg as Leg
from pla_sglang.fleet.router.wire.codes import LossReason as LossReason
from pla_sglang.fleet.router.wire.codes import Milestone as Milestone
from pla_sglang.fleet.router.wire.codes import MoveKind as MoveKind
from pla_sglang.fleet.router.wire.codes import Outcome as Outcome
from pla_sglang.fleet.router.wire.codes import PromptDetail as PromptDetail
from pla_sglang.fleet.router.wire.codes import RetryReason as RetryReason

PROTOCOL = 15  # raised with every change of a message; sides that disagree refuse each other


# -- relay to control --------------------------------------------------------------------------------------------------


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Base of all messages: an array whose first item is the name of the class."""


class Ask(Message, frozen=True):
    """A request that wants to be dispatched.

    Attributes:
        rid: unique; given by the client in the body, else by the relay. Also the rid at the instances.
        relay: number of the relay, from 0.
        arrived_s: when the head of the request was complete.
        body_bytes: size of the body.
        input_tokens: estimate of the prompt's length over all prompts of a batch; exact where ``exact_tokens``.
        prompts: how many prompts the body holds (estimate; at least 1).
        samples: ``n`` of the request.
        output_tokens: max_tokens where given.
        answer_tokens: header ``x-answer-tokens``: how long the answer will be, as benches know it.
        ttft_slo_ms, tpot_slo_ms: of the request's headers.
        tenant: header ``x-tenant-id``, else a short hash of the API key; None: neither.
        session: header ``x-session-id``.
        trace: W3C ``traceparent`` that goes to the instances.
        parent: makes the span that ``trace`` names the router's own: the id of the client's span, of which it is a
            child, or "" where it begins the trace. None: the router makes no span of this request.
        attempt: 1, or how many Asks there were for this rid.
        excluded: instances that a former attempt could not connect to.
        refused_by: instances that refused a former attempt for load; the last one's answer is kept for the client.
        reached: former attempts that instances got; each has another id there (``rids.rid_at_instance``).
        retry_reason, detail: of an ``attempt`` above 1: why the former one is over, as a code and for people.
        body: the JSON body, with PromptDetail.BODY only.
        rids: the client's own names for the prompts of a batch, under which instances know them.
        adapter: the LoRA adapter that it names.
        continues_session: it has ``session_params``, of a session that one instance keeps.
    """

    rid: str
    relay: int
    endpoint: Endpoint
    stream: bool
    arrived_s: float
    body_bytes: int
    input_tokens: int
    exact_tokens: bool = False
    prompts: int = 1
    samples: int = 1
    output_tokens: int | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    priority: int | None = None
    tenant: str | None = None
    session: str | None = None
    trace: str = ""
    attempt: int = 1
    excluded: tuple[int, ...] = ()
    reached: int = 0
    retry_reason: RetryReason = RetryReason.NOT_SENT
    detail: str = ""
    body: bytes | None = None
    parent: str | None = None
    rids: tuple[str, ...] = ()
    refused_by: tuple[int, ...] = ()
    answer_tokens: int | None = None
    adapter: str | None = None
    continues_session: bool = False


class Progress(Message, frozen=True):
    """A request has reached a milestone. ``movable``: its stream carries its token ids, and can go on elsewhere."""

    rid: str
    milestone: Milestone
    at_s: float
    movable: bool = False


class Lost(Message, frozen=True):
    """A hop is over and the answer is not: where does it go on? Said again to a control plane that has just started.

    Of a hop beyond the present one: it has come to nothing, and the present one goes on.

    Attributes:
        hop: counts from 1.
        tokens: of the answer, that the client has; 0 also where it has nothing at all.
        why, detail: as a code and for people.
        shown: the client has got something of the answer, be it only its first event without a token.
        killed: instances that were lost with this request, the last one included.
        avoided: instances that could not be reached or have refused this request.
    """

    rid: str
    hop: int
    tokens: int
    why: LossReason
    at_s: float
    shown: bool = False
    killed: tuple[int, ...] = ()
    avoided: tuple[int, ...] = ()
    detail: str = ""


class Joined(Message, frozen=True):
    """The first event of a hop beyond the first is there. ``gap_s``: since the client has got the event before it."""

    rid: str
    hop: int
    at_s: float
    gap_s: float


class Completed(Message, frozen=True):
    """The last message about a request.

    Attributes:
        status: HTTP status sent to the client; 0 where none was.
        output_bytes: of the answer's body, forwarded.
        events: SSE events forwarded, 0 for an answer that is no stream.
        first_s, last_s: first and last byte forwarded; None without any.
        aborted: instances that were told to abort this request.
        detail: for people: why, if not OK.
        output_tokens: over all answers to the request, as the instance says; without ``exact_tokens`` it has not said,
            and this is ``events``.
        cached_tokens: of the prompt, as the instance says; None: it has not said. With several answers that of one.
    """

    rid: str
    outcome: Outcome
    status: int
    at_s: float
    output_bytes: int = 0
    events: int = 0
    first_s: float | None = None
    last_s: float | None = None
    aborted: tuple[int, ...] = ()
    detail: str = ""
    output_tokens: int = 0
    exact_tokens: bool = False
    cached_tokens: int | None = None


class Failure(Message, frozen=True):
    """An instance failed a relay; sent in addition to the request's own messages."""

    worker: int
    kind: FailureKind
    detail: str = ""
    rid: str = ""


class OpenRequest(Message, frozen=True):
    """A request that is dispatched and open, as told to a control plane that has just started.

    Attributes:
        assign: of the present hop, or of the last one where it is ``lost`` and no next one is known.
        hop, tokens: as in ``Lost``.
        lost: a ``Lost`` for this hop is without answer, and follows again.
    """

    ask: Ask
    assign: Assign
    progress: tuple[Progress, ...]
    hop: int = 1
    tokens: int = 0
    lost: bool = False


class Hello(Message, frozen=True):
    """First message to a control plane, again whenever its ``epoch`` changes. ``open`` is complete."""

    relay: int
    protocol: int
    pid: int
    open: tuple[OpenRequest, ...] = ()


class RelayReport(Message, frozen=True):
    """A relay's own counters and gauges, once a second; control exports them with the label ``relay``.

    ``counters`` only grow; a name may carry labels in Prometheus form: ``bad_requests_total{reason="head"}``.
    """

    relay: int
    counters: dict[str, float]
    gauges: dict[str, float]


class AdminAsk(Message, frozen=True):
    """A request for content that only the control plane has: /workers, /pla/*, /metrics.

    The relay has checked the admin key. ``path`` is without the query; ``query`` without "?".
    """

    number: int
    relay: int
    method: str
    path: str
    query: str
    body: bytes


# -- control to relay --------------------------------------------------------------------------------------------------


class WorkerEntry(Message, frozen=True):
    """Where an instance is. ``number`` is never reused.

    Attributes:
        kind: InstanceKind's value.
        listed: False: gets nothing new; requests that run there go on.
        api_key: sent as bearer token unless the client brought its own Authorization; empty: none.
        admin_key: sent with aborts; empty: ``api_key`` is.
        hops: its streams can carry their token ids, and go on where another instance's have ended.
        router_key: sent with each request, so that the instance knows it for the router's; empty: none.
    """

    number: int
    name: str
    host: str
    port: int
    kind: str
    listed: bool = True
    api_key: str = ""
    admin_key: str = ""
    hops: bool = False
    router_key: str = ""


class Table(Message, frozen=True):
    """All instances, complete; sent on connect and at each change, always before an Assign that needs it.

    Attributes:
        epoch: of the control plane: another one means that it has restarted, and wants a Hello.
        version: grows with every change.
        serving: whether a request could be dispatched now (/health).
        trace_share: of requests without a ``traceparent``, those that begin a trace of spans; None: spans are off.
        migration: requests may go on at another instance.
    """

    epoch: int
    version: int
    workers: tuple[WorkerEntry, ...]
    serving: bool
    prompts: PromptDetail = PromptDetail.ESTIMATE
    trace_share: float | None = None
    migration: bool = False


class Heartbeat(Message, frozen=True):
    """The control plane is alive; sent every ``HEARTBEAT_INTERVAL_S``."""


class Assign(Message, frozen=True):
    """Where a request goes.

    Attributes:
        decode: the instance that answers the client; a unified instance where ``prefill`` is None.
        prefill: instance of the prefill part; None: one leg.
        bootstrap_host, bootstrap_port, bootstrap_room: go into both bodies of a pair. SGLang gives each prompt of a
            batch the next room, so rooms of two requests must be further apart than the largest batch.
    """

    rid: str
    attempt: int
    decode: int
    prefill: int | None = None
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    bootstrap_room: int = 0
    reason: str = ""


class Refuse(Message, frozen=True):
    """The request is answered here: 429 with Retry-After under hard limits, 503 while nobody is ready.

    ``code`` is the error's type in the JSON answer; ``message`` is for people.
    """

    rid: str
    attempt: int
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class Continue(Message, frozen=True):
    """Where and how a request goes on: the next hop.

    Attributes:
        hop: its number; above that of the present one.
        target: the instance that goes on.
        reached: as in ``Ask``: under which id it goes on there.
        reason: why there, as in ``Assign``.
        tokens: of the answer, that the request is held behind: the relay waits until it has them.
        source: where it is held, of one that moves.
        bootstrap_host, bootstrap_port, bootstrap_room: of that, and the room, where its KV cache is pulled.
    """

    rid: str
    hop: int
    target: int
    how: MoveKind
    reached: int
    reason: str = ""
    tokens: int = 0
    source: int | None = None
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    bootstrap_room: int = 0


class NoNextHop(Message, frozen=True):
    """There is no next hop behind ``hop``; the request ends as if it could not move. ``message``: why, for people."""

    rid: str
    hop: int
    message: str


class Abort(Message, frozen=True):
    """End an open request now: free both instances, answer the client with ``status`` or break its stream.

    ``worker``: the instance that is dead, where that is why: a request that can go on elsewhere is ``Lost`` instead.
    ``silent``: it says nothing and may be alive: a request that cannot go on elsewhere, or gets something, stays there.
    """

    rid: str
    status: int
    code: str
    message: str
    worker: int | None = None
    silent: bool = False


class AdminResponse(Message, frozen=True):
    number: int
    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


HEARTBEAT_INTERVAL_S = 0.25

FromRelay = Ask | Progress | Lost | Joined | Completed | Failure | Hello | RelayReport | AdminAsk
FromControl = Table | Heartbeat | Assign | Refuse | Continue | NoNextHop | Abort | AdminResponse
