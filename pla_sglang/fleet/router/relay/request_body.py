"""The body of a request, for as long as it may have to be sent (again)."""

from __future__ import annotations

from pla_sglang.fleet.router.http.head import RequestHead
from pla_sglang.fleet.router.http.json_body import Body
from pla_sglang.fleet.router.relay.context import RelayContext


class RequestBody:
    """Body and head as the client sent them; counted as incoming until they are sent, then as kept while they are.

    Attributes:
        raw, head: empty and None once nothing will be sent any more.
        body: what was read of ``raw``.
        is_kept: it may be sent again.
    """

    __slots__ = ("_context", "_waiting_bytes", "body", "head", "is_kept", "raw")

    def __init__(self, context: RelayContext, head: RequestHead, raw: bytes, body: Body) -> None:
        self._context, self.body = context, body
        self.head: RequestHead | None = head
        self.raw = raw
        self._waiting_bytes = len(raw)  # the caller has counted them
        self.is_kept = False

    def try_keep(self) -> bool:
        """False where there is no room."""
        if not self.is_kept:
            self.is_kept = self._context.kept.try_hold(len(self.raw))
        return self.is_kept

    def end_waiting(self) -> None:
        """It was sent."""
        self._context.incoming.free_bytes(self._waiting_bytes)
        self._waiting_bytes = 0

    def drop(self) -> None:
        """Nothing is sent again from here on."""
        if self.is_kept:
            self._context.kept.free_bytes(len(self.raw))
        self.is_kept, self.raw, self.head = False, b"", None
