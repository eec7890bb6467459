"""When is a NIXL sender through with what was queued before? Its workers take chunks in order, one at a time.

So a mark that is put behind the chunks of every worker's queue is reached only when all earlier transfers are over. A
mark looks like a chunk of a room that has failed, which a worker skips.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Set
from typing import Any

import zmq

from pla_sglang.fleet.stateless.host.calls import is_registered, mark_failed, tcp_address
from pla_sglang.fleet.stateless.host.side_channel import (
    ABORT,
    ACKNOWLEDGED,
    NO_ROOM,
    Drop,
    SideChannel,
    read_receiver,
    read_room,
)

logger = logging.getLogger(__name__)

READER = "what senders say"
FENCE_ROOM = -1  # no request has it: rooms are not negative


class Fence:
    """Counts the workers that have reached their mark. ``on_passed`` is called by the last one, in its thread."""

    def __init__(self, workers: int, on_passed: Callable[[], None] | None = None) -> None:
        self._left = workers
        self._lock = threading.Lock()
        self._on_passed = on_passed
        self.passed = workers == 0

    def arrive(self) -> None:
        """A worker is at its mark. Never raises: the host reads it outside of any ``try``."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if not last:
            return
        self.passed = True
        try:
            if self._on_passed is not None:
                self._on_passed()
        except Exception:
            logger.exception("pla_sglang: after the last transfer of a room")


class FenceMark:
    """Stands in a worker's queue in place of a chunk. Reading its room is how the worker says that it is there."""

    staging_counted = True  # of versions whose workers ask: they have nothing to count

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    @property
    def room(self) -> int:
        self._fence.arrive()
        return FENCE_ROOM


def place_fence(manager: Any, on_passed: Callable[[], None] | None = None) -> Fence:
    """Behind everything that the sender ``manager`` has queued so far."""
    mark_failed(manager, FENCE_ROOM)
    queues = manager.transfer_queues
    fence = Fence(len(queues), on_passed)
    for queue in queues:
        queue.put(FenceMark(fence))
    return fence


def acknowledge_abort(manager: Any, message: list[bytes], channel: SideChannel) -> None:
    """Answer a receiver's abort once its room's transfers are over. The room is marked as failed already.

    Anybody may send such a message: what it names is connected to only where a receiver is known.
    """
    given_up = read_receiver(message) if message[:1] == [ABORT] else None
    if given_up is None:
        return
    (name, port), _ = given_up
    room = message[1]
    if not is_registered(manager, name, port):
        channel.drop(Drop.UNKNOWN, ABORT)
        return
    endpoint, is_ipv6 = tcp_address(name, port)

    def answer() -> None:
        manager._send_multipart_locked(endpoint, [ACKNOWLEDGED, room], is_ipv6=is_ipv6)

    place_fence(manager, answer)


class Acknowledged:
    """What senders have said of rooms: that they are through with an abort, or that they hold no such room.

    One thread reads it from the receiver's own socket. Senders also speak of rooms that nobody waits for, such as those
    of legs that were aborted before they had memory; others than senders may say anything.
    """

    def __init__(self, channel: SideChannel) -> None:
        self._channel = channel
        self._rooms: set[int] = set()
        self._refused: set[int] = set()

    def listen(self, socket: Any) -> None:
        """By a thread of our own, until ``socket`` is closed: where the host reads nothing from it."""
        threading.Thread(target=self._listen, args=(socket,), name="pla-abort-acks", daemon=True).start()

    def _listen(self, socket: Any) -> None:
        self._channel.note_reader(READER)
        while True:
            try:
                message = socket.recv_multipart()
            except zmq.ZMQError:
                return  # the socket is closed: the process ends
            if not self.take(message):
                self._channel.drop(Drop.FOREIGN, message[0])

    def take(self, message: list[bytes]) -> bool:
        """Tells whether ``message`` has a word of ours. What it says is noted; it is dropped where that cannot be
        read."""
        said = {ACKNOWLEDGED: self._rooms, NO_ROOM: self._refused}.get(message[0])
        if said is None:
            return False
        room = read_room(message[1]) if len(message) == 2 else None
        if room is None:
            self._channel.drop(Drop.MALFORMED, message[0])
        else:
            said.add(room)
        return True

    def has(self, room: int) -> bool:
        return room in self._rooms

    def is_refused(self, room: int) -> bool:
        return room in self._refused

    def forget(self, room: int) -> None:
        self._rooms.discard(room)
        self._refused.discard(room)

    def keep_only(self, rooms: Set[int]) -> None:
        """Forget what was said of all other rooms."""
        for said in (self._rooms, self._refused):
            said -= said - rooms  # in place: what the thread adds meanwhile stays


class ReceiverInbox:
    """The receiving end's socket where a thread of the host reads it, as that thread reads it.

    Args:
        words: those of the host that senders say.
    """

    def __init__(self, socket: Any, channel: SideChannel, words: Set[bytes]) -> None:
        self._socket, self._channel, self._words = socket, channel, words
        self.acknowledged = Acknowledged(channel)

    def recv_multipart(self) -> list[bytes]:
        """The next message that is the host's."""
        self._channel.note_reader(READER)
        while True:
            message: list[bytes] = self._socket.recv_multipart()
            if message[0] in self._words:
                return message
            if not self.acknowledged.take(message):
                self._channel.drop(Drop.FOREIGN, message[0])


def hear_senders(manager: Any, channel: SideChannel) -> Acknowledged:
    """What senders say to the receiver ``manager``, from now on or since its host's thread started."""
    socket = manager.server_socket
    if isinstance(socket, ReceiverInbox):
        return socket.acknowledged
    acknowledged = Acknowledged(channel)
    acknowledged.listen(socket)
    return acknowledged
