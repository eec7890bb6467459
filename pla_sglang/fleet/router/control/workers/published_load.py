"""Loads that stock engines publish (SGLang from 0.5.19 on, ``--load-publish-endpoint``), in place of polls.

A ZMQ socket a rank sends a message at each change of its load, and once a second where nothing changes: the topic, a
sequence number, and the figures of ``/v1/loads`` as msgpack. We connect to the host of the worker's own address, which
an operator or discovery has named, at the ports that its ``/server_info`` names (``Description.load_ports``), and to
nothing else. What comes from there is bounded in size and number, and is used as the load of that worker alone.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
import zmq

from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.policy.interface.fleet import InstanceKind

TOPIC = b"load"
LARGEST_BYTES = 1024  # of a frame; SGLang's have below 100. After a larger one ZMQ connects there no more
KEPT_MESSAGES = 16  # in each socket: only the last one counts
SILENCE_S = 2.0  # without a message for so long a worker is polled as before: two of its heartbeats
RECONNECT_MS = 2000
# A decode instance says how many requests wait for KV cache, but not how many tokens of it.
PUBLISHING = frozenset({InstanceKind.UNIFIED, InstanceKind.PREFILL})

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class LoadStat(msgspec.Struct, frozen=True, array_like=True, tag="LoadStat", gc=False):
    """As SGLang sends it; later fields are ignored, and 0.5.19's, which has no uncached tokens, is no such message."""

    num_running_reqs: Count
    num_waiting_reqs: Count
    num_tokens: Count
    max_total_num_tokens: Count
    rank: Count
    num_waiting_uncached_tokens: Count
    num_total_tokens: Count = 0

    def to_core(self) -> dict[str, int]:
        """With the names of ``/v1/loads?include=core``."""
        figures = msgspec.structs.asdict(self)
        return figures | {"num_used_tokens": self.num_tokens}


_decoder = msgspec.msgpack.Decoder(LoadStat)


def decode_message(frames: list[bytes], rank: int) -> LoadStat | None:
    """None for what is no load of this rank: another process may hold the port that a worker names."""
    if len(frames) != 3 or frames[0] != TOPIC:
        return None
    try:
        stat = _decoder.decode(frames[2])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return stat if stat.rank == rank else None


def endpoints_of(worker: Worker) -> tuple[str, ...]:
    """Where the ranks of ``worker`` publish; none where it does not, or where its own load reports say more."""
    said = worker.description
    if said is None or said.kind not in PUBLISHING or worker.load.reports:
        return ()
    host = f"[{worker.address.host}]" if ":" in worker.address.host else worker.address.host
    return tuple(f"tcp://{host}:{port}" for port in said.load_ports)


@dataclasses.dataclass(slots=True)
class _Rank:
    socket: zmq.Socket[bytes]
    stat: LoadStat | None = None
    heard_s: float = float("-inf")


class PublishedLoads:
    """Connections to the workers that publish, kept as ``follow`` is told; ``close`` them."""

    def __init__(self) -> None:
        self.received = 0
        self.malformed = 0
        self._ranks: dict[int, dict[str, _Rank]] = {}  # by number of the worker and endpoint, in order of ranks

    def follow(self, workers: Iterable[Worker]) -> None:
        """Connects to those that publish, and leaves all others. An endpoint that two workers name is nobody's."""
        wanted = {worker.number: endpoints_of(worker) for worker in workers}
        named = Counter(endpoint for endpoints in wanted.values() for endpoint in endpoints)
        wanted = {number: ends for number, ends in wanted.items() if ends and all(named[end] == 1 for end in ends)}
        for number in [number for number, ranks in self._ranks.items() if tuple(ranks) != wanted.get(number)]:
            self._leave(number)
        for number in wanted.keys() - self._ranks.keys():
            self._ranks[number] = {endpoint: _Rank(self._connect(endpoint)) for endpoint in wanted[number]}

    def drain(self, now_s: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and load of each worker of which something new has come, as ``/v1/loads`` answers; not while a rank
        of it is silent, as its load would be missing.
        """
        for number, ranks in self._ranks.items():
            news = [self._read(rank, index, now_s) for index, rank in enumerate(ranks.values())]
            if any(news) and self.is_heard(number, now_s):
                yield number, {"loads": [rank.stat.to_core() for rank in ranks.values() if rank.stat is not None]}

    def is_heard(self, number: int, now_s: float) -> bool:
        """True if all ranks of this worker have reported recently."""
        ranks = self._ranks.get(number, {})
        return bool(ranks) and all(now_s - rank.heard_s <= SILENCE_S for rank in ranks.values())

    def is_following(self) -> bool:
        return bool(self._ranks)

    def close(self) -> None:
        for number in list(self._ranks):
            self._leave(number)

    def _read(self, rank: _Rank, index: int, now_s: float) -> bool:
        """True if something has come; of several messages the last one counts."""
        has_news = False
        for _ in range(KEPT_MESSAGES):
            try:
                frames = rank.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            if (stat := decode_message(frames, index)) is None:
                self.malformed += 1
                continue
            self.received += 1
            rank.stat, rank.heard_s, has_news = stat, now_s, True
        return has_news

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, KEPT_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS)
        socket.setsockopt(zmq.IPV6, 1 if endpoint.startswith("tcp://[") else 0)
        socket.subscribe(TOPIC)
        socket.connect(endpoint)
        return socket

    def _leave(self, number: int) -> None:
        for rank in self._ranks.pop(number).values():
            rank.socket.close()
