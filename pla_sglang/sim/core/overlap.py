"""An engine whose host decides one pass ahead of its device, as SGLang's overlap schedule does.

When pass k starts on the device, the host gets the results of pass k-1, reads its messages and decides pass k+1; then
it waits for the results of k. So what arrives during pass k is considered when k+1 starts, for pass k+2. A device that
has run dry is different: then the host looks again at once; what it has to do for the handshakes that were asked for
while it waited for the last result begins then. Source: ``Scheduler.event_loop_overlap`` and
``event_loop_overlap_disagg_decode`` of SGLang 0.5.17.
"""

from __future__ import annotations

import math
from typing import Any

from pla_sglang.sim.core.host import HostKnobs
from pla_sglang.sim.core.instance import SimInstance
from pla_sglang.sim.core.kernel import Priority
from pla_sglang.sim.core.prefill import PrefillPass
from pla_sglang.sim.core.request import SimRequest

ALWAYS_S = -math.inf


class OverlappedInstance(SimInstance):
    """A ``SimInstance`` with a host of its own, which adds ``overhead``."""

    def __init__(self, *args: Any, overhead: HostKnobs, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._overhead = overhead
        self._started_s: float | None = None  # when the last pass or step started; None: the device had nothing
        self._ended = (0, 0)  # requests that ended with the last pass, and their context
        self._here_s: dict[SimRequest, float] = {}  # of decodes that are to join: when their KV came
        self._coming: list[SimRequest] = []  # their KV may be sent; the host has not looked yet

    # -- what the cluster asks ---------------------------------------------------------------------------------------

    def submit(self, request: SimRequest) -> None:
        request.home = self.view.index
        self.queue.push(request, seen=False)
        if request.target is None:
            self.admit(request, self._kernel.now_s + self._overhead.front_s)

    def admit(self, request: SimRequest, at_s: float) -> None:
        """A submitted request reaches the queue at ``at_s``; nothing happens when it is there already."""
        if self.queue.arriving.get(request) == math.inf:
            self.queue.arriving[request] = at_s
            self._kernel.at(at_s, Priority.ARRIVAL, lambda _: self._wake())

    def reserve(self, request: SimRequest) -> None:
        self.incoming.expect(request, self._kernel.now_s)
        self._wake()

    def receive(self, request: SimRequest) -> None:
        """The KV of ``request`` may be sent as soon as the host has noticed."""
        self._coming.append(request)
        self._wake()

    def join(self, request: SimRequest) -> None:
        self._here_s[request] = self._kernel.now_s if request.reserved else ALWAYS_S
        request.reserved = False
        super().join(request)

    # -- boundaries --------------------------------------------------------------------------------------------------

    def _look(self, _: object = None) -> None:
        super()._look()
        self.queue.share_ended()

    def _part(self) -> None:
        self._take_in()
        super()._part()

    def _take_in(self) -> None:
        """Who has arrived since the host last looked joins the queue; what it was told of is begun."""
        now_s = self._kernel.now_s
        for request in self.queue.take_seen(self._seen_s()):
            if not request.waiting.seen:
                request.waiting.seen = True
                self._policy.on_arrival(request.waiting, now_s)
        coming, self._coming = self._coming, []
        for request in coming:
            self._host.on_reserved(request, self.view.index)
        for request in list(self.decoding.joining):
            if request.first_token_s is None:
                self._give_first(request)

    def _seen_s(self) -> float:
        """Up to when the host had seen everything as it decided what follows now."""
        return self._kernel.now_s if self._started_s is None else self._started_s

    def _give_first(self, request: SimRequest) -> None:
        """The prefill's token reaches the user from here."""
        request.first_token_s = self._kernel.now_s
        self._host.on_first_token(request, self.view.index)
        if request.done_tokens >= request.output_tokens:
            self.decoding.joining.remove(request)
            self._finish(request)

    def _join(self) -> None:
        seen_s, joining = self._seen_s(), self.decoding.joining
        later = [request for request in joining if self._here_s[request] > seen_s]
        self.decoding.joining = [request for request in joining if self._here_s[request] <= seen_s]
        for request in self.decoding.joining:
            del self._here_s[request]
        super()._join()
        self.decoding.joining = later

    def _try_prefill(self) -> tuple[bool, float | None]:
        started, release_s = super()._try_prefill()
        if started:
            self._started_s = self._kernel.now_s
            self._ended = (0, 0)
        return started, release_s

    def _decode(self, release_s: float | None) -> None:
        now_s = self._kernel.now_s
        self._ended = (0, 0)
        waits = self.decoding.joining or any(seen_s <= now_s for seen_s in self.queue.arriving.values())
        super()._decode(now_s if waits else release_s)

    def _boundary(self, epoch: int) -> None:
        decoding = self.decoding
        if epoch == self._epoch and decoding.segment is not None:
            self._started_s = decoding.start_s + decoding.segment.end_s(decoding.cut_at - 1)
        super()._boundary(epoch)

    def _rest(self, release_s: float | None) -> None:
        if self._started_s is None:
            super()._rest(release_s)
            return
        if self._ended[0]:
            self._overrun()
            return
        self._started_s = None
        self.queue.share_ended()
        self._delay_handshakes()
        super()._look()

    def _delay_handshakes(self) -> None:
        """The host waited for the result until now: its part in the handshakes that were asked for meanwhile begins."""
        at_s = self._kernel.now_s + self._overhead.handshake_s
        for request, seen_s in self.queue.arriving.items():
            if request.target is not None and seen_s < at_s:
                self.queue.arriving[request] = at_s
                self._kernel.at(at_s, Priority.ARRIVAL, lambda _: self._wake())

    def _overrun(self) -> None:
        """Requests that have ended are in the batch that was decided before: it runs for nothing."""
        now_s = self._kernel.now_s
        self.queue.under_way = PrefillPass([], 0, 0, 0, now_s)
        self._started_s = now_s
        self._epoch += 1
        self._kernel.at(now_s + self.costs.decode_s(*self._ended), Priority.END, self._overrun_end, self._epoch)
        self._ended = (0, 0)

    def _overrun_end(self, epoch: int) -> None:
        if epoch == self._epoch:
            self.queue.under_way = None
            self._after_boundary()

    # -- ends --------------------------------------------------------------------------------------------------------

    def _first_token(self, request: SimRequest) -> None:
        if not request.reserved:
            super()._first_token(request)
            return
        request.done_tokens += 1
        request.prefilled_at = self.view.index
        self._host.on_prefilled(request, self.view.index)

    def _finish(self, request: SimRequest) -> None:
        self._here_s.pop(request, None)
        requests, context = self._ended
        self._ended = (requests + 1, context + request.context_tokens)
        super()._finish(request)
