"""KV on its way between instances: room at the target first, then the transfer, then the request decodes there."""

from __future__ import annotations

from collections.abc import Callable

from pla_sglang.sim.core.fleet import SimFleet
from pla_sglang.sim.core.instance import SimInstance
from pla_sglang.sim.core.kernel import Kernel, Priority
from pla_sglang.sim.core.network import Network
from pla_sglang.sim.core.request import SimRequest


class Handoffs:
    """Hand-offs after prefill, and migrations, from the moment that a request waits for room elsewhere.

    Args:
        wait_s: how long a request waits for room at its target.
        on_late: called with a request that has waited so long, and with the target that had no room.
    """

    def __init__(
        self,
        kernel: Kernel,
        fleet: SimFleet,
        network: Network,
        *,
        wait_s: float,
        on_late: Callable[[SimRequest, int], None],
    ) -> None:
        self._kernel = kernel
        self._fleet = fleet
        self._network = network
        self._wait_s = wait_s
        self._on_late = on_late

    def start(self, request: SimRequest, target: SimInstance) -> None:
        """``request`` is to decode at ``target``; the transfer begins as soon as there is room."""
        request.target = target.view.index
        request.reserved = False
        target.reserve(request)
        if not request.reserved:
            request.epoch += 1
            at_s = self._kernel.now_s + self._wait_s
            self._kernel.at(at_s, Priority.END, self._waited, (request, request.epoch))

    def _waited(self, event: tuple[SimRequest, int]) -> None:
        request, epoch = event
        if request.epoch != epoch:
            return
        target = request.target
        assert target is not None
        self.call_off(request)
        self._on_late(request, target)

    def transfer(self, request: SimRequest) -> None:
        """The target has made room: the KV is sent."""
        assert request.home is not None
        assert request.target is not None
        size = request.context_tokens * self._fleet.instances[request.home].costs.profile.kv_bytes_per_token
        end_s = self._network.send(request.home, request.target, size, self._kernel.now_s)
        request.epoch += 1
        self._kernel.at(end_s, Priority.END, self._transferred, request)

    def _transferred(self, request: SimRequest) -> None:
        assert request.home is not None
        assert request.target is not None
        source, target = self._fleet.instances[request.home], self._fleet.instances[request.target]
        request.target = None
        source.release(request)
        target.incoming.settle(request)
        target.join(request)
        self._fleet.check_drained()

    def call_off(self, request: SimRequest) -> None:
        """``request``, whose KV is not on its way yet, does not go to its target; the target's room is free again."""
        assert request.target is not None
        request.epoch += 1
        target, request.target = self._fleet.instances[request.target], None
        if request.reserved or request in target.incoming.waiting:
            target.unreserve(request, reserved=request.reserved)
        request.reserved = False
