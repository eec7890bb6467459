"""Where a message's body ends. Bytes are looked at and not changed, so they can be passed on as they came."""

from __future__ import annotations

import re

from pla_sglang.fleet.router.http.head import BODILESS, FIELD, BadMessage, ResponseHead

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(FIELD)
MAX_LINE_BYTES = 4096  # of a chunk-size line or a trailer
MAX_TRAILERS = 32
# Size lines that were found good, and what they say: events of a stream have few sizes.
_SEEN: dict[bytes, int] = {}
SEEN_LINES, SEEN_LINE_BYTES = 4096, 8


class Framing:
    """Follows one body through the pieces in which it arrives."""

    __slots__ = ()

    def feed_data(self, data: bytes, start: int, payload: list[bytes] | None = None) -> int:
        """Read on at ``data[start:]``.

        Returns:
            The position behind the body's last byte, or -1 where it goes on. With ``payload``, the content without
            its framing is appended there.

        Raises:
            BadMessage: the framing is broken.
        """
        raise NotImplementedError

    def take_whole(self, data: bytes) -> bytes:
        """The content of ``data`` where that is one chunk and nothing else, as nearly always in a stream; it counts as
        read. b"" where it is not, and nothing was read."""
        return b""

    def at_boundary(self) -> bool:
        """True if something of ours may be put in behind what was read so far."""
        return False


class Sized(Framing):
    """A body of a given length; also the absent body, of length 0."""

    __slots__ = ("left",)

    def __init__(self, length: int) -> None:
        self.left = length

    def feed_data(self, data: bytes, start: int, payload: list[bytes] | None = None) -> int:
        have = len(data) - start
        if have < self.left:
            self.left -= have
            if payload is not None:
                payload.append(data[start:] if start else data)
            return -1
        end = start + self.left
        if payload is not None and self.left:
            payload.append(data[start:end])
        self.left = 0
        return end


class UntilClose(Framing):
    """A body that ends with its connection (HTTP/1.0)."""

    __slots__ = ()

    def feed_data(self, data: bytes, start: int, payload: list[bytes] | None = None) -> int:
        if payload is not None:
            payload.append(data[start:])
        return -1


class Chunked(Framing):
    """The chunked coding. ``_left`` counts down a chunk's data and the line end behind it."""

    __slots__ = ("_left", "_line", "_trailers", "size")

    def __init__(self) -> None:
        self._left = 0  # bytes of the present chunk, its closing CRLF included
        self._line = b""  # a size line or trailer that has begun
        self._trailers = -1  # lines seen behind the last chunk; -1: not there yet
        self.size = 0  # bytes of content announced so far

    def feed_data(self, data: bytes, start: int, payload: list[bytes] | None = None) -> int:
        position, end = start, len(data)
        while position < end:
            if self._left:
                position = self._skip_data(data, position, payload)
                continue
            stop = data.find(b"\n", position) + 1
            if not stop:
                self._line += data[position:]
                self._check_line_length(len(self._line))
                return -1
            line, position = data[position:stop], stop
            if self._line:
                line, self._line = self._line + line, b""
            if self._trailers >= 0:
                self._check_line_length(len(line))
                if self._is_last_trailer(line):
                    return position
                continue
            size = _SEEN.get(line)
            if size is None:
                size = self._read_size_line(line)
            if not size:
                self._trailers = 0
                continue
            self.size += size
            if position + size + 2 <= end:  # all of it is here, which is the usual case
                if payload is not None:
                    payload.append(data[position : position + size])
                position += size + 2
                if data[position - 2 : position] != b"\r\n":
                    raise BadMessage("chunk", "a chunk is longer than its size says")
            else:
                self._left = size + 2
        return -1

    def take_whole(self, data: bytes) -> bytes:
        if self._left or self._line or self._trailers >= 0:
            return b""
        start = data.find(b"\n") + 1
        size = _SEEN.get(data[:start])
        if not size or start + size + 2 != len(data) or not data.endswith(b"\r\n"):
            return b""
        self.size += size
        return data[start:-2]

    def _skip_data(self, data: bytes, position: int, payload: list[bytes] | None) -> int:
        """Past the chunk's data, as far as it is here; checks the CRLF that closes it."""
        have = min(len(data) - position, self._left)
        content = min(have, max(0, self._left - 2))
        if payload is not None and content:
            payload.append(data[position : position + content])
        closing = data[position + content : position + have]
        expected = b"\r\n"[2 - self._left :] if self._left < 2 else b"\r\n"
        if closing != expected[: len(closing)]:
            raise BadMessage("chunk", "a chunk is longer than its size says")
        self._left -= have
        return position + have

    def _read_size_line(self, line: bytes) -> int:
        self._check_line_length(len(line))
        match = _SIZE.fullmatch(line, 0, len(line) - 2) if line.endswith(b"\r\n") else None
        if match is None:
            raise BadMessage("chunk", f"{line[:20]!r} is no chunk size with CRLF")
        size = int(match[1], 16)
        if len(line) <= SEEN_LINE_BYTES:
            if len(_SEEN) >= SEEN_LINES:
                _SEEN.clear()
            _SEEN[line] = size
        return size

    def _is_last_trailer(self, line: bytes) -> bool:
        """True if ``line`` is the blank one that ends the message."""
        if not line.endswith(b"\r\n"):
            raise BadMessage("chunk", "a chunk's line must end with CRLF")
        if line == b"\r\n":
            return True
        self._trailers += 1
        if self._trailers > MAX_TRAILERS or _TRAILER.fullmatch(line) is None:
            raise BadMessage("chunk", f"trailers are no header lines, or more than {MAX_TRAILERS}")
        return False

    def _check_line_length(self, length: int) -> None:
        if length > MAX_LINE_BYTES:
            raise BadMessage("chunk", f"a line of the chunked coding is longer than {MAX_LINE_BYTES} bytes")

    def at_boundary(self) -> bool:
        return self._left == 0 and not self._line and self._trailers < 0


def response_framing(head: ResponseHead, method: str) -> Framing:
    """How the body behind ``head`` ends, where the request had ``method`` (RFC 9112, section 6.3)."""
    if method == "HEAD" or head.status in BODILESS:
        return Sized(0)
    if head.chunked:
        return Chunked()
    return UntilClose() if head.length is None else Sized(head.length)
