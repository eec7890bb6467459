"""Tells stateless instances who their peers are, and knows between which instances KV cache can go.

A stateless instance connects to nobody but the peers that it was told (``POST /pla/peers``, the whole list each time),
and to these in the background. So it is told after each change of the table, and asked again until all of them are
ready. Nobody waits for that: a request whose two instances are not connected yet is served whole (``pairs.py``).

A peer is whoever hands KV cache over: the other stateless instances, and prefill instances. A process that comes back
is another worker here, with another number, and another incarnation for its peers.

Whether two instances can ever be connected follows from what they say of themselves (``find_misfit``): in a fleet of
two versions of SGLang some cannot. These are never paired, and a request that moves between them is computed again.

A list must lack nobody who is alive, as nobody exchanges KV with an instance that is not on it, even if it was before.
So none is sent while somebody in the table may be alive and has not said yet what it is: after a start of the router
such an answer may wait for a long pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from pla_sglang.fleet.router.control.workers.discovery import Description
from pla_sglang.fleet.router.control.workers.errors import ControlError, UnreachableError
from pla_sglang.fleet.router.control.workers.instance_client import InstanceClient
from pla_sglang.fleet.router.control.workers.table import Worker, WorkerState, WorkerTable
from pla_sglang.fleet.router.control.workers.worker_log import log_line
from pla_sglang.policy.interface.fleet import InstanceKind, InstanceView

READY, WARMING = "ready", "warming"  # anything else that an instance says of a peer is a failure
MISFIT = "failed"  # as an instance says it, too
WARMING_S = 0.2  # until it is asked again how far it is
RETRY_S = (0.5, 30.0)  # first and longest wait after a failure
REFRESH_S = 10.0  # it may have lost a peer that was ready
ASKED_TICK_S = 0.1  # between two looks whether all have been asked
MOST_SILENCES = 3  # checks in a row without an answer until others no longer wait for an instance
UNTOLD = "does not know its peers"


class Peering:
    """Peers of the workers of one table.

    Args:
        count: called with what came of a list: ``told`` or ``failed``.
        router_key: told with each list, so that instances take legs from nobody else; empty: none is told.
    """

    def __init__(
        self, table: WorkerTable, client: InstanceClient, count: Callable[[str], None], *, router_key: str
    ) -> None:
        self.table, self._client = table, client
        self._key = {"router_key": router_key} if router_key else {}
        self._count = count
        self._said: dict[int, str] = {}  # in the log, by number of the worker
        self.wanted_rows: Callable[[], Mapping[str, Any] | None] = lambda: None  # of running requests, in load reports
        self._changed: dict[int, asyncio.Event] = {}  # by number of the stateless workers that are being told

    def is_connected(self, prefill: InstanceView, decode: InstanceView) -> bool:
        """True if KV cache can go from the first to the second now. Stock instances connect by themselves."""
        source, target = self.table.of(prefill), self.table.of(decode)
        if self.never_connects(prefill, decode):
            return False
        if any(worker.legs is not None and not worker.legs.ready for worker in (source, target)):
            return False  # a thread of it has ended: each would wait for the other in vain
        if prefill.kind is InstanceKind.STATELESS and source.peers is None:  # it does not know which address is its own
            return False
        if decode.kind is not InstanceKind.STATELESS:
            return True
        return target.peers is not None and target.peers.get(source.number) == READY

    def never_connects(self, prefill: InstanceView, decode: InstanceView) -> bool:
        """True if no KV cache can go from the first to the second, as long as both live."""
        source, target = self.table.of(prefill).description, self.table.of(decode).description
        return source is not None and target is not None and find_misfit(source, target) is not None

    def update_peers(self) -> None:
        """The table has changed."""
        for worker in self.table:
            if worker.view.kind is not InstanceKind.STATELESS or worker.description is None:
                continue
            if worker.number not in self._changed:
                self._changed[worker.number] = asyncio.Event()
                self._client.spawn(self._keep_telling(worker))
        for changed in self._changed.values():
            changed.set()

    def _peers_of(self, worker: Worker) -> dict[str, Worker]:
        """By name. Two processes never have one at a time: a name is an address."""
        described = (other for other in self.table if other is not worker and other.description is not None)
        return {other.view.name: other for other in described if _bootstrap_port(other) is not None}

    async def _keep_telling(self, worker: Worker) -> None:
        """As long as it lives."""
        changed, retry_s = self._changed[worker.number], RETRY_S[0]
        while worker.state is not WorkerState.DEAD:
            if any(_is_awaited(other) for other in self.table):
                await asyncio.sleep(ASKED_TICK_S)
                continue
            changed.clear()
            peers = self._peers_of(worker)
            try:
                states = await self._client.tell_peers(worker, self._told_to(worker, peers))
            except ControlError as error:
                self._note_not_configured(worker, error)
                wait_s = None
            else:
                wait_s = self._note_states(worker, {peer: states.get(name, WARMING) for name, peer in peers.items()})
            if wait_s is None:
                wait_s, retry_s = retry_s, min(2 * retry_s, RETRY_S[1])
            else:
                retry_s = RETRY_S[0]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await changed.wait()
        del self._changed[worker.number]
        self._said.pop(worker.number, None)

    def _told_to(self, worker: Worker, peers: Mapping[str, Worker]) -> dict[str, Any]:
        rows = self.wanted_rows()
        return {**_peer_list(worker, peers), **self._key, **({} if rows is None else {"rows": rows})}

    def _note_states(self, worker: Worker, said: Mapping[Worker, str]) -> float | None:
        """What it has ``said`` of its peers. When it is asked again; None: one has failed that may be well."""
        self._count("told")
        misfits = {peer: _describe_misfit(peer, worker) for peer in said}
        states = {peer: misfits[peer] or state for peer, state in said.items()}
        worker.peers = {peer.number: state for peer, state in states.items()}
        if worker.detail.startswith(UNTOLD):
            worker.detail = ""
        failed = [f"{_name_peer(peer)}: {state}" for peer, state in states.items() if state not in (READY, WARMING)]
        if failed:
            self._log_change(logging.WARNING, worker, f"gets no KV cache from {', '.join(failed)}")
        elif states and set(states.values()) == {READY}:
            self._log_change(logging.INFO, worker, f"gets KV cache from {', '.join(map(_name_peer, states))}")
        return _next_look_s({state for peer, state in states.items() if misfits[peer] is None})

    def _note_not_configured(self, worker: Worker, error: Exception) -> None:
        """What it said before stays true of the peers that it has; a new one of them is not in there."""
        self._count("failed")
        if worker.state is not WorkerState.DEAD:
            worker.detail = f"{UNTOLD}: {error}"
            if not isinstance(error, UnreachableError):  # of one at which nobody listens health checks tell
                self._log_change(logging.WARNING, worker, worker.detail)

    def _log_change(self, level: int, worker: Worker, text: str) -> None:
        """One line for each change."""
        if self._said.get(worker.number) != text:
            self._said[worker.number] = text
            log_line(level, worker, text)


def _name_peer(peer: Worker) -> str:
    return f"worker {peer.number} ({peer.view.name})"


def _is_awaited(worker: Worker) -> bool:
    """True if it may be alive and has not said what it is: not once it refuses connections, or was silent for long."""
    return worker.description is None and not worker.refused and worker.misses < MOST_SILENCES


def find_misfit(source: Description, target: Description) -> str | None:
    """Why no KV cache can go from the one to the other, whatever else they say; None: nothing is known against it.

    One that does not say by which protocol it transfers has that of its version of SGLang.
    """
    one, other = source.transfer_protocol, target.transfer_protocol
    if one and other:
        if one != other:
            return f"its transfer protocol is {one}, not {other}"
    elif source.version and target.version and source.version != target.version:
        return f"it has SGLang {source.version}, not {target.version}: their transfer protocols may not fit"
    if source.kv_layout and target.kv_layout:
        if source.kv_layout != target.kv_layout:
            return f"its KV layout is {source.kv_layout}; not {target.kv_layout}"
        if source.tensor_parallel != target.tensor_parallel:
            return f"it has --tp-size {source.tensor_parallel}, not {target.tensor_parallel}"
    return None


def _describe_misfit(source: Worker, target: Worker) -> str | None:
    """As a state of the peer ``source`` of ``target``; None: they may fit."""
    if source.description is None or target.description is None:
        return None
    misfit = find_misfit(source.description, target.description)
    return None if misfit is None else f"{MISFIT}: {misfit}"


def _next_look_s(states: AbstractSet[str]) -> float | None:
    """None: it says that a peer has failed."""
    if states <= {READY}:
        return REFRESH_S
    return WARMING_S if states <= {READY, WARMING} else None


def _bootstrap_port(worker: Worker) -> int | None:
    return None if worker.description is None else worker.description.bootstrap_port


def _peer_list(worker: Worker, peers: Mapping[str, Worker]) -> dict[str, Any]:
    """The body of ``POST /pla/peers`` at ``worker``, without key and rows."""
    own = {"name": worker.view.name, "host": worker.address.host, "bootstrap_port": _bootstrap_port(worker)}
    return {"self": own, "peers": [_introduce(name, peer) for name, peer in peers.items()]}


def _introduce(name: str, peer: Worker) -> dict[str, Any]:
    said = peer.description
    assert said is not None, "peers are described"
    return {
        "name": name,
        "host": peer.address.host,
        "bootstrap_port": said.bootstrap_port,
        "incarnation": said.incarnation or said.identity,
    }
