"""Connects to peers ahead of the first request, in a few threads of its own.

SGLang asks a peer's bootstrap server at the first request that names it: HTTP with a time-out of 5 s, in the
scheduler's thread. Here both questions (``try_ensure_parallel_info``, ``_setup_bootstrap_infos``) are asked as soon as
a peer is told, so the scheduler only ever finds the answers.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import logging
import threading
import time
from http import HTTPStatus
from typing import Any

from pla_sglang.common.errors import PlaError
from pla_sglang.fleet.stateless.transfer.peers import Peer, PeerBook, PeerState
from pla_sglang.plugin.engine.host.transfers import is_bootstrap_answer

logger = logging.getLogger(__name__)

THREADS = 8
RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
PATIENCE_S = 3.0  # a peer that does not answer for so long counts as failed; retries continue
ASK_S = 5.0  # time-out of one question
OF_ALL_RANKS = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


class IncompatiblePeerError(PlaError):
    """A peer that answers and cannot be paired with; it is not asked again."""


@dataclasses.dataclass(order=True)
class Question:
    """A peer that is to be asked; those that are due first come first."""

    due_s: float
    number: int
    peer: Peer = dataclasses.field(compare=False)
    began_s: float = dataclasses.field(compare=False)
    wait_s: float = dataclasses.field(compare=False)  # after it, if it is not answered


class PeerConnector:
    """Owned by the scheduler. A peer is asked until it is ready, does not fit, or is told no more.

    At most ``THREADS`` run, however many peers there are, and none where nobody is left to ask.

    Args:
        manager: the host's receiving KV manager, whose tables are filled.
        receiver_class: the host's receiver of its backend.
    """

    def __init__(self, manager: Any, receiver_class: Any, book: PeerBook) -> None:
        self._manager = manager
        self._receiver_class = receiver_class
        self._book = book
        self._rooms = itertools.count(2)  # taken negative: no request has such a room
        self._numbers = itertools.count()
        self._running: set[Peer] = set()  # asked now, or waiting for it
        self._waiting: list[Question] = []  # a heap
        self._threads = 0
        self._changed = threading.Condition()  # guards the three

    def connect(self, peer: Peer) -> None:
        """Start to warm ``peer``, unless that is under way."""
        now_s = time.monotonic()
        with self._changed:
            if peer in self._running:
                return
            self._running.add(peer)
            heapq.heappush(self._waiting, Question(now_s, next(self._numbers), peer, now_s, RETRY_S))
            if self._threads < THREADS:
                self._threads += 1
                threading.Thread(target=self._work, name="pla-warm", daemon=True).start()
            self._changed.notify()

    def reconnect(self) -> None:
        """Peers whose connection the host has given up since, as after failed heartbeats, and those not yet ready.

        One that is not ready may be asked no more, as it was forgotten for a moment.
        """
        for peer in self._book.list_in(PeerState.READY):
            if not self.is_connected(*peer.address):
                self._book.set_state(peer, PeerState.WARMING)
        for peer in self._book.list_in(PeerState.WARMING, PeerState.SILENT):
            self.connect(peer)

    def drop(self, peer: Peer) -> None:
        """Forget what was cached of ``peer``'s process, which is not there any more or not needed.

        Requests that wait for its KV fail: its address may be listened to by another process already, so they may not
        wait for heartbeats to fail.
        """
        address = address_text(peer)
        if address in self._manager.prefill_info_table or address in self._manager.addr_to_rooms_tracker:
            self._manager._handle_node_failure(address)

    def is_connected(self, host: str, port: int) -> bool:
        """Tells whether a receiver for this address would be made without asking anybody."""
        address = f"{host}:{port}"
        info = self._manager.prefill_info_table.get(address)
        if info is None:
            return False
        keys = (f"{address}_0_{rank}_{info.target_tp_rank}" for rank in info.target_cp_ranks)
        return all(key in self._manager.connection_pool for key in keys)

    def _work(self) -> None:
        while (question := self._take_due()) is not None:
            goes_on = False
            try:
                goes_on = self._ask(question)
            finally:
                self._put_back(question, goes_on=goes_on)

    def _take_due(self) -> Question | None:
        """The next question, once it is due; None: there is none, and the thread that asks ends."""
        with self._changed:
            while self._waiting:
                left_s = self._waiting[0].due_s - time.monotonic()
                if left_s <= 0:
                    return heapq.heappop(self._waiting)
                self._changed.wait(left_s)
            self._threads -= 1
            return None

    def _put_back(self, question: Question, *, goes_on: bool) -> None:
        peer = question.peer
        with self._changed:
            if goes_on:
                question.due_s = time.monotonic() + question.wait_s
                question.wait_s = min(LONGEST_RETRY_S, 2 * question.wait_s)
                heapq.heappush(self._waiting, question)
                return
            self._running.discard(peer)
        if self._book.at(*peer.address) is None:  # forgotten while it was asked: nobody else lets go of it
            self.drop(peer)

    def _ask(self, question: Question) -> bool:
        """Tells whether it has to be asked again."""
        peer = question.peer
        if not self._book.is_current(peer):
            return False
        try:
            self._pair(peer)
        except IncompatiblePeerError as misfit:
            self._book.set_state(peer, PeerState.MISFIT, str(misfit))
            logger.error("pla_sglang: peer %s does not fit: %s", peer.name, misfit)
            return False
        except Exception as error:
            if time.monotonic() - question.began_s > PATIENCE_S:
                self._book.set_state(peer, PeerState.SILENT, str(error) or type(error).__name__)
            return True
        self._book.set_state(peer, PeerState.READY)
        logger.info("pla_sglang: peer %s at %s is ready", peer.name, address_text(peer))
        return False

    def _pair(self, peer: Peer) -> None:
        """Fill the host's tables for ``peer``. Raises IncompatiblePeerError, or anything else where asking again may
        help."""
        import requests

        address = address_text(peer)
        said = requests.get(f"http://{address}/route?{OF_ALL_RANKS}", timeout=ASK_S, allow_redirects=False)
        if said.status_code != HTTPStatus.OK:
            raise ConnectionError(f"it answers {said.status_code}")
        if not is_bootstrap_answer(said.json()):  # the host would not find out, and wait for KV in vain
            raise IncompatiblePeerError("it has another transfer protocol, as another version of SGLang has")
        try:
            if not self._manager.try_ensure_parallel_info(address):
                raise ConnectionError("it is not registered at its bootstrap server yet")
        except (RuntimeError, AssertionError) as error:
            raise IncompatiblePeerError(str(error)) from None
        info = self._manager.prefill_info_table[address]
        if info.attn_tp_size != self._manager.attn_tp_size:
            self._manager.prefill_info_table.pop(address, None)
            raise IncompatiblePeerError(
                f"it has --tp-size {info.attn_tp_size}, this instance {self._manager.attn_tp_size}"
            )
        self._register(address)

    def _register(self, address: str) -> None:
        """Have a receiver made and connected as for a request, and forget its room."""
        room = -next(self._rooms)
        receiver = self._receiver_class(mgr=self._manager, bootstrap_addr=address, bootstrap_room=room)
        try:
            receiver.init(0)
            if receiver.conclude_state is not None:
                raise ConnectionError(self._manager.failure_records.pop(room, "it cannot be connected to"))
        finally:
            receiver.clear()
            self._manager.addr_to_rooms_tracker[address].discard(room)


def address_text(peer: Peer) -> str:
    """As the host writes it: the key of its tables."""
    return f"{peer.host}:{peer.bootstrap_port}"
