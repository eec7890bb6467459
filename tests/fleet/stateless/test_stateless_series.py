"""What a stateless instance shows of its legs: as series of its own, and in its load reports."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from pla_sglang.fleet.stateless.transfer.legs import SendState
from pla_sglang.fleet.stateless.transfer.peers import PeerState
from pla_sglang.fleet.stateless.transfer.series import STATES, LegSeries
from pla_sglang.load.legs import LegLoad
from pla_sglang.load.report import Report, decode, encode


class KeptSeries:
    """In place of Prometheus: the value of each series by its labels."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, ...], float]] = {}

    def gauge(self, name: str, text: str, *labels: str) -> Any:
        kept = self.values[name] = defaultdict(float)

        def at(*values: str) -> Any:
            assert len(values) == len(labels)
            return SimpleNamespace(
                set=lambda value: kept.__setitem__(values, value),
                inc=lambda more=1: kept.__setitem__(values, kept[values] + more),
            )

        return SimpleNamespace(at=at)

    total = gauge


def counts(**changes: Any) -> dict[str, Any]:
    """As in ``StatelessEngine.state``."""
    usual: dict[str, Any] = {
        "sending": {"legs": {"handshake": 2, "sending": 1}, "kv_tokens": 70, "sent": 5, "failed": 1},
        "receiving": {
            "legs": {"connecting": 0, "transferring": 3, "ready": 0},
            "kv_tokens": 90,
            "received": 4,
            "failed": 2,
        },
        "quarantine": {"requests": 1, "kv_tokens": 30, "timeouts": 1},
        "unclaimed_rooms": 6,
        "refused": 8,
        "faults": 1,
        "ready": True,
        "dropped": {"foreign": 3, "malformed": 0, "unknown": 2},
    }
    return usual | changes


def test_series_follow_the_counts() -> None:
    kept = KeptSeries()
    series = LegSeries(kept)  # type: ignore[arg-type]
    series.show(counts(), {PeerState.READY: 2, PeerState.SILENT: 1})
    values = kept.values
    assert values["pla_transfer_reqs"]["sending", "handshake"] == 2
    assert values["pla_transfer_reqs"]["receiving", "transferring"] == 3
    assert values["pla_transfer_kv_tokens"] == {("sending",): 70, ("receiving",): 90, ("quarantine",): 30}
    assert values["pla_peers"] == {("warming",): 0, ("ready",): 2, ("silent",): 1, ("misfit",): 0}
    assert (values["pla_pinned_reqs"][()], values["pla_unclaimed_transfer_ids"][()]) == (1, 6)
    assert values["pla_transfers"] == {
        ("sending", "done"): 5,
        ("sending", "failed"): 1,
        ("receiving", "done"): 4,
        ("receiving", "failed"): 2,
    }
    assert values["pla_transfer_messages_dropped"] == {("foreign",): 3, ("unknown",): 2}
    assert values["pla_transfer_ready"][()] == 1
    series.show(counts(sending={"legs": {}, "kv_tokens": 0, "sent": 8, "failed": 1}, faults=2, ready=False), {})
    assert values["pla_transfer_ready"][()] == 0
    assert {values["pla_transfer_reqs"]["sending", state] for state in STATES["sending"]} == {0}, "none is left over"
    assert (values["pla_transfers"]["sending", "done"], values["pla_transfers"]["sending", "failed"]) == (8, 1)
    assert (values["pla_transfers_refused"][()], values["pla_transfer_faults"][()]) == (8, 2)
    assert values["pla_pinned_timeouts"][()] == 1


def test_the_states_are_those_of_the_ends() -> None:
    assert set(STATES["sending"]) == {state.value for state in SendState} - {"ended"}
    assert set(STATES["receiving"]) == set(counts()["receiving"]["legs"])


def test_a_load_report_has_the_legs() -> None:
    legs = LegLoad.of_state(counts())
    assert (legs.sending, legs.quarantined, legs.refused, legs.ready) == ({"handshake": 2, "sending": 1}, 1, 8, True)
    assert not LegLoad.of_state(counts(ready=False)).ready
    report = Report(instance="a", sequence=1, legs=legs)
    assert decode(encode(report)).legs == legs
    plain = Report(instance="a", sequence=1)
    assert decode(encode(plain)).legs is None
    assert b"legs" not in encode(plain), "those of other instances are as long as before"
