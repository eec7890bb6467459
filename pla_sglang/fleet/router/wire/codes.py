"""The words of the messages between relays and the control plane: what may be said, and what it means."""

from __future__ import annotations

import enum
from typing import Self


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


class Leg(enum.IntEnum):
    """Which part of a request an instance serves; a unified instance has one leg, WHOLE."""

    WHOLE = 0
    PREFILL = 1
    DECODE = 2


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


class PromptDetail(enum.IntEnum):
    """What ``Ask`` must say about the prompt; the control plane chooses by what its policy needs."""

    ESTIMATE = 0  # input_tokens estimated from the body's size
    BODY = 1  # Ask.body holds the client's JSON body, so that control can tokenize or hash
