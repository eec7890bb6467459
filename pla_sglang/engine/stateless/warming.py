"""Connects to peers ahead of the first request, in threads of its own.

SGLang 0.5.17 asks a peer's bootstrap server at the first request that names it: HTTP with a time-out of 5 s, in the
scheduler's thread. Here both questions (``try_ensure_parallel_info``, ``_setup_bootstrap_infos``) are asked as soon as
a peer is told, so the scheduler only ever finds the answers.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import Any

from pla_sglang.engine.stateless.peers import Peer, PeerBook, PeerState

logger = logging.getLogger(__name__)

RETRY_S = 0.2
LONGEST_RETRY_S = 2.0
PATIENCE_S = 3.0  # a peer that does not answer for so long is called failed; it is asked on
ASK_S = 5.0  # time-out of one question


class MisfitError(Exception):
    """A peer that answers and cannot be paired with; it is not asked again."""


class Warmer:
    """Owned by the scheduler; the threads end when their peer is ready, does not fit, or is told no more.

    Args:
        manager: the host's receiving KV manager, whose tables are filled.
        receiver_class: the host's receiver of its backend.
    """

    def __init__(self, manager: Any, receiver_class: Any, book: PeerBook) -> None:
        self._manager = manager
        self._receiver_class = receiver_class
        self._book = book
        self._rooms = itertools.count(2)  # taken negative: no request has such a room
        self._running: set[Peer] = set()
        self._lock = threading.Lock()

    def warm(self, peer: Peer) -> None:
        """Start to warm ``peer``, unless that is under way."""
        with self._lock:
            if peer in self._running:
                return
            self._running.add(peer)
        threading.Thread(target=self._run, args=(peer,), name=f"pla-warm-{peer.name}", daemon=True).start()

    def warm_again(self) -> None:
        """Peers whose connection the host has given up since, as after failed heartbeats, and those not yet ready.

        The thread of one that is not ready may have ended while the peer was forgotten for a moment.
        """
        for peer in self._book.list_in(PeerState.READY):
            if not self.is_warm(*peer.address):
                self._book.set_state(peer, PeerState.WARMING)
        for peer in self._book.list_in(PeerState.WARMING, PeerState.SILENT):
            self.warm(peer)

    def drop(self, peer: Peer) -> None:
        """Forget what was cached of ``peer``'s process, which is not there any more or not needed.

        Requests that wait for its KV fail: its address may be listened to by another process already, so they may not
        wait for heartbeats to fail.
        """
        address = address_text(peer)
        if address in self._manager.prefill_info_table or address in self._manager.addr_to_rooms_tracker:
            self._manager._handle_node_failure(address)

    def is_warm(self, host: str, port: int) -> bool:
        """Whether a receiver for this address would be made without asking anybody."""
        address = f"{host}:{port}"
        info = self._manager.prefill_info_table.get(address)
        if info is None:
            return False
        keys = (f"{address}_0_{rank}_{info.target_tp_rank}" for rank in info.target_cp_ranks)
        return all(key in self._manager.connection_pool for key in keys)

    def _run(self, peer: Peer) -> None:
        began_s, wait_s = time.monotonic(), RETRY_S
        try:
            while self._book.is_current(peer):
                try:
                    self._connect(peer)
                except MisfitError as misfit:
                    self._book.set_state(peer, PeerState.MISFIT, str(misfit))
                    logger.error("pla_sglang: peer %s does not fit: %s", peer.name, misfit)
                    return
                except Exception as error:
                    if time.monotonic() - began_s > PATIENCE_S:
                        self._book.set_state(peer, PeerState.SILENT, str(error) or type(error).__name__)
                else:
                    self._book.set_state(peer, PeerState.READY)
                    logger.info("pla_sglang: peer %s at %s is ready", peer.name, address_text(peer))
                    return
                time.sleep(wait_s)
                wait_s = min(LONGEST_RETRY_S, 2 * wait_s)
        finally:
            with self._lock:
                self._running.discard(peer)
            if self._book.at(*peer.address) is None:  # forgotten while it was asked: nobody else lets go of it
                self.drop(peer)

    def _connect(self, peer: Peer) -> None:
        """Fill the host's tables for ``peer``. Raises MisfitError, or anything else where asking again may help."""
        import requests

        address = address_text(peer)
        requests.get(f"http://{address}/health", timeout=ASK_S).raise_for_status()
        try:
            if not self._manager.try_ensure_parallel_info(address):
                raise ConnectionError("it is not registered at its bootstrap server yet")
        except (RuntimeError, AssertionError) as error:
            raise MisfitError(str(error)) from None
        info = self._manager.prefill_info_table[address]
        if info.attn_tp_size != self._manager.attn_tp_size:
            self._manager.prefill_info_table.pop(address, None)
            raise MisfitError(f"it has --tp-size {info.attn_tp_size}, this instance {self._manager.attn_tp_size}")
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
