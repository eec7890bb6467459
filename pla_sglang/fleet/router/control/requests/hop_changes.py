"""How a record gets its hops: another one follows at once, or is tried first and then joins or comes to nothing."""

from __future__ import annotations

from pla_sglang.fleet.router.control.requests.request_record import CLOSED, Hop, RequestRecord
from pla_sglang.fleet.router.wire.messages import MoveKind
from pla_sglang.policy.interface.fleet import RequestView


def start_hop(record: RequestRecord, view: RequestView, *, how: MoveKind, why: str, tokens: int) -> None:
    """It goes on behind ``tokens`` of its answer; ``view``: what the policy sees of it now. Under another id, and
    with another place in the load trackers, as an instance may come twice."""
    _take_over(record, _make_hop(record, how=how, why=why, tokens=tokens))
    record.view, record.arrived_at_policy = view, False
    record.policy_tokens = tokens


def start_pending(record: RequestRecord, *, how: MoveKind, why: str) -> Hop:
    """Another hop is tried, while the present one goes on or is held."""
    record.pending = _make_hop(record, how=how, why=why, tokens=0)
    return record.pending


def join_pending(record: RequestRecord) -> None:
    """It is the present hop now."""
    assert record.pending is not None
    _take_over(record, record.pending)
    record.pending = None


def drop_pending(record: RequestRecord) -> None:
    """Nothing comes of it. Its legs stay until they are closed."""
    assert record.pending is not None
    record.strays = [*(leg for leg in record.strays if leg.state is not CLOSED), *record.pending.open_legs()]
    record.hop.attempts, record.last_number, record.pending = record.pending.attempts, record.pending.number, None


def _make_hop(record: RequestRecord, *, how: MoveKind, why: str, tokens: int) -> Hop:
    record.serial += 1
    key, hop = (record.rid, record.serial), record.hop
    number = max(record.last_number, hop.number) + 1
    return Hop(number, how, why, key, record.serial - 1, tokens=tokens, attempts=hop.attempts)


def _take_over(record: RequestRecord, hop: Hop) -> None:
    record.attempt, record.reached, record.key = hop.key[1], hop.reached, hop.key
    record.hops.append(hop)
