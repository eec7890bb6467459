"""Every request of ``http_cases`` against the router's reader, h11, and llhttp (which aiohttp has built in)."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
import pytest
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParserC
from support.http_cases import CASES, Case, disguised_requests
from support.lone_connection import LoneConnection

Request = tuple[str, bytes, bytes]  # method, target, body
Read = tuple[str, Request | None]  # verdict, and the request where it is "ok"


def read_by_router(pieces: list[bytes]) -> Read:
    async def read() -> LoneConnection:
        lone = LoneConnection()
        for piece in pieces:
            lone.connection.data_received(piece)
        return lone

    lone = asyncio.run(read())
    assert lone.context.incoming.held_bytes >= 0
    if lone.requests:
        head, body = lone.requests[0]
        return "ok", (head.method, head.target, body)
    return ("bad", None) if lone.transport.closing else ("more", None)


def read_by_h11(raw: bytes) -> Read:
    peer, body, head = h11.Connection(h11.SERVER, max_incomplete_event_size=32_768), b"", None
    try:
        peer.receive_data(raw)
        while True:
            event = peer.next_event()
            if isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                return "ok", (head.method.decode(), head.target, body)
            else:
                return "more", None
    except h11.RemoteProtocolError:
        return "bad", None


class _Flow:
    """The part of aiohttp's protocol that its parser uses."""

    def pause_reading(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is sent."""

    def resume_reading(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is sent."""


def read_by_llhttp(raw: bytes) -> Read:
    loop = asyncio.new_event_loop()
    try:
        parser = HttpRequestParserC(_Flow(), loop, 2**16, max_line_size=32_768, max_field_size=32_768)
        messages, _, _ = parser.feed_data(raw)
    except HttpProcessingError:
        return "bad", None
    finally:
        loop.close()
    if not messages:
        return "more", None
    head, payload = messages[0]
    if payload.exception() is not None:
        return "bad", None
    if not payload.is_eof():
        return "more", None
    body = b"".join(getattr(payload, "_buffer", ()))  # a message without a body has another kind of payload
    return "ok", (head.method, head.path.encode("utf-8", "surrogateescape"), body)


def in_origin_form(read: Read) -> Read:
    """The oracles leave an absolute target as it is."""
    verdict, request = read
    if request is None or not request[1].startswith(b"http://"):
        return read
    target = re.sub(rb"http://[^/?]*", b"", request[1])
    return verdict, (request[0], target if target.startswith(b"/") else b"/" + target, request[2])


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_router_reads_a_request_as_the_oracles_do_or_says_why_not(case: Case) -> None:
    ours, h11s, llhttps = read_by_router([case.raw]), read_by_h11(case.raw), read_by_llhttp(case.raw)
    expected = (case.ours, case.h11 or case.ours, case.llhttp or case.ours)
    assert (ours[0], h11s[0], llhttps[0]) == expected
    assert bool(case.why) is (len(set(expected)) > 1)
    assert ours[0] != "ok" or "ok" in (h11s[0], llhttps[0]), "accepted against both oracles"
    for theirs in (h11s, llhttps):
        if ours[0] == theirs[0]:
            assert ours == in_origin_form(theirs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_cut_changes_what_the_router_reads(case: Case) -> None:
    """A request may come in pieces of any size, and what is behind it must not matter."""
    whole = read_by_router([case.raw])
    assert read_by_router([bytes([byte]) for byte in case.raw]) == whole
    if whole[0] == "ok":
        assert read_by_router([case.raw + b"GET / HTTP/1.1\r\n"]) == whole


def test_no_header_in_disguise_is_read_otherwise_than_by_the_oracles() -> None:
    for raw in disguised_requests():
        ours = read_by_router([raw])
        assert ours[0] in ("ok", "bad"), raw
        if ours[0] == "ok":
            assert read_by_h11(raw) == ours, raw
            assert read_by_llhttp(raw) in (ours, ("bad", None)), raw  # it reads on, and what is behind is no request
