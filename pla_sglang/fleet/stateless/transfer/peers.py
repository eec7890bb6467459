"""The instances that this one may exchange KV with. Nobody else is ever connected to.

The router tells each instance its own address and its peers. A peer is known by its address; its *incarnation* says
which process listens there. Told with another incarnation, what was cached of the old process is dropped at once. A
list may be short of peers that are well (a router has just started, or there are two): one that is not in it gets no
new legs, and those under way go on.
Pure but for the lock: warming threads report here, and the scheduler thread reads.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from pla_sglang.common.checks import read_host
from pla_sglang.common.errors import ConfigError, PlaError
from pla_sglang.fleet.stateless.transfer.legs import LegKind
from pla_sglang.plugin.engine.request_rows import RowsWanted, parse_rows

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
EVERY_ADDRESS = frozenset({"", "0.0.0.0", "::"})

MOST_PEERS = 512
MOST_CHARACTERS = 255  # of a name or an incarnation

Address = tuple[str, int]


class UnknownPeerError(PlaError):
    """A leg names an address that is neither this instance's nor a configured peer's, or a peer that does not fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """One instance as the router names it; ``bootstrap_port`` is where it can be asked for KV."""

    name: str
    host: str
    bootstrap_port: int
    incarnation: str = ""

    @property
    def address(self) -> Address:
        return self.host, self.bootstrap_port

    def is_other_process(self, other: Peer) -> bool:
        """Tells whether this is another process than ``other`` at the same address, as far as incarnations are
        known."""
        return bool(self.incarnation and other.incarnation) and self.incarnation != other.incarnation


class PeerState(enum.Enum):
    WARMING = "warming"
    READY = "ready"
    SILENT = "silent"  # does not answer; asked on
    MISFIT = "misfit"  # answers and cannot be paired with; not asked again


FAILED_TEXT = "failed: "  # before the reason
FAILED = frozenset({PeerState.SILENT, PeerState.MISFIT})


@dataclasses.dataclass(frozen=True, slots=True)
class PeerConfig:
    """What a router says: who this instance is (None: as before), all its peers, and which rows of running requests it
    wants in load reports (None: none)."""

    own: Peer | None
    peers: tuple[Peer, ...]
    rows: RowsWanted | None = None


def parse_peer_config(body: Any) -> PeerConfig:
    """The body of ``POST /pla/peers``. Raises ConfigError."""
    if not isinstance(body, Mapping) or not set(body) <= {"self", "peers", "rows"} or "peers" not in body:
        raise ConfigError('expected {"self": {...}, "peers": [...], "rows": {...}}')
    if not isinstance(body["peers"], list):
        raise ConfigError("peers is not valid; allowed: a list of objects")
    if len(body["peers"]) > MOST_PEERS:
        raise ConfigError(f"peers: {len(body['peers'])} are too many; allowed: {MOST_PEERS}")
    own = body.get("self")
    told = PeerConfig(
        None if own is None else _parse_peer(own, "self"),
        tuple(_parse_peer(e, "peers") for e in body["peers"]),
        parse_rows(body.get("rows")),
    )
    for what, values in (("name", [p.name for p in told.peers]), ("address", [p.address for p in told.peers])):
        if len(set(values)) != len(values):
            raise ConfigError(f"peers: two with the same {what}")
    return told


def _parse_peer(entry: Any, where: str) -> Peer:
    """Whatever is told may stand in log lines, and the host is connected to. Raises ConfigError."""
    fields = {"name": str, "host": str, "bootstrap_port": int, "incarnation": str}
    if not isinstance(entry, Mapping) or not set(entry) <= set(fields):
        raise ConfigError(f"{where}: expected objects with {', '.join(fields)}")
    for key, kind in fields.items():
        value = entry.get(key, "" if key == "incarnation" else None)
        if not isinstance(value, kind) or isinstance(value, bool) or (key != "incarnation" and not value):
            shown = repr(value)[:MOST_CHARACTERS]
            raise ConfigError(f"{where}: {key} {shown} is not valid; allowed: a {kind.__name__} that is not empty")
    for key in ("name", "incarnation"):
        text = entry.get(key, "")
        if len(text) > MOST_CHARACTERS or not text.isprintable():
            shown = repr(text[:MOST_CHARACTERS])
            raise ConfigError(
                f"{where}: {key} {shown} is not valid; allowed: up to {MOST_CHARACTERS} printable characters"
            )
    if not 1 <= entry["bootstrap_port"] <= 65535:
        raise ConfigError(f"{where}: bootstrap_port {entry['bootstrap_port']} is out of range; allowed: 1 to 65535")
    try:
        read_host(entry["host"].lower())
    except ConfigError as error:
        raise ConfigError(f"{where}: host: {str(error)[:MOST_CHARACTERS]}") from None
    return Peer(entry["name"], entry["host"], entry["bootstrap_port"], entry.get("incarnation", ""))


