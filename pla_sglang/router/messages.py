"""Messages between relays and the control plane (msgspec, as arrays: field order is part of the format).

Order of a request's messages, all from the relay that holds the client's connection unless said otherwise:

    Ask  ->  Assign | Refuse   (from control, at once or later)
         ->  Stage ...         (SENT, then PREFILL_DONE, FIRST_TOKEN as they happen)
         ->  Ended             (exactly once for every Ask, whatever happened, also where the answer was Refuse)

A relay may Ask again for the same rid (``attempt`` + 1) when it is certain that no instance has anything of the
request (any more) and its client has not got a byte; ``again`` says how that came. The control plane then takes the
former Assign back, and forgets its Stages. An ``Abort`` from control may cross ``Ended``: the relay ignores it.

Times ``*_s`` are CLOCK_MONOTONIC seconds, the same clock for all processes of a machine.
"""

from __future__ import annotations

import enum

import msgspec

PROTOCOL = 4  # raised with every change of a message; sides that disagree refuse each other


class Endpoint(enum.IntEnum):
    """What a request asks for; the path upstream is the client's own."""

    GENERATE = 0
    COMPLETIONS = 1
    CHAT = 2


class Leg(enum.IntEnum):
    """Which part of a request an instance serves; a unified instance has one leg, WHOLE."""

    WHOLE = 0
    PREFILL = 1
    DECODE = 2


class Step(enum.IntEnum):
    """Stages of a request's life after its dispatch."""

    SENT = 0  # every byte of the request is with the kernel, for all legs
    PREFILL_DONE = 1  # the prefill leg has answered completely
    FIRST_TOKEN = 2  # first byte of the answer's body that is forwarded to the client


class Outcome(enum.IntEnum):
    """How a request ended; each ends once."""

    OK = 0  # answered completely, whatever status the instance gave below 400
    CLIENT_ERROR = 1  # an instance answered 4xx, forwarded
    REFUSED = 2  # answered with the control plane's Refuse
    CLIENT_GONE = 3  # the client closed, reset, or read too slowly
    UPSTREAM_ERROR = 4  # an instance answered 5xx, forwarded
    UPSTREAM_LOST = 5  # an instance closed the connection, or could not be reached
    PREFILL_FAILED = 6  # the prefill leg failed or was aborted by its instance; decode was aborted
    TIMED_OUT = 7  # a time limit of the router
    ABORTED = 8  # by an Abort from control
    NO_CONTROL = 9  # the control plane did not answer in time
    DRAINED = 10  # the router stops, and its time for open requests is over


class FailureKind(enum.IntEnum):
    """Why an instance is reported; what a circuit breaker counts."""

    CONNECT = 0  # could not connect: nothing was sent
    LOST = 1  # connection ended before the answer did
    STATUS = 2  # answered 5xx
    TIMEOUT = 3
    BAD_ANSWER = 4  # not HTTP/1.1, or over the limits


class Again(enum.IntEnum):
    """Why a request is asked for again."""

    NOT_SENT = 0  # an instance could not be reached, so no byte was sent to any
    TRANSFER_FAILED = 1  # the KV did not get to decode; both instances have answered and hold nothing


class Prompts(enum.IntEnum):
    """What ``Ask`` must say about the prompt; the control plane chooses by what its policy needs."""

    ESTIMATE = 0  # input_tokens estimated from the body's size
    BODY = 1  # Ask.body holds the client's JSON body, so that control can tokenize or hash


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
        ttft_slo_ms, tpot_slo_ms: of the request's headers.
        tenant: header ``x-tenant-id``, else a short hash of the API key; None: neither.
        session: header ``x-session-id``.
        trace: W3C ``traceparent`` that goes to the instances.
        parent: makes the span that ``trace`` names the router's own: the id of the client's span, of which it is a
            child, or "" where it begins the trace. None: the router makes no span of this request.
        attempt: 1, or how many Asks there were for this rid.
        excluded: instances that a former attempt could not connect to.
        reached: former attempts that instances got; each has another id there (``body.rid_there``).
        again, detail: of an ``attempt`` above 1: why the former one is over, as a code and for people.
        body: the JSON body, with Prompts.BODY only.
        rids: the client's own names for the prompts of a batch, under which instances know them.
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
    again: Again = Again.NOT_SENT
    detail: str = ""
    body: bytes | None = None
    parent: str | None = None
    rids: tuple[str, ...] = ()


