"""Prometheus series of a stateless instance's legs. Made in the scheduler process, shown by SGLang's ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pla_sglang.common.series import BoundSeries, LabelledSeries
from pla_sglang.fleet.stateless.transfer.legs import SendState
from pla_sglang.fleet.stateless.transfer.peers import PeerState
from pla_sglang.load.legs import HOLDERS

SENDING, RECEIVING = "sending", "receiving"
DONE = {SENDING: "sent", RECEIVING: "received"}  # names of the totals in the state
STATES = {
    SENDING: tuple(state.value for state in SendState if state is not SendState.ENDED),
    RECEIVING: ("connecting", "transferring", "ready"),
}


class LegSeries:
    """Brought up to date from the engine's counts about once a second."""

    def __init__(self, series: LabelledSeries) -> None:
        gauge, total = series.gauge, series.total
        self._legs = gauge("pla_transfer_reqs", "Prefill and decode parts here, by state.", "end", "state")
        self._kv = gauge("pla_transfer_kv_tokens", "KV tokens of transfers beside the batches.", "holder")
        self._deferred = gauge("pla_pinned_reqs", "Given up; a transfer may still touch their pages.")
        self._rooms = gauge("pla_unclaimed_transfer_ids", "Transfer ids that only a decode part has announced.")
        self._peers = gauge("pla_peers", "Peers by state.", "state")
        self._ended = total("pla_transfers", "Parts whose KV was sent or received, or that failed.", "end", "outcome")
        self._timeouts = total("pla_pinned_timeouts", "Pages freed without word from the other end.")
        self._refused = total("pla_transfers_refused", "Requests that schedulers refused as parts.")
        self._faults = total("pla_transfer_faults", "Exceptions of our own code.")
        self._ready = gauge("pla_transfer_ready", "1: KV can be handed over; 0: a thread that it needs has ended.")
        self._dropped = total("pla_transfer_messages_dropped", "Messages on the side channel that were none.", "reason")
        self._shown: dict[tuple[str, ...], int] = {}

    def show(self, counts: Mapping[str, Any], peers: Mapping[PeerState, int]) -> None:
        """``counts``: the part of ``StatelessEngine.state`` that changes with each leg."""
        for end, states in STATES.items():
            for state in states:
                self._legs.at(end, state).set(counts[end]["legs"].get(state, 0))
        for holder in HOLDERS:
            self._kv.at(holder).set(counts[holder]["kv_tokens"])
        self._deferred.at().set(counts["quarantine"]["requests"])
        self._rooms.at().set(counts["unclaimed_rooms"])
        self._ready.at().set(int(counts["ready"]))
        for state in PeerState:
            self._peers.at(state.value).set(peers.get(state, 0))
        for series, labels, total in self._totals(counts):
            more = total - self._shown.get(labels, 0)
            if more > 0:
                series.at(*labels[1:]).inc(more)
            self._shown[labels] = total

    def _totals(self, counts: Mapping[str, Any]) -> Iterator[tuple[BoundSeries, tuple[str, ...], int]]:
        for end, done in DONE.items():
            yield self._ended, ("legs", end, "done"), counts[end][done]
            yield self._ended, ("legs", end, "failed"), counts[end]["failed"]
        yield self._timeouts, ("timeouts",), counts["quarantine"]["timeouts"]
        yield self._refused, ("refused",), counts["refused"]
        yield self._faults, ("faults",), counts["faults"]
        for reason, dropped in counts["dropped"].items():
            yield self._dropped, ("dropped", reason), dropped
