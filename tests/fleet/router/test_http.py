"""The parser against h11, an independent one: what we accept, it accepts too, and reads the same; in any pieces."""

from __future__ import annotations

import re

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pla_sglang.fleet.router.http.framing import Chunked, Sized, UntilClose, response_framing
from pla_sglang.fleet.router.http.head import BadMessage, parse_request, parse_response
from pla_sglang.fleet.router.http.responses import error_event, retry_after, whole_response

HOST = b"Host: x\r\n"


def request(line: bytes = b"POST /generate HTTP/1.1", fields: bytes = HOST) -> bytes:
    return line + b"\r\n" + fields + b"\r\n"


def test_a_request_head() -> None:
    head = parse_request(
        request(b"POST /v1/x?a=b?c HTTP/1.1", HOST + b"X-A:  one two \r\nContent-Length: 12\r\nconnection: Close\r\n"),
        max_headers=9,
    )
    assert (head.method, head.target, head.path) == ("POST", b"/v1/x?a=b?c", "/v1/x")
    assert (head.length, head.chunked, head.keep_alive, head.minor) == (12, False, False, 1)
    assert head.get_header(b"x-a") == b"one two"
    old = parse_request(request(b"GET / HTTP/1.0", b"Connection: keep-alive\r\n"), max_headers=9)
    assert (old.minor, old.keep_alive) == (0, True)
    absolute = parse_request(request(b"GET http://other:80/v1/x?a=b HTTP/1.2"), max_headers=9)
    assert (absolute.target, absolute.path, absolute.minor) == (b"/v1/x?a=b", "/v1/x", 1)
    closing = b"Connection: close\r\nConnection: keep-alive\r\n"
    assert not parse_request(request(fields=HOST + closing), max_headers=9).keep_alive


BAD = {  # what is refused with 400 stands in support/http_cases.py
    "bare line feed": (b"GET / HTTP/1.1\nHost: x\r\n\r\n", 400),
    "version 2": (request(b"GET / HTTP/2.0"), 505),
    "gzip coding": (request(fields=HOST + b"Transfer-Encoding: gzip, chunked\r\n"), 501),
    "chunks twice": (request(fields=HOST + b"Transfer-Encoding: chunked\r\n" * 2), 501),
    "chunks in HTTP/1.0": (request(b"GET / HTTP/1.0", b"Transfer-Encoding: chunked\r\n"), 501),
    "too many": (request(fields=HOST + b"a: b\r\n" * 9), 431),
}


@pytest.mark.parametrize("name", BAD)
def test_why_a_head_is_refused(name: str) -> None:
    raw, status = BAD[name]
    with pytest.raises(BadMessage) as caught:
        parse_request(raw, max_headers=9)
    assert caught.value.status == status


PARTS = st.sampled_from(
    [
        *(
            b"GET",
            b"POST",
            b" ",
            b"  ",
            b"/",
            b"/generate?x=1",
            b"http://a/",
            b" HTTP/1.1",
            b" HTTP/1.0",
            b"\r\n",
            b"\n",
        ),
        *(b"Host: x\r\n", b"Host : x\r\n", b"host:y\r\n", b"Content-Length: 3\r\n", b"Content-Length: 03\r\n", b"\t"),
        *(b"Content-Length:3,3\r\n", b"Transfer-Encoding: chunked\r\n", b"transfer-encoding:CHUNKED\r\n", b"\r", b"\0"),
        *(b"Connection: close\r\n", b"Connection: keep-alive, x\r\n", b"x-\xff: \xe9\r\n", b"a: b\r\n c: d\r\n", b":"),
    ]
)


