"""What comes over the side channel of a transfer: a socket at each end, to which anybody who reaches it can send.

The host's thread at the sending end takes every message for one of its own and ends with an exception where it is none;
nobody could be handed KV from then on. So it reads through ``Inbox``, which lets nothing out that the host cannot read.
Both ends count what they drop. A thread that has ended all the same makes the instance not ready.
"""

from __future__ import annotations

import enum
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

GUARD = b"NixlMsgGuard"  # SGLang's, before what a receiver says of itself or of a room
ABORT = b"ABORT"
PULL = b"PLA_PULL"
ACKNOWLEDGED = b"PLA_ABORT_ACK"
NO_ROOM = b"PLA_NO_ROOM"  # to a receiver that pulls a paused request: its room is not held
REGISTERS = b"None"  # in place of a room
LINE_S = 10.0  # between two lines on dropped messages
MOST_SHOWN = 40  # bytes of a message's first frame

_DIGITS = re.compile(rb"[0-9]{1,19}")
_HOST = re.compile(rb"[0-9A-Za-z.:_%-]{1,255}")

Receiver = tuple[str, int]  # host and port of a receiver's manager


class Drop(enum.Enum):
    """Why a message was dropped."""

    FOREIGN = "foreign"  # no word of the host's or ours
    MALFORMED = "malformed"  # such a word, with something else behind it than it has
    UNKNOWN = "unknown"  # of a receiver that has not registered here, and so would not be answered


class SideChannel:
    """Counts what one scheduler process has dropped, and knows which threads read. Called by these threads."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._dropped = dict.fromkeys(Drop, 0)
        self._line_s = float("-inf")  # of the last line
        self._readers: dict[str, threading.Thread] = {}

    def drop(self, reason: Drop, what: bytes) -> None:
        """Count a message; ``what``: its first frame. Anybody may send any number: a line every ``LINE_S`` at most."""
        now_s = self._now_s()
        with self._lock:
            self._dropped[reason] += 1
            if now_s - self._line_s < LINE_S:
                return
            self._line_s = now_s
            total = sum(self._dropped.values())
        shown = what[:MOST_SHOWN]
        logger.warning(
            "pla_sglang: dropped a %s message on the side channel: %r (%d so far)", reason.value, shown, total
        )

    def count_dropped(self) -> dict[str, int]:
        with self._lock:
            return {reason.value: count for reason, count in self._dropped.items()}

    def note_reader(self, name: str) -> None:
        """The thread that calls reads messages, as long as this instance lives."""
        self._readers[name] = threading.current_thread()

    def find_dead(self) -> str:
        """Which thread has ended; empty: none."""
        return next((name for name, thread in list(self._readers.items()) if not thread.is_alive()), "")


class Inbox:
    """The sending end's socket, as the host's thread reads it.

    Args:
        parse: reads a message of the host's, as the host does; raises where it cannot be read.
        is_known: whether a receiver has registered.
    """

    def __init__(
        self,
        socket: Any,
        channel: SideChannel,
        *,
        parse: Callable[[list[bytes]], Any],
        is_known: Callable[[str, int], bool],
    ) -> None:
        self._socket, self._channel = socket, channel
        self._parse, self._is_known = parse, is_known

    def recv_multipart(self) -> list[bytes]:
        """The next message that the host, or the seam behind it, can work with."""
        self._channel.note_reader("what receivers say")
        while True:
            message: list[bytes] = self._socket.recv_multipart()
            reason = self._judge(message)
            if reason is None:
                return message
            self._channel.drop(reason, message[0] if message else b"")

    def _judge(self, message: list[bytes]) -> Drop | None:
        """Why it must be dropped; None: it fits."""
        word = message[0] if message else b""
        if word == GUARD:
            return self._judge_host(message[1:])
        if word == ABORT:  # the host does what it says for a room that it knows, whoever asks
            return Drop.MALFORMED if read_receiver(message) is None else None
        if word == PULL:
            asked = read_receiver(message)
            return Drop.MALFORMED if asked is None else None if self._is_known(*asked[0]) else Drop.UNKNOWN
        return Drop.FOREIGN

    def _judge_host(self, fields: list[bytes]) -> Drop | None:
        if not fields or (fields[0] != REGISTERS and read_room(fields[0]) is None):
            return Drop.MALFORMED
        try:
            self._parse(fields)
        except Exception:  # whatever the host raises there would end its thread
            return Drop.MALFORMED
        return None


def read_room(text: bytes) -> int | None:
    """The room that ``text`` names; None: it names none. Strictly: ``int`` takes signs, blanks and underscores too."""
    return int(text) if _DIGITS.fullmatch(text) else None


def read_receiver(message: list[bytes]) -> tuple[Receiver, int] | None:
    """Which receiver speaks of which room; None where that cannot be read. Four frames, and a fifth where it counts its
    aborts of a room."""
    if len(message) not in (4, 5) or (len(message) == 5 and read_room(message[4]) is None):
        return None
    _, room_text, host, port_text = message[:4]
    room, port = read_room(room_text), read_room(port_text)
    if room is None or port is None or not 1 <= port <= 65_535 or _HOST.fullmatch(host) is None:
        return None
    return (host.decode("ascii"), port), room
