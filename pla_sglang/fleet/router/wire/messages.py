"""Messages between relays and the control plane (msgspec, as arrays: field order is part of the format).

A request is a list of *attempts*: stays at an instance, or at a prefill and a decode instance. The control plane
numbers them from 1 on, and no number comes twice. Order of a request's messages, all from the relay that holds the
client's connection unless said otherwise:

    Ask  ->  Assign | Refuse   (from control, at once or later)
         ->  Progress ...      (SENT, then PREFILL_DONE, FIRST_TOKEN as they happen)
         ->  Completed         (exactly once for every request, whatever happened, also where the answer was Refuse)

Where an attempt is over before the answer is, the relay asks again: the same question, with what has become of the
attempt (``Ask.over``). The next one begins behind what the client has of the answer.

A request that runs is moved: the control plane holds it at its instance, and then

    Assign(held_tokens)        (from control: the next attempt is tried while the present one is held)
         ->  Progress(FIRST_TOKEN) of it: the answer comes from there from here on
          |  Dropped: nothing comes of it, and the present one goes on

An ``Abort`` from control may cross ``Completed``: the relay ignores it. Times ``*_s`` are CLOCK_MONOTONIC seconds, the
same clock for all processes of a machine.
"""

from __future__ import annotations

import enum
from typing import Self

import msgspec

PROTOCOL = 18  # raised with every change of a message; sides that disagree refuse each other


# -- what may be said, in codes ----------------------------------------------------------------------------------------


class Endpoint(enum.IntEnum):
    """What a request asks for, one for each path (``inference``); the path upstream is the client's own."""

    GENERATE = 0
    COMPLETIONS = 1
    CHAT = 2
    INVOCATIONS = 3
    RESPONSES = 4
    MESSAGES = 5
    OLLAMA_CHAT = 6
    OLLAMA_GENERATE = 7
    EMBEDDINGS = 8
    ENCODE = 9
    CLASSIFY = 10
    CLASSIFICATIONS = 11
    SCORE = 12
    RERANK = 13


class Milestone(enum.IntEnum):
    """What a relay reports of a dispatched request."""

    SENT = 0  # every byte of the request is with the kernel, for all legs
    PREFILL_DONE = 1  # the prefill part has answered completely
    FIRST_TOKEN = 2  # first byte of the answer's body that is forwarded to the client


class LabelledCode(enum.IntEnum):
    """A code whose ``label`` is the word for it in metrics and pages."""

    label: str

    def __new__(cls, number: int, label: str) -> Self:
        member = int.__new__(cls, number)
        member._value_, member.label = number, label
        return member


class Outcome(LabelledCode):
    """How a request ended; each request has exactly one outcome.

    A relay reports what it saw; those in the second group are known to the control plane alone. Some have one label.
    """

    OK = 0, "finished"  # answered completely, whatever status the instance gave below 400
    CLIENT_ERROR = 1, "finished"  # an instance answered 4xx, forwarded
    REFUSED = 2, "refused"  # answered with the control plane's Refuse
    CLIENT_GONE = 3, "client_gone"  # the client closed, reset, or read too slowly
    UPSTREAM_ERROR = 4, "upstream_error"  # an instance answered 5xx, forwarded
    UPSTREAM_LOST = 5, "upstream_error"  # an instance closed the connection, or could not be reached
    PREFILL_FAILED = 6, "prefill_aborted"  # the prefill part failed or was aborted by its instance; decode was aborted
    TIMED_OUT = 7, "timeout"  # a time limit of the router
    ABORTED = 8, "decode_aborted"  # by an Abort from control
    NO_CONTROL = 9, "timeout"  # the control plane did not answer in time
    DRAINED = 10, "router_drain"  # the router stops, and its time for open requests is over
    INSTANCE_REFUSED = 15, "instance_refused"  # an instance said 429 or 503, also inside a stream; forwarded

    NO_INSTANCE = 11, "no_instance"  # refused: no instance became ready in time
    FAULT = 12, "fault"  # refused: the router itself failed on it
    INSTANCE_DEAD = 13, "instance_dead"
    RELAY_LOST = 14, "relay_lost"  # the relay process that held its sockets is gone


