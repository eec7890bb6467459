"""Requests at the border of HTTP/1.1: what the router makes of each, and why where h11 or llhttp sees it otherwise.

Made from RFC 9110 and RFC 9112. Verdicts: "ok" (a complete request), "more" (not complete yet), "bad" (refused).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

HOST = b"Host: a\r\n"


@dataclass(frozen=True)
class Case:
    """One message.

    Attributes:
        ours: the router's verdict.
        h11, llhttp: theirs; "": the same.
        why: where one of them has another verdict: the rule that the router follows.
    """

    name: str
    raw: bytes
    ours: str
    h11: str = ""
    llhttp: str = ""
    why: str = ""


def get(fields: bytes = HOST, line: bytes = b"GET / HTTP/1.1") -> bytes:
    return line + b"\r\n" + fields + b"\r\n"


def post(fields: bytes, body: bytes = b"") -> bytes:
    return b"POST /generate HTTP/1.1\r\n" + HOST + fields + b"\r\n" + body


def chunked(body: bytes, value: bytes = b"chunked") -> bytes:
    return post(b"Transfer-Encoding: " + value + b"\r\n", body)


def sized(value: bytes, body: bytes = b"abc") -> bytes:
    return post(b"Content-Length: " + value + b"\r\n", body)


# Why the router decides as it does where h11 or llhttp does not; the sections are those of RFC 9112.
EMPTY_LINES = "a server skips empty lines in front of a request (2.2)"
ONE_SPACE = "the parts of a request line are one space apart (3)"
VERSIONS = "HTTP/1.0 and HTTP/1.1 are what it speaks (2.3)"
NEWER = "a newer HTTP/1 is read as HTTP/1.1 (RFC 9110, 2.5)"
METHODS = "any token is a method, and case counts (3.1); the routes answer 405"
LIMITS = "its own limits, the same for every client"
PATHS = "it is no proxy: a target is a path of its own, perhaps behind http:// and a host (3.2)"
HOSTS = "Host is a host and perhaps a port (3.2)"
CRLF = "a line ends with CRLF; other readers may end it elsewhere (2.2)"
CONTROLS = "no control character is passed on (RFC 9110, 5.5)"
FOLDS = "folded lines are refused, as a server may (5.2)"
ONE_LENGTH = "a length that is given twice may be read in two ways (6.3)"
BLANKS = "blanks around a value do not belong to it (RFC 9110, 5.5)"
ONE_CODING = "chunked alone, with HTTP/1.1, is the only transfer coding (6.1)"
NO_BLANKS = "no blank belongs behind a chunk's size (7.1)"
EXTENSIONS = "extensions are dropped unread, an empty one too (7.1.1)"
END = b"0\r\n\r\n"
REQUEST_LINES = [
    Case("plain", get(), "ok"),
    Case("old version", get(b"", b"GET / HTTP/1.0"), "ok"),
    Case("line end in front", b"\r\n" + get(), "ok", h11="bad", why=EMPTY_LINES),
    Case("line ends in front", b"\r\n\r\n\r\n" + get(), "ok", h11="bad", why=EMPTY_LINES),
    Case("space in front", b" " + get(), "bad"),
    Case("tab between the parts", get(line=b"GET\t/\tHTTP/1.1"), "bad"),
    Case("two spaces before the target", get(line=b"GET  / HTTP/1.1"), "bad", llhttp="ok", why=ONE_SPACE),
    Case("two spaces before the version", get(line=b"GET /  HTTP/1.1"), "bad", llhttp="ok", why=ONE_SPACE),
    Case("space at the end", get(line=b"GET / HTTP/1.1 "), "bad"),
    Case("no version", get(line=b"GET /"), "bad", llhttp="ok", why=VERSIONS),
    Case("no target", get(line=b"GET HTTP/1.1"), "bad"),
    Case("method alone", get(line=b"GET"), "bad"),
    Case("version in lower case", get(line=b"GET / http/1.1"), "bad"),
    Case("version 0.9", get(line=b"GET / HTTP/0.9"), "bad", h11="ok", llhttp="ok", why=VERSIONS),
    Case("version 1.2", get(line=b"GET / HTTP/1.2"), "ok", llhttp="bad", why=NEWER),
    Case("version 2.0", get(line=b"GET / HTTP/2.0"), "bad", h11="ok", llhttp="ok", why=VERSIONS),
    Case("version of two digits", get(line=b"GET / HTTP/1.10"), "bad"),
    Case("version of one part", get(line=b"GET / HTTP/1"), "bad"),
    Case("version with a letter", get(line=b"GET / HTTP/1.x"), "bad"),
    Case("another protocol", get(line=b"GET / RTSP/1.0"), "bad", llhttp="ok", why=VERSIONS),
    Case("method in lower case", get(line=b"get / HTTP/1.1"), "ok", llhttp="bad", why=METHODS),
    Case("unknown method", get(line=b"BREW / HTTP/1.1"), "ok", llhttp="bad", why=METHODS),
    Case("method with a bracket", get(line=b"GE(T / HTTP/1.1"), "bad"),
    Case("method with a colon", get(line=b"GET: / HTTP/1.1"), "bad"),
    Case("method with a null byte", get(line=b"GE\0T / HTTP/1.1"), "bad"),
    Case("method beyond ASCII", get(line=b"G\xc9T / HTTP/1.1"), "bad"),
    Case("empty method", get(line=b" / HTTP/1.1"), "bad"),
    Case("very long method", get(line=b"G" * 33 + b" / HTTP/1.1"), "bad", h11="ok", why=LIMITS),
    Case("target with a query", get(line=b"GET /a?b=c&d=%20 HTTP/1.1"), "ok"),
    Case("target with a fragment", get(line=b"GET /a#b HTTP/1.1"), "ok"),
    Case("absolute target", get(line=b"GET http://a/b HTTP/1.1"), "ok"),
    Case("target of two hosts", get(line=b"GET http://evil/ HTTP/1.1"), "ok"),
    Case("absolute target without a path", get(line=b"GET http://a?b HTTP/1.1"), "ok"),
    Case("absolute target without a host", get(line=b"GET http:///b HTTP/1.1"), "bad", h11="ok", why=PATHS),
    Case(
        "absolute target with a user", get(line=b"GET http://u@a/b HTTP/1.1"), "bad", h11="ok", llhttp="ok", why=PATHS
    ),
    Case("target of another scheme", get(line=b"GET ftp://a/b HTTP/1.1"), "bad", h11="ok", llhttp="ok", why=PATHS),
    Case("asterisk", get(line=b"OPTIONS * HTTP/1.1"), "bad", h11="ok", llhttp="ok", why=PATHS),
    Case("tunnel", get(line=b"CONNECT a:80 HTTP/1.1"), "bad", h11="ok", llhttp="ok", why=PATHS),
    Case("relative target", get(line=b"GET a/b HTTP/1.1"), "bad", h11="ok", why=PATHS),
    Case("target with a null byte", get(line=b"GET /a\0b HTTP/1.1"), "bad"),
    Case("target with DEL", get(line=b"GET /a\x7fb HTTP/1.1"), "bad"),
    Case("target with a tab", get(line=b"GET /a\tb HTTP/1.1"), "bad"),
    Case("target with a space", get(line=b"GET /a b HTTP/1.1"), "bad"),
    Case("target with a carriage return", get(line=b"GET /a\rb HTTP/1.1"), "bad"),
    Case("target beyond ASCII", get(line=b"GET /\xc3\xa9 HTTP/1.1"), "bad"),
    Case("line feed alone after the request line", b"GET / HTTP/1.1\n" + HOST + b"\r\n", "bad", h11="ok", why=CRLF),
    Case("carriage return alone after the request line", b"GET / HTTP/1.1\r" + HOST + b"\r\n\r\n", "bad"),
    Case("two carriage returns", b"GET / HTTP/1.1\r\r\n" + HOST + b"\r\n", "bad"),
    Case("head not complete", b"GET / HTTP/1.1\r\nHost: a\r\n", "more"),
    Case("request line not complete", b"GET / HT", "more"),
    Case("nothing but a line end", b"\r\n", "more", h11="bad", why=EMPTY_LINES),
    Case("TLS", b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n", "bad"),
    Case("preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "bad", h11="ok", why=VERSIONS),
]
FIELDS = [
    Case("blanks around a value", get(HOST + b"x: \t b \t \r\n"), "ok"),
    Case("no blank before a value", get(HOST + b"x:b\r\n"), "ok"),
    Case("empty value", get(HOST + b"x:\r\n"), "ok"),
    Case("value of blanks", get(HOST + b"x: \t \r\n"), "ok"),
    Case("colon in a value", get(HOST + b"x: a:b\r\n"), "ok"),
    Case("bytes above ASCII in a value", get(HOST + b"x: \xe9\xff\r\n"), "ok"),
    Case("every token character in a name", get(HOST + b"!#$%&'*+-.^_`|~09azAZ: b\r\n"), "ok"),
    Case("space before the colon", get(HOST + b"x : b\r\n"), "bad"),
    Case("tab before the colon", get(HOST + b"x\t: b\r\n"), "bad"),
    Case("space in a name", get(HOST + b"x y: b\r\n"), "bad"),
    Case("no name", get(HOST + b": b\r\n"), "bad"),
    Case("no colon", get(HOST + b"x\r\n"), "bad"),
    Case("colon alone", get(HOST + b":\r\n"), "bad"),
    Case("line end in a name", post(b"Transfer-\r\nEncoding: chunked\r\n", b"0\r\n\r\n"), "bad"),
    Case("line feed alone in a name", get(HOST + b"x\ny: z\r\n"), "bad"),
    Case("a head behind a carriage return alone", get(HOST)[:-1] + b"XGET /b: HTTP/1.1\r\n" + HOST + b"\r\n", "bad"),
    Case("bracket in a name", get(HOST + b"x(y): b\r\n"), "bad"),
    Case("quote in a name", get(HOST + b'x"y: b\r\n'), "bad"),
    Case("slash in a name", get(HOST + b"x/y: b\r\n"), "bad"),
    Case("at in a name", get(HOST + b"x@y: b\r\n"), "bad"),
    Case("null byte in a name", get(HOST + b"x\0y: b\r\n"), "bad"),
    Case("name beyond ASCII", get(HOST + b"x\xe9: b\r\n"), "bad"),
    Case("null byte in a value", get(HOST + b"x: a\0b\r\n"), "bad"),
    Case("control character in a value", get(HOST + b"x: a\x01b\r\n"), "bad", h11="ok", why=CONTROLS),
    Case("escape in a value", get(HOST + b"x: a\x1bb\r\n"), "bad", h11="ok", why=CONTROLS),
    Case("DEL in a value", get(HOST + b"x: a\x7fb\r\n"), "bad", h11="ok", why=CONTROLS),
    Case("vertical tab in a value", get(HOST + b"x: a\x0bb\r\n"), "bad"),
    Case("carriage return in a value", get(HOST + b"x: a\rb\r\n"), "bad"),
    Case("carriage return before the line end", get(HOST + b"x: a\r\r\n"), "bad"),
    Case("line feed alone in a value", get(HOST + b"x: a\ny: b\r\n"), "bad", h11="ok", why=CRLF),
    Case(
        "line feed alone before the blank line",
        b"GET / HTTP/1.1\r\nHost: a\n\r\n",
        "more",
        h11="ok",
        llhttp="bad",
        why=CRLF,
    ),
    Case("line feeds alone at the end", b"GET / HTTP/1.1\r\nHost: a\r\nx: b\n\n\r\n\r\n", "bad", h11="ok", why=CRLF),
    Case("folded with a space", get(HOST + b"x: a\r\n b\r\n"), "bad", h11="ok", why=FOLDS),
    Case("folded with a tab", get(HOST + b"x: a\r\n\tb\r\n"), "bad", h11="ok", why=FOLDS),
    Case("folded length", post(b"Content-Length:\r\n 3\r\n", b"abc"), "bad", h11="ok", why=FOLDS),
    Case("first header folded", get(b" x: b\r\n" + HOST), "bad"),
    Case("blank line of a space", get(HOST + b" \r\n"), "bad", h11="ok", why=FOLDS),
    Case("no host", get(b"x: b\r\n"), "bad"),
    Case("no host in HTTP/1.0", get(b"x: b\r\n", b"GET / HTTP/1.0"), "ok"),
    Case("two hosts", get(HOST + b"Host: b\r\n"), "bad"),
    Case("the same host twice", get(HOST + HOST), "bad"),
    Case("empty host", get(b"Host:\r\n"), "ok"),
    Case("host with a port", get(b"Host: [::1]:80\r\n"), "ok"),
    *(
        Case(f"host that is {host!r}", get(b"Host: " + host + b"\r\n"), "bad", h11="ok", llhttp="ok", why=HOSTS)
        for host in (b"a/b", b"a@b", b"\xff", b"a, b", b"a:b")
    ),
    Case("host with a space before the colon", get(b"Host : a\r\n"), "bad"),
    Case("as many headers as allowed", get(HOST + b"x: b\r\n" * 99), "ok"),
    Case("one header too many", get(HOST + b"x: b\r\n" * 100), "bad", h11="ok", llhttp="ok", why=LIMITS),
    Case("a head that is too long", get(HOST + b"x: " + b"b" * 40_000 + b"\r\n"), "bad", h11="ok", why=LIMITS),
    Case("a head that is too long and has no end", b"GET / HTTP/1.1\r\nx: " + b"b" * 40_000, "bad"),
    Case("a name that is too long", get(HOST + b"x" * 40_000 + b": b\r\n"), "bad", h11="ok", why=LIMITS),
    Case("expectation", post(b"Content-Length: 3\r\nExpect: 100-continue\r\n", b"abc"), "ok"),
    Case("upgrade is not taken", get(HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n"), "ok"),
]
LENGTHS = [
    Case("length", sized(b"3"), "ok"),
    Case("length 0", sized(b"0", b""), "ok"),
    Case("length with zeroes in front", sized(b"003"), "ok"),
    Case("blanks around a length", sized(b" \t3 \t"), "ok"),
    Case("length and a shorter body", sized(b"4"), "more"),
    Case("no length", post(b""), "ok"),
    Case("empty length", sized(b""), "bad"),
    Case("length with a plus", sized(b"+3"), "bad"),
    Case("negative length", sized(b"-3"), "bad"),
    Case("hexadecimal length", sized(b"0x3"), "bad"),
    Case("length with a fraction", sized(b"3.0"), "bad"),
    Case("length with an underscore", sized(b"1_0"), "bad"),
    Case("length with a blank inside", sized(b"3 3"), "bad"),
    Case("length with a letter behind", sized(b"3a"), "bad"),
    Case("length in quotes", sized(b'"3"'), "bad"),
    Case("length in other digits", sized("\u0663".encode()), "bad"),
    Case("length beyond 64 bits", sized(b"18446744073709551619"), "bad", h11="more", why=LIMITS),
    Case("length beyond the limit", sized(b"99999999999"), "bad", h11="more", llhttp="more", why=LIMITS),
    Case(
        "the same length twice",
        post(b"Content-Length: 3\r\nContent-Length: 3\r\n", b"abc"),
        "bad",
        h11="ok",
        why=ONE_LENGTH,
    ),
    Case("empty length and a length", post(b"Content-Length: \r\nContent-Length: 3\r\n", b"abc"), "bad"),
    Case("two lengths", post(b"Content-Length: 3\r\nContent-Length: 4\r\n", b"abc"), "bad"),
    Case("list of the same length", sized(b"3, 3"), "bad", h11="ok", why=ONE_LENGTH),
    Case("list of lengths", sized(b"3, 4"), "bad"),
    Case("list with an empty member", sized(b"3,"), "bad"),
    Case(
        "length and chunked",
        post(b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", END),
        "bad",
        h11="ok",
        why=ONE_LENGTH,
    ),
    Case(
        "chunked and length",
        post(b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", END),
        "bad",
        h11="ok",
        why=ONE_LENGTH,
    ),
    Case(
        "chunked and length 0",
        post(b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n", END),
        "bad",
        h11="ok",
        why=ONE_LENGTH,
    ),
    Case("name of the length with an underscore", post(b"Content_Length: 3\r\n"), "ok"),
    Case("length with a vertical tab", sized(b"\x0b3"), "bad"),
    Case("length of a GET", get(HOST + b"Content-Length: 3\r\n") + b"abc", "ok"),
]
CODINGS = [
    Case("chunked", chunked(b"3\r\nabc\r\n" + END), "ok"),
    Case("no chunk", chunked(END), "ok"),
    Case("coding in capitals", chunked(END, b"CHUNKED"), "ok"),
    Case("blanks around the coding", chunked(END, b"\t chunked \t"), "ok", llhttp="bad", why=BLANKS),
    Case("coding in quotes", chunked(END, b'"chunked"'), "bad"),
    Case("empty coding", chunked(END, b""), "bad"),
    Case("identity", chunked(b"", b"identity"), "bad"),
    Case("gzip alone", chunked(END, b"gzip"), "bad"),
    Case("gzip and chunked", chunked(END, b"gzip, chunked"), "bad", llhttp="ok", why=ONE_CODING),
    Case("chunked and gzip", chunked(END, b"chunked, gzip"), "bad"),
    Case("chunked twice in a list", chunked(END, b"chunked, chunked"), "bad"),
    Case("chunked and identity", chunked(END, b"chunked, identity"), "bad"),
    Case("coding with a parameter", chunked(END, b"chunked;a=b"), "bad"),
    Case("coding with a letter in front", chunked(END, b"xchunked"), "bad"),
    Case("coding with a letter behind", chunked(END, b"chunkedx"), "bad"),
    Case("coding behind a comma", chunked(END, b",chunked"), "bad", llhttp="ok", why=ONE_CODING),
    Case("coding with a vertical tab", chunked(END, b"\x0bchunked"), "bad"),
    Case("coding with a null byte", chunked(END, b"chunked\0"), "bad"),
    Case("chunked in two headers", post(b"Transfer-Encoding: chunked\r\n" * 2, END), "bad"),
    Case("chunked, then identity", post(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", END), "bad"),
    Case("coding with a space before the colon", post(b"Transfer-Encoding : chunked\r\n", END), "bad"),
    Case("folded coding", post(b"Transfer-Encoding:\r\n chunked\r\n", END), "bad", h11="ok", why=FOLDS),
    Case(
        "coding behind a line feed alone", post(b"x: y\nTransfer-Encoding: chunked\r\n", END), "bad", h11="ok", why=CRLF
    ),
    Case(
        "chunked in HTTP/1.0",
        b"POST / HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + END,
        "bad",
        h11="ok",
        llhttp="ok",
        why=ONE_CODING,
    ),
    Case("name of the coding with an underscore", post(b"Transfer_Encoding: chunked\r\n"), "ok"),
]
CHUNKS = [
    Case("several chunks", chunked(b"3\r\nabc\r\n2\r\nde\r\n" + END), "ok"),
    Case("size in capitals", chunked(b"A\r\n0123456789\r\n" + END), "ok"),
    Case("size in lower case", chunked(b"a\r\n0123456789\r\n" + END), "ok"),
    Case("size with zeroes in front", chunked(b"0003\r\nabc\r\n" + END), "ok"),
    Case("last size with zeroes", chunked(b"3\r\nabc\r\n000\r\n\r\n"), "ok"),
    Case("extension", chunked(b"3;x\r\nabc\r\n" + END), "ok"),
    Case("extension with a value", chunked(b"3;x=y\r\nabc\r\n" + END), "ok"),
    Case("extension with a quoted value", chunked(b'3;x="y z"\r\nabc\r\n' + END), "ok"),
    Case("extension of the last chunk", chunked(b"3\r\nabc\r\n0;x=y\r\n\r\n"), "ok"),
    Case("empty extension", chunked(b"3;\r\nabc\r\n" + END), "ok", llhttp="bad", why=EXTENSIONS),
    Case("blank behind the size", chunked(b"3 \r\nabc\r\n" + END), "bad", h11="ok", why=NO_BLANKS),
    Case("tab behind the size", chunked(b"3\t\r\nabc\r\n" + END), "bad", h11="ok", why=NO_BLANKS),
    Case("blank before an extension", chunked(b"3 ;x\r\nabc\r\n" + END), "bad"),
    Case("blank before the size", chunked(b" 3\r\nabc\r\n" + END), "bad"),
    Case("size with a sign", chunked(b"+3\r\nabc\r\n" + END), "bad"),
    Case("negative size", chunked(b"-3\r\nabc\r\n" + END), "bad"),
    Case("size with a prefix", chunked(b"0x3\r\nabc\r\n" + END), "bad"),
    Case("size with an underscore", chunked(b"0_3\r\nabc\r\n" + END), "bad"),
    Case("empty size", chunked(b"\r\nabc\r\n" + END), "bad"),
    Case("size that is no number", chunked(b"g\r\nabc\r\n" + END), "bad"),
    Case("size with letters behind", chunked(b"3x\r\nabc\r\n" + END), "bad"),
    Case("two carriage returns before an extension", chunked(b"3\r\r;x\r\nabc\r\n" + END), "bad"),
    Case("two carriage returns behind an extension", chunked(b"3;x=y\r\rabc\r\n" + END), "bad", h11="more", why=CRLF),
    Case("size with a comma", chunked(b"3,\r\nabc\r\n" + END), "bad"),
    Case("size beyond 64 bits", chunked(b"10000000000000003\r\nabc\r\n" + END), "bad", h11="more", why=LIMITS),
    Case("size at 64 bits", chunked(b"ffffffffffffffff\r\nabc\r\n"), "bad", h11="more", llhttp="more", why=LIMITS),
    Case(
        "size beyond the limit of bodies",
        chunked(b"fffffffff\r\nabc\r\n"),
        "bad",
        h11="more",
        llhttp="more",
        why=LIMITS,
    ),
    Case("size with many zeroes in front", chunked(b"0" * 40 + b"3\r\nabc\r\n" + END), "bad", llhttp="ok", why=LIMITS),
    Case("line feed alone behind the size", chunked(b"3\nabc\r\n" + END), "bad"),
    Case("carriage return alone behind the size", chunked(b"3\rabc\r\n" + END), "bad"),
    Case("two carriage returns behind the size", chunked(b"3\r\r\nabc\r\n" + END), "bad"),
    Case("line feed alone behind the data", chunked(b"3\r\nabc\n" + END), "bad"),
    Case("nothing behind the data", chunked(b"3\r\nabc" + END), "bad"),
    Case("more data than the size", chunked(b"3\r\nabcd\r\n" + END), "bad"),
    Case("less data than the size", chunked(b"4\r\nabc\r\n" + END), "bad"),
    Case("line feed alone in an extension", chunked(b"3;x\n\r\nabc\r\n" + END), "bad"),
    Case("carriage return in an extension", chunked(b"3;x\ry\r\nabc\r\n" + END), "bad", h11="ok", why=CONTROLS),
    Case("null byte in an extension", chunked(b"3;\0\r\nabc\r\n" + END), "bad", h11="ok", why=CONTROLS),
    Case(
        "a long extension",
        chunked(b"3;" + b"x" * 5000 + b"\r\nabc\r\n" + END),
        "bad",
        h11="ok",
        llhttp="ok",
        why=LIMITS,
    ),
    Case("an extension without end", chunked(b"3;" + b"x" * 5000), "bad", h11="more", llhttp="more", why=LIMITS),
    Case("trailer", chunked(b"0\r\nx: y\r\n\r\n"), "ok"),
    Case("two trailers", chunked(b"0\r\nx: y\r\nz: w\r\n\r\n"), "ok"),
    Case("trailer of a bad name", chunked(b"0\r\nx y: z\r\n\r\n"), "bad"),
    Case("trailer with a space before the colon", chunked(b"0\r\nx : y\r\n\r\n"), "bad"),
    Case("trailer without a colon", chunked(b"0\r\nx\r\n\r\n"), "bad"),
    Case("folded trailer", chunked(b"0\r\nx: y\r\n z\r\n\r\n"), "bad", h11="ok", why=FOLDS),
    Case("trailer behind a line feed alone", chunked(b"0\r\nx: y\nz: w\r\n\r\n"), "bad", h11="ok", why=CRLF),
    Case("line feed alone at the end", chunked(b"0\r\n\n"), "bad", h11="ok", why=CRLF),
    Case("line feeds alone at the end of chunks", chunked(b"0\n\n"), "bad", h11="more", why=CRLF),
    Case("no blank line at the end", chunked(b"0\r\n"), "more"),
    Case("no last chunk", chunked(b"3\r\nabc\r\n"), "more"),
    Case("chunk not complete", chunked(b"3\r\nab"), "more"),
    Case("size not complete", chunked(b"3"), "more"),
    Case("too many trailers", chunked(b"0\r\n" + b"x: y\r\n" * 33 + b"\r\n"), "bad", h11="ok", llhttp="ok", why=LIMITS),
]
CASES = [*REQUEST_LINES, *FIELDS, *LENGTHS, *CODINGS, *CHUNKS]

# -- requests that two servers may end in two places -------------------------------------------------------------------

# A header in disguise: "?" is a byte that does not belong there. It stands around a name and a value or amid them ...
AROUND = (
    "?n-m: v",
    "n?-m: v",
    "n-m?: v",
    "n-m:?v",
    "n-m: v?",
    "?n-m?: v",
    "?n-m:?v",
    "?n-m: v?",
    "n-m?:?v",
    "n-m?: v?",
)
# ... or between the header and another one, or is a line of its own.
BETWEEN = ("n-m:?v?", "x: y?n-m: v", "n-m: v?x: y", "x: y\r?n-m: v", "n-m: v\r?x: y", "x: y?\nn-m: v", "n-m: v?\nx: y")
LINES = ("?\r\nn-m: v", "x: y\r\n?\r\nn-m: v", "n-m:?\r\n v", "n-m: v\r\n?x: y")
# Of the bytes above ASCII some are blanks or line ends, or vanish, in Latin-1.
ODD_BYTES = [chr(byte) for byte in (*range(0x21), 0x7F, 0x80, 0x85, 0xA0, 0xAD, 0xFF)]
# An honest header, the parts of the other one, and a body that goes on behind the end that one of them gives it.
TWO_ENDS = [
    (b"Content-Length: 4\r\n", ("Transfer", "Encoding", "chunked"), b"1\r\nZ\r\n0\r\n\r\n"),
    (b"Content-Length: 6\r\n", ("Transfer", "Encoding", "chunked"), b"0\r\n\r\nX"),
    (b"Content-Length: 4\r\n", ("Content", "Length", "6"), b"abcdef"),
    (b"Transfer-Encoding: chunked\r\n", ("Content", "Length", "4"), b"1\r\nZ\r\n0\r\n\r\n"),
]


def disguised_requests() -> Iterator[bytes]:
    """Requests of which two servers may see the end in two places, because one of two headers is in disguise."""
    for (honest, parts, body), odd in itertools.product(TWO_ENDS, ODD_BYTES):
        put_in = str.maketrans(dict(zip("nmv?", (*parts, odd), strict=True)))
        for place in (*AROUND, *BETWEEN, *LINES):
            line = place.translate(put_in).encode("latin-1") + b"\r\n"
            yield post(line + honest, body)
            yield post(honest + line, body)