class PeerBook:
    """Who was told, and how far each is warmed. Peers that are told no more are known until they are forgotten.

    Args:
        host: where this instance's HTTP server listens.
        bootstrap_port: its own.
    """

    def __init__(self, host: str, bootstrap_port: int) -> None:
        hosts = LOOPBACK | ({host} - EVERY_ADDRESS)
        self._lock = threading.RLock()
        self._default = frozenset((name, bootstrap_port) for name in hosts)
        self._own = self._default
        self._peers: dict[Address, Peer] = {}
        self._told: frozenset[Address] = frozenset()  # of the known ones, those of the last list
        self._states: dict[Address, tuple[PeerState, str]] = {}

    def tell(self, told: PeerConfig) -> tuple[list[Peer], list[Peer]]:
        """Takes over a whole new list: peers whose address is another process's now, and those to warm."""
        with self._lock:
            if told.own is not None:
                self._own = self._default | {told.own.address}
            peers = [self._complete(peer) for peer in told.peers if peer.address not in self._own]
            before = self._peers
            replaced = [before[peer.address] for peer in peers if self.is_replaced(peer)]
            new = [peer for peer in peers if peer.address not in before or self.is_replaced(peer)]
            self._told = frozenset(peer.address for peer in peers)
            self._peers = before | {peer.address: peer for peer in peers}
            for peer in new:
                self._states[peer.address] = (PeerState.WARMING, "")
            return replaced, new

    def _complete(self, peer: Peer) -> Peer:
        """With the incarnation that is known, where none is told."""
        known = self._peers.get(peer.address)
        return peer if known is None or peer.incarnation else dataclasses.replace(peer, incarnation=known.incarnation)

    def forget_unlisted(self, in_use: Container[Address] = ()) -> list[Peer]:
        """Forget peers that are told no more, but for addresses ``in_use``. Those that are forgotten now."""
        with self._lock:
            gone = [a for a in self._peers if a not in self._told and a not in in_use]
            for address in gone:
                del self._states[address]
            return [self._peers.pop(address) for address in gone]

    def kind_of(self, host: str | None, port: int | None) -> LegKind:
        """What a request with this bootstrap address wants here. Raises UnknownPeerError."""
        if host is None:
            return LegKind.WHOLE
        with self._lock:
            if (host, port) in self._own:
                return LegKind.PREFILL
            if (host, port) in self._told:
                return LegKind.DECODE
        raise UnknownPeerError(
            f"bootstrap address {host}:{port} is neither this instance's own nor that of a configured peer"
        )

    def is_current(self, peer: Peer) -> bool:
        """Tells whether it is known, and no other process was told at its address."""
        with self._lock:
            return peer.address in self._peers and not self.is_replaced(peer)

    def is_replaced(self, peer: Peer) -> bool:
        """Tells whether another process is known at its address. One that is told no more may still be there."""
        with self._lock:
            known = self._peers.get(peer.address)
            return known is not None and known.is_other_process(peer)

    def at(self, host: str, port: int) -> Peer | None:
        with self._lock:
            return self._peers.get((host, port))

    def list_in(self, *states: PeerState) -> list[Peer]:
        """Known peers in one of ``states``."""
        with self._lock:
            return [peer for address, peer in self._peers.items() if self._states[address][0] in states]

    def set_state(self, peer: Peer, state: PeerState, reason: str = "") -> None:
        """What a warming thread has reached; ignored for a peer that was replaced meanwhile."""
        with self._lock:
            if self.is_current(peer):
                self._states[peer.address] = (state, reason)

    def state_of(self, host: str, port: int) -> tuple[PeerState, str] | None:
        """State and reason; None for an address that is not known."""
        with self._lock:
            return self._states.get((host, port))

    def count_states(self) -> Counter[PeerState]:
        with self._lock:
            return Counter(self._states[address][0] for address in self._told)

    def to_dict(self) -> dict[str, str]:
        """Name of each peer and "warming", "ready" or "failed: REASON"."""
        with self._lock:
            return {
                peer.name: f"{FAILED_TEXT}{self._states[address][1]}"
                if self._states[address][0] in FAILED
                else self._states[address][0].value
                for address, peer in self._peers.items()
                if address in self._told
            }


def agree_on_states(own: Mapping[str, str], agree: Callable[[Sequence[bool]], Sequence[bool]]) -> dict[str, str]:
    """States by name (``PeerBook.to_dict``) as all ranks see them: "ready" where every rank is.

    ``agree``: what all ranks say together about each flag. All of them must ask at once, with the same names.
    """
    if not own:
        return {}
    is_ready = [state == PeerState.READY.value for state in own.values()]
    is_sound = [not state.startswith(FAILED_TEXT) for state in own.values()]
    votes, count, shown = agree([*is_ready, *is_sound]), len(own), dict[str, str]()
    for (name, state), ready, sound in zip(own.items(), votes[:count], votes[count:], strict=True):
        if not sound and not state.startswith(FAILED_TEXT):
            shown[name] = f"{FAILED_TEXT}another rank has no connection to it"
        else:
            shown[name] = PeerState.WARMING.value if sound and not ready else state
    return shown