class FailureKind(enum.IntEnum):
    """Why an instance is reported. A circuit breaker counts CONNECT, LOST, TIMEOUT and BAD_ANSWER."""

    CONNECT = 0  # could not connect: nothing was sent
    LOST = 1  # connection ended before the answer began
    STATUS = 2  # answered 5xx, as status or inside a stream: its health is to be checked
    TIMEOUT = 3
    BAD_ANSWER = 4  # not HTTP/1.1, or over the limits
    FULL = 5  # refused a request for load (429, 503), as status or inside a stream: it is well
    BROKEN = 6  # connection ended behind the head of an answer: it may be the request, so its health is to be checked


class Cause(LabelledCode):
    """Why an attempt is over before the answer is, and so the cause of the next one."""

    NOT_SENT = 0, "not_sent"  # an instance could not be reached, so no byte was sent to any
    TRANSFER_FAILED = 1, "transfer_failed"  # the KV did not get to decode; both instances hold nothing
    FULL = 2, "full"  # its instance refused it for load, before it did anything
    LOST = 3, "lost"  # its instance was lost after the request was sent
    BROKEN = 4, "broken"  # its connection ended behind the head of its answer: its instance may be well
    ABORTED = 5, "aborted"  # its instance has given it up: nobody had ordered that, nor had the request caused it
    REFUSED = 6, "refused"  # its instance answered with another error, before its first event
    RESUMED = 7, "resumed"  # the attempt before, which was held, has gone on by itself
    SILENT = 8, "silent"  # its instance says nothing; it may be dead, or be back in a while


# -- relay to control --------------------------------------------------------------------------------------------------


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Base of all messages: an array whose first item is the name of the class."""


class Over(Message, frozen=True):
    """An attempt that is over before the answer is, and what the next one must know of all before it.

    Attributes:
        attempt: its number.
        shown: the client has got something of the answer, be it only its first event without a token.
        delivered_tokens: of the answer, that the client has.
        lost_with: instances that were lost while the request ran there, the last one included.
        refused_by: instances that refused it for load; the last one's answer is kept for the client.
        avoid: instances that could not be reached, or answered the request with another error.
        detail: for people.
    """

    attempt: int
    cause: Cause
    at_s: float
    shown: bool = False
    delivered_tokens: int = 0
    lost_with: tuple[int, ...] = ()
    refused_by: tuple[int, ...] = ()
    avoid: tuple[int, ...] = ()
    detail: str = ""


class Ask(Message, frozen=True):
    """Where does a request go? Said again where a control plane has started that may not know it.

    Attributes:
        rid: unique; given by the client in the body, else by the relay. Instances know it as ``rids`` says.
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
        over: what has become of the last attempt; None: there was none.
        body: the JSON body, with ``Table.wants_bodies`` only.
        rids: the client's own names for the prompts of a batch, under which instances know them.
        adapter: the LoRA adapter that it names.
        model: the name in ``model`` of its body; "": none.
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
    body: bytes | None = None
    parent: str | None = None
    rids: tuple[str, ...] = ()
    answer_tokens: int | None = None
    adapter: str | None = None
    continues_session: bool = False
    over: Over | None = None
    model: str = ""

    @property
    def is_single(self) -> bool:
        """One prompt, one answer: an instance that has answered with an error holds nothing of it."""
        return self.prompts == 1 and self.samples == 1


class Progress(Message, frozen=True):
    """An attempt has reached a milestone.

    Attributes:
        movable: with FIRST_TOKEN: the stream carries its token ids, and can go on elsewhere.
        gap_s: with the FIRST_TOKEN of an attempt that goes on with an answer: since the last of what the client has.
    """

    rid: str
    milestone: Milestone
    at_s: float
    movable: bool = False
    attempt: int = 1
    gap_s: float | None = None


class Dropped(Message, frozen=True):
    """Nothing comes of the attempt that was to take a paused request over; the present one goes on."""

    rid: str
    attempt: int
    cause: Cause
    detail: str = ""


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
        input_tokens: likewise, of the whole prompt.
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
    input_tokens: int | None = None


class Failure(Message, frozen=True):
    """An instance failed a relay; sent in addition to the request's own messages."""

    worker: int
    kind: FailureKind
    detail: str = ""
    rid: str = ""


