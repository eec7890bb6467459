"""Messages between relays and control: each survives the wire, and each side can tell them apart."""

from __future__ import annotations

import typing

import msgspec
import pytest

from pla_sglang.fleet.router.wire import messages as m

ASK = m.Ask("r", 0, m.Endpoint.CHAT, True, 1.5, body_bytes=30, input_tokens=7, body=b"{}")
OVER = m.Over(1, m.Cause.LOST, 2.7, shown=True, delivered_tokens=12, lost_with=(2,), avoid=(3,), detail="reset")
ASSIGN = m.Assign("r", 1, decode=2, prefill=1, bootstrap_host="h", bootstrap_port=9, bootstrap_room=(1 << 63) - 9)
PROGRESS = m.Progress("r", m.Milestone.FIRST_TOKEN, 2.5)
FROM_RELAY = [
    ASK,
    PROGRESS,
    msgspec.structs.replace(ASK, over=OVER),
    m.Progress("r", m.Milestone.FIRST_TOKEN, 2.9, movable=True, attempt=2, gap_s=0.2),
    m.Dropped("r", 3, m.Cause.RESUMED, "it has gone on"),
    m.Completed("r", m.Outcome.CLIENT_GONE, 200, 3.0, first_s=2.5, aborted=(1, 2)),
    m.Failure(2, m.FailureKind.LOST, "reset", rid="r"),
    m.Hello(0, m.PROTOCOL, open=(m.OpenRequest(ASK, ASSIGN, (PROGRESS,)),), asking=("s",)),
    m.RelayReport(0, {'bad_requests_total{reason="head"}': 1.0}, {"open_streams": 2.0}),
    m.AdminAsk(4, 0, "GET", "/pla/state", b""),
]
FROM_CONTROL = [
    m.Table(9, (m.WorkerEntry(2, "127.0.0.1", 30000, "decode"),), serving=True, wants_bodies=True),
    m.Heartbeat(),
    ASSIGN,
    msgspec.structs.replace(ASSIGN, attempt=2, held_tokens=12),
    m.Refuse("r", 429, "overloaded", "try later", retry_after_s=1.5, over=1),
    m.Abort("r", 499, "aborted", "by an operator"),
    m.AdminResponse(4, 200, "application/json", b"{}"),
]


@pytest.mark.parametrize(("union", "samples"), [(m.FromRelay, FROM_RELAY), (m.FromControl, FROM_CONTROL)])
def test_every_message_survives_the_wire(union: typing.Any, samples: list[m.Message]) -> None:
    decoder = msgspec.msgpack.Decoder(union)
    assert [decoder.decode(msgspec.msgpack.encode(one)) for one in samples] == samples
    assert {type(one) for one in samples} == set(typing.get_args(union)), "a message without a sample"


def test_what_the_other_side_says_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(ASSIGN), type=m.FromRelay)
