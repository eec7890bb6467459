"""A stream whose events carry their token ids: what the relay takes from it, and what it passes on.

An engine's front writes comment lines of SSE in front of the events of a stream that the router has marked
(``pla_movable``, docs/protocol.md):

    : pla-prompt 812:9f3ab2c41d      once: length and hash of the prompt's token ids
    : pla 17,4095,3 c120.r0.a33      token ids of the event that follows, and what of the answer was shown so far
    : pla - c131.r0.a33              for a further event of the same tokens

A comment with a blank line behind it belongs to tokens that show nothing yet. A stream without comments is one that its
instance cannot move. The lines are for the router alone. An event is passed on when it is complete, and only then are
its tokens counted: what the client has and what is known here is the same at every byte. No sockets here.
"""

from __future__ import annotations

import re
from array import array

from pla_sglang.fleet.router.relay.counters import ByteAccount
from pla_sglang.fleet.router.relay.response_errors import ABORT_MARK, CODE_MARK, given_up

DONE = b"data: [DONE]\n\n"
_END = b"\n\n"
_COMMENT = b": pla"
_TOKENS, _PROMPT = b": pla ", b": pla-prompt "
_NO_IDS = b"-"
# What nearly every piece of a stream is: one token and its event. Up to nine digits: it fits into an id.
_ONE_TOKEN = re.compile(rb": pla ([0-9]{1,9}) ([^\n]*)\n(data[^\n]*\n\n)")
_ID_BYTES = 4
_IDS_STEP = 1024  # ids whose memory is counted at a time
# In JSON, quotes inside strings are escaped, so a model's words cannot look like these.
_FINISHED = re.compile(rb'"finish_reason":\s*["{]')
_USAGE = re.compile(rb'"choices":\s*\[\]')


