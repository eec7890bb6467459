"""The relays that are attached, and the table of instances that they are sent."""

from __future__ import annotations

from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.workers.table import WorkerTable
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.protocols import RelayPort
from pla_sglang.policy.interface.fleet import InstanceKind
from pla_sglang.policy_packages import find_policy


class RelayPorts:
    """Sends messages to relays by their numbers.

    Args:
        epoch: of this control plane.
        router_key: for stateless instances, as in ``ControlPlane``.
    """

    def __init__(self, knobs: ControlKnobs, table: WorkerTable, epoch: int, *, router_key: str = "") -> None:
        self._knobs = knobs
        self._router_key = router_key
        self._wants_bodies = not find_policy(knobs.policy).length_blind
        self._table = table
        self._epoch = epoch
        self._ports: dict[int, RelayPort] = {}

    def attach_relay(self, relay: int, port: RelayPort) -> None:
        self._ports[relay] = port
        port.on_message(self._table_message())

    def detach_relay(self, relay: int) -> None:
        self._ports.pop(relay, None)

    def send_message(self, relay: int, message: m.FromControl) -> None:
        """A relay that is not attached gets nothing."""
        port = self._ports.get(relay)
        if port is not None:
            port.on_message(message)

    def send_heartbeat(self) -> None:
        self._send_all(m.Heartbeat())

    def publish_table(self) -> None:
        """The table has changed."""
        self._send_all(self._table_message())

    def _send_all(self, message: m.FromControl) -> None:
        for port in self._ports.values():
            port.on_message(message)

    def _table_message(self) -> m.Table:
        knobs = self._knobs
        workers = tuple(
            m.WorkerEntry(
                worker.number,
                worker.address.host,
                worker.address.port,
                worker.view.kind.value,
                listed=worker.is_ready(),
                api_key=knobs.worker_api_key,
                admin_key=knobs.worker_admin_key,
                hops=knobs.migrates and worker.description is not None and worker.description.hops,
                router_key=self._router_key if worker.view.kind is InstanceKind.STATELESS else "",
                tls=worker.address.tls,
            )
            for worker in self._table
        )
        return m.Table(
            self._epoch,
            workers,
            self._table.can_serve(),
            wants_bodies=self._wants_bodies,
            trace_share=knobs.trace_share if knobs.trace_endpoint else None,
            migration=knobs.migrates,
        )
