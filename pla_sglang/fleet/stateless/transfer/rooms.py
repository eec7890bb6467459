"""Under which rooms KV is given away: each once, to one receiver. A room (``bootstrap_room``) is a transfer's id.

The host keeps what a receiver said for ever, and knows nothing of a room that is over. Here a room that no prefill part
claims is forgotten after a time-out, and one that is over is known for long.

A receiver that wants the KV of a *held* request says so to the sender, in a message of ours beside the host's own, over
the same connection. The sender answers only where it will never send: the room is not held, or was given up. So a pull
of a room that nobody holds ends at once, with 410; the host's protocol has no word for that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

import zmq

from pla_sglang.fleet.stateless.host import calls
from pla_sglang.fleet.stateless.host.calls import is_registered, tcp_address
from pla_sglang.fleet.stateless.host.side_channel import ABORT, GUARD, NO_ROOM, PULL, REGISTERS, read_receiver
from pla_sglang.fleet.stateless.host.side_channel import Receiver as Puller
from pla_sglang.plugin.engine.host.transfers import forget_sent

logger = logging.getLogger(__name__)

KEPT_S = 300.0  # as long as the host lets a prefill part wait for its handshake
MOST_USED_ROOMS = 100_000  # remembered; no clock says how long, as those of ranks differ
GRACE_S = 0.5  # a pull may come before the hold of its room is made


def forget_room(manager: Any, room: int) -> None:
    """What the sending KV manager has of a room that no transfer reads or writes for."""
    forget_sent(manager, room)
    for name in ("transfer_infos", "request_status", "req_to_decode_prefix_len", "failure_records"):
        getattr(manager, name).pop(room, None)


def give_back(scheduler: Any, manager: Any, req: Any) -> None:
    """The sender's entry and the metadata buffer of ``req``, which no transfer reads."""
    req.disagg_kv_sender.clear()
    forget_room(manager, req.bootstrap_room)
    calls.free_metadata(scheduler, req)


class UsedRooms:
    """Rooms of prefill parts and of paused requests, in use and over. All ranks have the same ones.

    Changed by the scheduler's thread; ``is_over`` is asked by the one that reads what receivers say, too.
    """

    def __init__(self) -> None:
        self._in_use: set[int] = set()
        self._over: dict[int, None] = {}  # the latest last

    def __contains__(self, room: int) -> bool:
        return room in self._in_use or room in self._over

    def is_over(self, room: int) -> bool:
        return room in self._over and room not in self._in_use

    def begin(self, room: int) -> None:
        self._in_use.add(room)

    def end(self, room: int) -> None:
        """Its KV was sent, or never will be: an instance that is late might still ask for it."""
        self._in_use.discard(room)
        self._over[room] = None
        if len(self._over) > MOST_USED_ROOMS:
            del self._over[next(iter(self._over))]


class UnclaimedRooms:
    """Since when each unclaimed room has been known."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._since_s)

    def sweep(self, manager: Any, claimed: Collection[int], now_s: float) -> None:
        """``manager``: the host's sending KV manager; ``claimed``: rooms of legs that are here."""
        known = [room for room in list(manager.transfer_infos) if room not in claimed]
        self._since_s = {room: self._since_s.get(room, now_s) for room in known}
        for room in [room for room, since_s in self._since_s.items() if now_s - since_s >= KEPT_S]:
            forget_room(manager, room)
            del self._since_s[room]


class OpenRooms:
    """Rooms whose KV can be asked for. The host's bootstrap thread says who asks, the scheduler's thread what is held.

    Args:
        refuse: tell a puller that it will not get a room.
    """

    def __init__(self, refuse: Callable[[Puller, int], None]) -> None:
        self._refuse = refuse
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._asked: dict[int, list[Puller]] = {}  # of open rooms, and of those that may be opened soon
        self._since_s: dict[int, float] = {}  # when a room that is not open was first looked at

    def __contains__(self, room: int) -> bool:
        return room in self._open

    def open(self, room: int) -> None:
        with self._lock:
            self._open.add(room)
            self._since_s.pop(room, None)

    def close(self, room: int, *, refuse: bool) -> None:
        """Nobody gets it any more; who has asked is told so with ``refuse``."""
        with self._lock:
            self._open.discard(room)
            pullers = self._asked.pop(room, [])
        for puller in pullers if refuse else ():
            self._refuse(puller, room)

    def on_pull(self, puller: Puller, room: int) -> None:
        """Called by the bootstrap thread."""
        with self._lock:
            self._asked.setdefault(room, []).append(puller)

    def refuse_unheld(self, now_s: float) -> None:
        """Pulls of rooms that were not opened for a while."""
        if len(self._asked) == 0:
            return
        with self._lock:
            closed = [room for room in self._asked if room not in self._open]
            self._since_s = {room: self._since_s.get(room, now_s) for room in closed}
            late = [room for room, since_s in self._since_s.items() if now_s - since_s >= GRACE_S]
        for room in late:
            self.close(room, refuse=True)


def refuses_receiver(manager: Any, used: UsedRooms, message: list[bytes]) -> bool:
    """Tells whether a receiver says where to write the KV of a room that is over, or another's. It is told so.

    The host would listen to it, and would then write to both, or to neither and leave one waiting.
    """
    if len(message) < 5 or message[0] != GUARD or message[1] == REGISTERS:
        return False
    room, puller, agent = int(message[1]), (message[2].decode("ascii"), int(message[3])), message[4].decode("ascii")
    receivers = manager.transfer_infos.get(room, {})
    if not receivers and not used.is_over(room) and not calls.is_past_asking(manager, room):
        return False
    if agent not in receivers:  # else it has asked before, and what it is told of the room it would take for that
        send_refusal(manager, puller, room)
    return True


def aborts_of_another(manager: Any, message: list[bytes]) -> bool:
    """Tells whether a receiver gives up a room whose KV goes to others."""
    given_up = read_receiver(message) if message[:1] == [ABORT] else None
    if given_up is None:
        return False
    who, room = given_up
    receivers = list(manager.transfer_infos.get(room, {}).values())
    return bool(receivers) and all((one.endpoint, one.dst_port) != who for one in receivers)


def send_refusal(manager: Any, puller: Puller, room: int) -> None:
    """By the sending ``manager``, from any thread; to receivers that it knows, as anybody may have asked."""
    if not is_registered(manager, *puller):
        return  # it was when it asked
    endpoint, is_ipv6 = tcp_address(*puller)
    try:
        manager._send_multipart_locked(endpoint, [NO_ROOM, str(room).encode("ascii")], is_ipv6=is_ipv6)
    except zmq.ZMQError:
        logger.exception("pla_sglang: telling %s that room %d is not held", endpoint, room)


def announce_pull(receiver: Any) -> None:
    """Say to the sender that the room of ``receiver`` is that of a paused request. After the host's own message."""
    manager = receiver.kv_mgr
    address = [manager.local_ip.encode("ascii"), str(manager.rank_port).encode("ascii")]
    message = [PULL, str(receiver.bootstrap_room).encode("ascii"), *address]
    for peer in receiver.bootstrap_infos or ():
        try:
            socket, lock = receiver._connect_to_bootstrap_server(peer)
            with lock:
                socket.send_multipart(message)
        except zmq.ZMQError:
            logger.exception("pla_sglang: announcing the pull of room %s", receiver.bootstrap_room)
