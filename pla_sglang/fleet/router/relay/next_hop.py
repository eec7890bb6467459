"""A hop beyond the first: another instance goes on with a stream whose client has seen its beginning.

The client's body is sent again, with tags that say what there is of the answer. Until the first event comes, nothing
of it is the client's. From then on the answer takes over (``ForwardedResponse``), as if the events had come from the
first instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pla_sglang.fleet.router.http.head import ResponseHead
from pla_sglang.fleet.router.http.json_body import Body
from pla_sglang.fleet.router.relay.attempt import Attempt
from pla_sglang.fleet.router.relay.context import RelayContext
from pla_sglang.fleet.router.relay.marked_stream import MarkedStreamReader
from pla_sglang.fleet.router.relay.movability import Tags
from pla_sglang.fleet.router.relay.request_body import RequestBody
from pla_sglang.fleet.router.relay.response_errors import (
    ABORTED,
    LoadRefusal,
    error_code,
    error_message,
    given_up,
    load_refusal,
)
from pla_sglang.fleet.router.relay.upstream_leg import PrefillLeg, ResponseLeg, UpstreamLeg
from pla_sglang.fleet.router.wire import messages as m

SNIFF_BYTES = 16_384  # of an answer that is no stream
_DEAD, _NOT_SENT, _FULL, _REFUSED, _, _, _ABORTED = m.LossReason


class HopOwner(Protocol):
    """The request that the hop belongs to."""

    def on_hop_joined(self, hop: NextHop, events: bytes) -> None:
        """It has begun with ``events``, the last of which may not be complete. Its leg is the owner's to observe."""

    def on_hop_failed(self, hop: NextHop, why: m.LossReason, kind: m.FailureKind | None, detail: str) -> None:
        """It is over before its first event. ``kind``: what its instance is to be reported for."""


class NextHop:
    """Observes its leg until the first event (``ResponseObserver``). ``tags``: from ``tags_of_rest``.

    Attributes:
        attempt: at one instance, the only leg; its ``Assign`` names the one that hands the KV over as prefill.
    """

    __slots__ = ("_ask", "_beginning", "_body", "_head", "_kept", "_owner", "_tags", "attempt")

    def __init__(  # what a request knows of itself
        self,
        context: RelayContext,
        order: m.Continue,
        ask: m.Ask,
        *,
        kept: RequestBody,
        body: Body,
        tags: Tags,
        owner: HopOwner,
    ) -> None:
        self._ask, self._kept, self._body, self._tags = ask, kept, body, tags
        self._owner = owner
        self._head: ResponseHead | None = None
        self._beginning = b""
        assign = m.Assign(
            ask.rid,
            ask.attempt,
            order.target,
            order.source if order.how is m.MoveKind.PULL else None,  # else its KV cache is computed here again
            bootstrap_host=order.bootstrap_host,
            bootstrap_port=order.bootstrap_port,
            bootstrap_room=order.bootstrap_room,
            reason=order.reason,
        )
        leg = ResponseLeg(m.Leg.WHOLE, order.target, self, plain=True)
        self.attempt = Attempt(
            context, assign, (leg,), on_connected=self._send_request, on_unreachable=self._on_unreachable
        )

    @property
    def worker(self) -> int:
        return self.attempt.response_leg.worker

    def start(self) -> None:
        if not self.attempt.connect_legs():
            self._owner.on_hop_failed(self, _NOT_SENT, None, "the control plane named an instance that is not known")

    def _send_request(self) -> None:
        assert self._kept.head is not None
        self.attempt.send_request(self._ask, self._kept.head, self._kept.raw, self._body, tags=self._tags)

    def _on_unreachable(self, leg: ResponseLeg | PrefillLeg, why: str) -> None:
        self.attempt.return_connections()
        self._owner.on_hop_failed(self, _NOT_SENT, m.FailureKind.CONNECT, why)

    # -- ResponseObserver ----------------------------------------------------------------------------------------------

    def on_response_head(self, head: ResponseHead) -> bool:
        self._head = head
        return True

    def on_response_body(self, data: bytes) -> None:
        assert self._head is not None
        self._beginning += data[: SNIFF_BYTES - len(self._beginning)] if self._head.status != 200 else data
        beginning = self._beginning
        if self._head.status != 200 or b"\n\n" not in beginning:
            return
        if error_code(0, beginning) is not None or ABORTED.search(beginning):
            self._fail(beginning)
            return
        self._owner.on_hop_joined(self, beginning)

    def on_response_done(self) -> None:
        self._fail(self._beginning)

    def on_leg_lost(self, leg: UpstreamLeg, kind: m.FailureKind, detail: str) -> None:
        self._owner.on_hop_failed(self, _DEAD, kind, detail)

    def _fail(self, said: bytes) -> None:
        assert self._head is not None
        code = error_code(self._head.status if self._head.status != 200 else 0, said)
        if load_refusal(code, said) is LoadRefusal.FULL:
            self._owner.on_hop_failed(self, _FULL, m.FailureKind.FULL, error_message(said))
        else:
            kind = m.FailureKind.STATUS if code is None or code >= 500 else None
            why = _ABORTED if self._head.status == 200 and given_up(said) else _REFUSED
            self._owner.on_hop_failed(self, why, kind, error_message(said) or "an empty answer")


def tags_of_rest(tags: Tags, stream: MarkedStreamReader, answer_id: str) -> Tags:
    """What the instance of a next hop is told. ``answer_id``: under which the first one knew the request."""
    told: dict[str, int | str | Sequence[int]] = {"pla_movable": 1, "pla_answer_id": answer_id}
    if stream.ids:
        told["pla_tokens"] = stream.ids.tolist()
        told["pla_seen"] = stream.seen
    if stream.prompt:
        told["pla_prompt"] = stream.prompt
    return tags._replace(members=msgspec.json.encode(told)[1:-1])