class Stage(Message, frozen=True):
    """A step in a request's life."""

    rid: str
    step: Step
    at_s: float


class Ended(Message, frozen=True):
    """The last message about a request.

    Attributes:
        status: HTTP status sent to the client; 0 where none was.
        output_bytes: of the answer's body, forwarded.
        events: SSE events forwarded, 0 for an answer that is no stream; a proxy of output tokens.
        first_s, last_s: first and last byte forwarded; None without any.
        aborted: instances that were told to abort this request.
        detail: for people: why, if not OK.
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


class Failure(Message, frozen=True):
    """An instance failed a relay; sent in addition to the request's own messages."""

    worker: int
    leg: Leg
    kind: FailureKind
    at_s: float
    rid: str = ""
    detail: str = ""


class OpenRequest(Message, frozen=True):
    """A request that is dispatched and open, as told to a control plane that has just started."""

    ask: Ask
    assign: Assign
    steps: tuple[Stage, ...]


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
    at_s: float
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


class Worker(Message, frozen=True):
    """Where an instance is. ``number`` is never reused.

    Attributes:
        kind: InstanceKind's value.
        listed: False: gets nothing new; requests that run there go on.
        api_key: sent as bearer token unless the client brought its own Authorization; empty: none.
        admin_key: sent with aborts; empty: ``api_key`` is.
    """

    number: int
    name: str
    host: str
    port: int
    kind: str
    listed: bool = True
    api_key: str = ""
    admin_key: str = ""


class Table(Message, frozen=True):
    """All instances, complete; sent on connect and at each change, always before an Assign that needs it.

    Attributes:
        epoch: of the control plane: another one means that it has restarted, and wants a Hello.
        version: grows with every change.
        serving: whether a request could be dispatched now (/health).
        trace_share: of requests without a ``traceparent``, those that begin a trace of spans; None: spans are off.
    """

    epoch: int
    version: int
    workers: tuple[Worker, ...]
    serving: bool
    prompts: Prompts = Prompts.ESTIMATE
    trace_share: float | None = None


class Beat(Message, frozen=True):
    """Once in ``BEAT_INTERVAL_S``: the control plane lives."""

    epoch: int
    at_s: float


class Assign(Message, frozen=True):
    """Where a request goes.

    Attributes:
        decode: the instance that answers the client; a unified instance where ``prefill`` is None.
        prefill: instance of the prefill leg; None: one leg.
        bootstrap_host, bootstrap_port, bootstrap_room: go into both bodies of a pair. SGLang gives each prompt of a
            batch the next room, so rooms of two requests must be further apart than the largest batch.
        decode_headers, prefill_headers: further headers for that leg, names in lower case.
        fields: JSON members to put in front of the body's own, such as ``"priority":3``; without outer commas.
    """

    rid: str
    attempt: int
    decode: int
    prefill: int | None = None
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    bootstrap_room: int = 0
    decode_headers: tuple[tuple[str, str], ...] = ()
    prefill_headers: tuple[tuple[str, str], ...] = ()
    fields: str = ""
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


class Abort(Message, frozen=True):
    """End an open request now: free both instances, answer the client with ``status`` or break its stream."""

    rid: str
    status: int
    code: str
    message: str


class AdminAnswer(Message, frozen=True):
    number: int
    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


BEAT_INTERVAL_S = 0.25

FromRelay = Ask | Stage | Ended | Failure | Hello | RelayReport | AdminAsk
FromControl = Table | Beat | Assign | Refuse | Abort | AdminAnswer