class MarkedStreamReader:
    """One answer over all its attempts.

    Args:
        account: counts the memory of the ids.
        wants_usage: the answer's last event before its end holds the usage (OpenAI's ``include_usage``).

    Attributes:
        ids: of the tokens that the client has.
        seen: the last cursor of what the client has, for the instance that goes on; "" before the first.
        prompt: ``LENGTH:HASH``; "" where it was not said.
        given_up: the event that says that its instance has given it up; neither that nor what follows is passed on.
        is_done: the stream's last event was passed on.
        is_good: False where a comment was not as it must be, or there is no memory for the ids.
    """

    __slots__ = (
        "_account",
        "_counted",
        "_recent",
        "_rest",
        "_seen",
        "_skip",
        "_unmarked",
        "_wants_usage",
        "given_up",
        "ids",
        "is_done",
        "is_good",
        "prompt",
    )

    def __init__(self, account: ByteAccount, *, wants_usage: bool = False) -> None:
        self._account, self._wants_usage = account, wants_usage
        self.ids = array("I")
        self._seen = b""
        self.prompt, self.given_up = "", b""
        self.is_done, self.is_good = False, True
        self._counted = 0  # ids whose memory is counted
        self._rest = b""  # of an event that is not complete
        self._recent: list[bytes] = []  # events since the last that brought tokens, with it
        self._unmarked = 0  # of them, those behind the last comment
        self._skip = 0  # events without comments of this attempt that the client has from the one before

    @property
    def seen(self) -> str:
        return self._seen.decode("latin-1")

    @property
    def can_go_on(self) -> bool:
        """True if another instance could go on with the stream, as far as is known."""
        return self.is_good and self.prompt != ""

    def take_events(self, data: bytes) -> bytes:
        """The events that ``data`` completes, as the client gets them."""
        usual = not (self._rest or self._skip) and data.rfind(ABORT_MARK) < 0
        if usual and (one := _ONE_TOKEN.fullmatch(data)) is not None:
            token, self._seen, event = one.groups()
            self.ids.append(int(token))
            self._recent = [event]
            self._unmarked = 0
            if len(self.ids) > self._counted:
                self._count_ids()
            return event
        if self._rest:
            data, self._rest = self._rest + data, b""
        if not data.endswith(_END):
            end = data.rfind(_END) + 2
            if end == 1:
                self._rest = data
                return b""
            data, self._rest = data[:end], data[end:]
        return self._take_each(self._cut_given_up(data) if ABORT_MARK in data or CODE_MARK in data else data)

    def _cut_given_up(self, data: bytes) -> bytes:
        """``data``: complete events. Those before the one that gives the request up."""
        start = 0
        while start < len(data):
            end = data.index(_END, start) + 2
            if given_up(data[start:end]):
                self.given_up = data[start:end]
                return data[:start]
            start = end
        return data

    def take_rest(self) -> bytes:
        """What is left where the stream has ended in the middle of an event."""
        rest, self._rest = self._rest, b""
        return rest

    def begin_attempt(self) -> None:
        """Another instance goes on behind the last event with a comment; what came behind that it will say again."""
        self._rest, self.given_up, self._skip = b"", b"", self._unmarked

    def take_end(self) -> bytes | None:
        """Its instance is lost. What the client still has to get if nothing has to be computed for it: the mark of the
        end, or nothing. None: the answer is not complete."""
        self._rest = b""
        if self.is_done:
            return b""
        finished = any(_FINISHED.search(event) for event in self._recent)
        if not finished or (self._wants_usage and not any(_USAGE.search(event) for event in self._recent)):
            return None
        self._skip = 0
        return DONE

    def free_ids(self) -> None:
        """The request has ended."""
        self._account.free_bytes(self._counted * _ID_BYTES)
        self._counted = 0

    def _take_each(self, data: bytes) -> bytes:
        """``data``: complete events."""
        events, start, length = [], 0, len(data)
        while start < length:
            end = data.index(_END, start) + 2
            behind = data.find(b"\n", start) + 1  # the first line
            if data.startswith(_TOKENS, start) and data.startswith(b"data", behind) and not self._skip:  # as nearly all
                self._note_tokens(data[start + len(_TOKENS) : behind - 1])
                self._unmarked = 0
                event = data[behind:end]
                self._recent.append(event)
                events.append(event)
            else:
                event = self._take_other(data[start:end])
                if event:
                    events.append(event)
            start = end
        return events[0] if len(events) == 1 else b"".join(events)

    def _take_other(self, event: bytes) -> bytes:
        """What the client gets of it; b"": nothing."""
        marked = False
        while event.startswith(_COMMENT):
            line, _, event = event.partition(b"\n")
            marked = self._note_comment(line) or marked
        return event if self._passes(event, marked=marked) else b""

    def _passes(self, event: bytes, *, marked: bool) -> bool:
        """Notes a complete event. Whether the client gets it."""
        if marked:
            self._unmarked = self._skip = 0
        if event == b"\n":  # a comment with no event behind it
            return False
        if marked:
            self._recent.append(event)
            return True
        if self._skip:
            self._skip -= 1
            return False
        self._recent.append(event)
        self._unmarked += 1
        self.is_done = self.is_done or event == DONE
        return True

    def _note_comment(self, line: bytes) -> bool:
        """True if the comment has the tokens of an event."""
        if line.startswith(_TOKENS):
            self._note_tokens(line[len(_TOKENS) :])
            return True
        if line.startswith(_PROMPT):
            self.prompt = self.prompt or line[len(_PROMPT) :].decode("latin-1")
        return False

    def _note_tokens(self, words: bytes) -> None:
        ids, _, self._seen = words.partition(b" ")
        if ids != _NO_IDS:
            self._recent = []
            try:
                if ids.isdigit():  # ``int`` alone takes signs, blanks and underscores too
                    self.ids.append(int(ids))
                elif ids.replace(b",", b"").isdigit():
                    self.ids.extend(map(int, ids.split(b",")))
                else:
                    self.is_good = False
            except (ValueError, OverflowError):
                self.is_good = False
        if len(self.ids) > self._counted:
            self._count_ids()

    def _count_ids(self) -> None:
        """The memory of further ids; without it the stream can no more go on."""
        if self.is_good:
            self.is_good = self._account.try_hold(_IDS_STEP * _ID_BYTES)
            self._counted += _IDS_STEP * self.is_good