class OpenRequest(Message, frozen=True):
    """A request that is dispatched and open, as told to a control plane that has just started.

    Attributes:
        assign, progress: of the present attempt.
        delivered_tokens: of the answer, that the client has.
        last_attempt: the highest number that the relay has seen.
    """

    ask: Ask
    assign: Assign
    progress: tuple[Progress, ...]
    delivered_tokens: int = 0
    last_attempt: int = 1


class Hello(Message, frozen=True):
    """First message to a control plane, again whenever its ``epoch`` changes.

    ``open`` and ``asking`` are all requests of the relay: those that are dispatched, and the ids of those whose
    question is not answered; it follows again. ``epoch``: of a later control plane, which the relay follows: it takes
    nothing of the one that it tells this; 0: it knows of none.
    """

    relay: int
    protocol: int
    open: tuple[OpenRequest, ...] = ()
    asking: tuple[str, ...] = ()
    epoch: int = 0


class RelayReport(Message, frozen=True):
    """A relay's own counters and gauges, once a second; control exports them with the label ``relay``.

    ``counters`` only grow; a name may carry labels in Prometheus form: ``bad_requests_total{reason="head"}``.
    """

    relay: int
    counters: dict[str, float]
    gauges: dict[str, float]


class AdminAsk(Message, frozen=True):
    """A request for content that only the control plane has: /workers, /pla/*, /metrics.

    The relay has checked the admin key. ``path`` is without a query, which says nothing here.
    """

    number: int
    relay: int
    method: str
    path: str
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
        tls: it is reached by https.
    """

    number: int
    host: str
    port: int
    kind: str
    listed: bool = True
    api_key: str = ""
    admin_key: str = ""
    hops: bool = False
    router_key: str = ""
    tls: bool = False


class Table(Message, frozen=True):
    """All instances, complete; sent on connect and at each change, always before an Assign that needs it.

    Attributes:
        epoch: of the control plane: a greater one means another process, which wants a Hello. A relay that has had a
            table of a greater one refuses it.
        serving: whether a request could be dispatched now (/health).
        wants_bodies: questions bring the JSON body, so that the control plane can tokenize or hash it.
        trace_share: of requests without a ``traceparent``, those that begin a trace of spans; None: spans are off.
        migration: requests may go on at another instance.
        protocol: what the control plane speaks; a relay that speaks another version takes nothing from it.
    """

    epoch: int
    workers: tuple[WorkerEntry, ...]
    serving: bool
    wants_bodies: bool = False
    trace_share: float | None = None
    migration: bool = False
    protocol: int = PROTOCOL


class Heartbeat(Message, frozen=True):
    """The control plane is alive; sent every ``HEARTBEAT_INTERVAL_S``."""


class Assign(Message, frozen=True):
    """Where a request goes, or goes on.

    Attributes:
        attempt: its number, above that of all before.
        decode: the instance that answers the client; a unified instance where ``prefill`` is None.
        prefill: instance of the prefill part, or where the request is held whose KV cache is pulled; None: one leg,
            which computes all.
        bootstrap_host, bootstrap_port, bootstrap_room: of ``prefill``; they go into both bodies of a pair. SGLang gives
            each prompt of a batch the next room, so rooms of two requests must be further apart than the largest batch.
        reason: why there.
        held_tokens: the request runs and is held behind so many tokens of its answer: the relay waits until it has them
            and tries this attempt beside the present one. None: there is no present one.
    """

    rid: str
    attempt: int
    decode: int
    prefill: int | None = None
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    bootstrap_room: int = 0
    reason: str = ""
    held_tokens: int | None = None


class Refuse(Message, frozen=True):
    """No (other) instance gets the request: 429 with Retry-After under hard limits, 503 while nobody is ready.

    It ends as it would have without another attempt. ``code`` is the error's type in the JSON answer; ``message`` is
    for people. ``over``: number of the attempt that the question named; 0: none.
    """

    rid: str
    status: int
    code: str
    message: str
    retry_after_s: float | None = None
    over: int = 0


class Abort(Message, frozen=True):
    """End an open request now: free both instances, answer the client with ``status`` or break its stream.

    ``worker``: the instance that is dead, where that is why: a request that can go on elsewhere asks where, instead.
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

FromRelay = Ask | Progress | Dropped | Completed | Failure | Hello | RelayReport | AdminAsk
FromControl = Table | Heartbeat | Assign | Refuse | Abort | AdminResponse