@given(st.lists(PARTS, max_size=8), st.binary(max_size=6))
def test_what_we_accept_h11_accepts_and_reads_the_same(parts: list[bytes], noise: bytes) -> None:
    raw = b"POST / HTTP/1.1\r\nHost: x\r\n" + b"".join(parts) + noise
    for start in (raw, b"".join(parts)):
        compare(start.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")


def compare(raw: bytes) -> None:
    try:
        ours = parse_request(raw, max_headers=90)
    except BadMessage:
        return
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(raw)
    theirs = peer.next_event()
    assert isinstance(theirs, h11.Request)
    target = theirs.target.removeprefix(b"http://a")  # of the parts above; a target is in origin form with us
    assert (theirs.method.decode(), target) == (ours.method, ours.target)
    assert theirs.http_version == (b"1.%d" % ours.minor)
    assert [folded(name, value) for name, value in theirs.headers] == [folded(*pair) for pair in ours.headers]
    fields = dict(ours.headers)
    assert ours.chunked == (b"transfer-encoding" in fields)
    assert ours.length == (int(fields[b"content-length"]) if b"content-length" in fields else None)


def folded(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """h11 writes the transfer coding in lower case."""
    return name, value.lower() if name == b"transfer-encoding" else value


# -- bodies in pieces --------------------------------------------------------------------------------------------------


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *marks], [*marks, len(data)], strict=True) if a < b]


@st.composite
def chunked(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A chunked body and its content."""
    chunks = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=5))
    extension = draw(st.sampled_from([b"", b";a=b", b";x y"]))
    zeros = draw(st.sampled_from([b"", b"00"]))
    trailer = draw(st.sampled_from([b"", b"x-t: 1\r\n"]))
    body = b"".join(zeros + b"%X" % len(chunk) + extension + b"\r\n" + chunk + b"\r\n" for chunk in chunks)
    return body + b"0\r\n" + trailer + b"\r\n", b"".join(chunks)


@given(chunked(), st.lists(st.integers(0, 400), max_size=30), st.binary(max_size=5))
def test_chunks_in_any_pieces(made: tuple[bytes, bytes], cuts: list[int], behind: bytes) -> None:
    body, content = made
    framing, payload, passed = Chunked(), list[bytes](), b""
    ended = -1
    for piece in pieces_of(body + behind, cuts):
        assert ended < 0 or len(passed) == len(body)
        if ended >= 0:
            break
        ended = framing.feed_data(piece, 0, payload)
        passed += piece if ended < 0 else piece[:ended]
    assert ended >= 0
    assert passed == body
    assert b"".join(payload) == content
    assert framing.size == len(content)


@given(chunked(), st.integers(0, 300), st.binary(min_size=1, max_size=3), st.lists(st.integers(0, 400), max_size=9))
def test_broken_chunks_never_pass_for_h11s_broken_ones(
    made: tuple[bytes, bytes], place: int, noise: bytes, cuts: list[int]
) -> None:
    """A mangled body either reads as h11 reads it, or is refused."""
    body = made[0]
    place %= len(body)
    body = body[:place] + noise + body[place + len(noise) :]
    framing, payload, end = Chunked(), list[bytes](), -1
    try:
        for piece in pieces_of(body, cuts):
            end = framing.feed_data(piece, 0, payload)
            if end >= 0:
                break
    except BadMessage:
        return
    theirs, complete = h11_content(body)
    assert (end >= 0) == complete
    assert b"".join(payload) == theirs


def h11_content(body: bytes) -> tuple[bytes, bool]:
    """Raises h11.RemoteProtocolError where h11 refuses it."""
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(request(fields=HOST + b"Transfer-Encoding: chunked\r\n") + body)
    content = b""
    while True:
        event = peer.next_event()
        if event in (h11.NEED_DATA, h11.PAUSED):
            return content, False
        if isinstance(event, h11.Data):
            content += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return content, True


@given(chunked(), st.lists(st.integers(0, 400), max_size=4), st.booleans(), st.binary(max_size=3), st.integers(0, 300))
def test_a_piece_that_is_one_chunk_reads_as_any_other(
    made: tuple[bytes, bytes], cuts: list[int], broken: bool, noise: bytes, place: int
) -> None:
    """The short way for whole chunks leaves the same behind as the long one, also amid what is not whole or broken."""
    body = made[0]
    place %= len(body)
    ends = [match.end() for match in re.finditer(rb"\r\n", body)]
    pieces = pieces_of(body[:place] + noise + body[place + len(noise) :] if broken else body, [*cuts, *ends[1::2]])
    short, long = Chunked(), Chunked()
    for piece in pieces:
        expected, found = list[bytes](), list[bytes]()
        try:
            ended = long.feed_data(piece, 0, expected)
        except BadMessage:
            assert not short.take_whole(piece)
            return
        if content := short.take_whole(piece):
            found.append(content)
            assert ended < 0
        else:
            assert short.feed_data(piece, 0, found) == ended
        assert (b"".join(found), short.size, short.at_boundary()) == (
            b"".join(expected),
            long.size,
            long.at_boundary(),
        )
        if ended >= 0:
            return


def test_nothing_is_put_into_the_middle_of_a_chunk() -> None:
    framing = Chunked()
    for data, boundary in [(b"3\r\nab", False), (b"c", False), (b"\r\n", True), (b"0", False), (b"\r\n\r\n", False)]:
        framing.feed_data(data, 0)
        assert framing.at_boundary() is boundary
    assert not Sized(3).at_boundary()
    assert not UntilClose().at_boundary()


def test_sized_bodies() -> None:
    framing, payload = Sized(5), list[bytes]()
    assert framing.feed_data(b"xxab", 2, payload) == -1
    assert framing.feed_data(b"cdeNEXT", 0, payload) == 3
    assert b"".join(payload) == b"abcde"
    assert Sized(0).feed_data(b"NEXT", 0) == 0


ANSWERS = [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n", "POST", Sized),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "POST", Chunked),
    (b"HTTP/1.1 200\r\n\r\n", "POST", UntilClose),
    (b"HTTP/1.1 204 No Content\r\nContent-Length: 4\r\n\r\n", "POST", Sized),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n", "HEAD", Sized),
]


@pytest.mark.parametrize(("raw", "method", "kind"), ANSWERS)
def test_answers_end_where_they_should(raw: bytes, method: str, kind: type) -> None:
    head = parse_response(raw)
    framing = response_framing(head, method)
    assert type(framing) is kind
    if isinstance(framing, Sized):
        assert framing.left == (4 if (head.status, method) == (200, "POST") else 0)


@pytest.mark.parametrize(
    "raw", [b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 99 X\r\n\r\n", b"hello\r\n\r\n", b"HTTP/1.1 200 OK\n\r\n\r\n"]
)
def test_bad_answers(raw: bytes) -> None:
    with pytest.raises(BadMessage):
        parse_response(raw)


@pytest.mark.parametrize("keep_alive", [True, False])
def test_our_own_answers_are_http(keep_alive: bool) -> None:
    peer = h11.Connection(h11.CLIENT)
    peer.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    peer.send(h11.EndOfMessage())
    peer.receive_data(whole_response(429, b"{}", keep_alive=keep_alive, headers=retry_after(0.2)))
    head = peer.next_event()
    assert isinstance(head, h11.Response)
    assert (head.status_code, dict(head.headers)[b"retry-after"]) == (429, b"1")
    assert bytes(peer.next_event().data) == b"{}"  # type: ignore[union-attr]
    assert isinstance(peer.next_event(), h11.EndOfMessage)
    assert (peer.their_state is h11.MUST_CLOSE) is not keep_alive


def test_an_error_event_ends_a_stream() -> None:
    payload: list[bytes] = []
    data = error_event(502, "upstream_lost", "it died")
    assert Chunked().feed_data(data, 0, payload) == len(data)
    # The blank line ends an event of which only a part came before.
    assert b"".join(payload).startswith(b'\n\ndata: {"error":')
