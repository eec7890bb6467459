"""The functions that the seam table names, for the data-parallel controller process of a server with pools."""

from __future__ import annotations

import logging
import time
from typing import Any

import zmq

from pla_sglang.common.errors import ConfigError, HostMismatchError
from pla_sglang.common.series import LabelledSeries
from pla_sglang.load.sockets import Puller
from pla_sglang.plugin import config as pla_config
from pla_sglang.plugin.engine import control
from pla_sglang.plugin.engine.host.arguments import resolve
from pla_sglang.plugin.engine.pass_timer import computes_in_launch
from pla_sglang.plugin.engine.pools.driver import Pools
from pla_sglang.plugin.engine.pools.query import NAME, Answers
from pla_sglang.plugin.engine.pools.series import Series
from pla_sglang.plugin.engine.snapshot import slo_s
from pla_sglang.policy.common.step_model import CPU_START, GPU_START

logger = logging.getLogger(__name__)

LONGEST_WAIT_MS = 10
REPORTS = "reports"  # name of the socket

_service: Service | None = None


class Service:
    """Pools, their sockets, and the host's controller. Everything runs on the controller's one thread."""

    def __init__(self, controller: Any, config: pla_config.PlaConfig) -> None:
        self.controller = controller
        args = resolve(controller.server_args)
        chunk = args.chunked_prefill_size or -1
        self.pools = Pools(
            args.dp_size,
            config,
            CPU_START if computes_in_launch(args.device, config) else GPU_START,
            chunk if chunk > 0 else args.max_prefill_tokens,
            self._tell_role,
        )
        reports = pla_config.controller_address(config, REPORTS)
        state = pla_config.controller_address(config, NAME)
        assert reports is not None and state is not None, "a server with pools has a folder for their sockets"
        self._reports, self._answers = Puller(reports), Answers(state)
        self._poller = zmq.Poller()
        for socket in (self._reports.socket, self._answers.socket, controller.recv_from_tokenizer):
            self._poller.register(socket, zmq.POLLIN)
        self._series: Series | None = None
        if args.enable_metrics:
            labels = {"model_name": args.served_model_name}
            self._series = Series(LabelledSeries(labels))

    # -- requests ----------------------------------------------------------------------------------------------------

    def dispatch(self, req: Any) -> None:
        """In place of the host's load balancing. A rank that the request names itself is respected."""
        tokens, salt, now_s = req.input_ids or (), req.lora_id, time.perf_counter()
        if self.controller.maybe_external_dp_rank_routing(req):
            self.pools.note_external(req.routed_dp_rank, req.rid, tokens, now_s, salt=salt)
            return
        target_s = slo_s(req, None) if hasattr(req, "sampling_params") else None
        rank = self.pools.place_request(req.rid, tokens, now_s, slo_s=target_s, salt=salt)
        self._send(rank, req)

    def on_internal_state(self, req: Any) -> None:
        """Knobs on their way to the ranks: take those for pools too, then send them on as the host does."""
        req.server_args.pop(control.QUIET, None)  # a rank that does not answer would keep the front waiting
        wire = {key: value for key, value in req.server_args.items() if key.startswith(control.PREFIX)}
        rank = wire.pop(control.RANK, None)
        try:
            if wire:
                self._take_knobs(wire, None if rank is None else int(rank))
        except ConfigError as error:
            logger.warning("pla_sglang: run-time change refused: %s", error)  # as every rank will
        self.controller.send_control_message(req)

    def _take_knobs(self, wire: dict[str, float], rank: int | None) -> None:
        changed = control.decode_knobs(wire, self.pools.config)
        if control.PREFIX + "role" in wire:
            self.pools.order_role(rank, changed.role, time.perf_counter())
        config = changed.replace(role=self.pools.config.role)
        if config != self.pools.config:
            self.pools.set_config(config)

    def on_flush(self, req: Any) -> None:
        self.pools.on_flush()
        self.controller.send_control_message(req)

    def _tell_role(self, rank: int, role: str) -> None:
        from sglang.srt.managers.io_struct import SetInternalStateReq

        values: dict[str, float] = {control.PREFIX + "role": pla_config.ROLES.index(role), control.QUIET: 1}
        self._send(rank, SetInternalStateReq(server_args=values))
        logger.info("pla_sglang: rank %d is now in the %s pool", rank, role)

    def _send(self, rank: int, message: Any) -> None:
        from sglang.srt.managers.io_struct import sock_send

        sock_send(self.controller.workers[rank], message)

    # -- between two requests ----------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Wait for something to do, at most a few milliseconds; do what is not the host's."""
        self._poller.poll(LONGEST_WAIT_MS)
        now_s = time.perf_counter()
        for report in self._reports.drain():
            self.pools.on_report(report, now_s)
        self.pools.tick(now_s)
        if self._answers.pending():
            self._answers.serve(self.pools.describe_state(now_s) | {"malformed_reports": self._reports.malformed})
        if self._series is not None:
            self._series.show(self.pools, now_s)

    def await_reports(self, patience_s: float) -> None:
        """Return once every rank has reported. Raises HostMismatchError when one does not."""
        end_s = time.perf_counter() + patience_s
        while silent := self.pools.list_silent():
            if time.perf_counter() > end_s:
                raise HostMismatchError([f"data-parallel rank {rank} does not report its load" for rank in silent])
            self.turn()


class Turns:
    """Stands in for the watchdog that the host's loop feeds before each look at its socket."""

    def __init__(self, watchdog: Any, service: Service) -> None:
        self._watchdog = watchdog
        self._service = service

    def feed(self) -> None:
        self._watchdog.feed()
        self._service.turn()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watchdog, name)


def after_init_dispatcher(result: Any, controller: Any) -> None:
    """Raises HostMismatchError where a seam of this process is not in effect."""
    global _service
    from sglang.srt.managers.io_struct import FlushCacheReqInput, SetInternalStateReq
    from sglang.utils import TypeBasedDispatcher

    from pla_patches.install import verify_this_process

    verify_this_process()
    _service = Service(controller, pla_config.current())
    controller.dispatching = _service.dispatch
    controller._request_dispatcher += TypeBasedDispatcher(
        [(SetInternalStateReq, _service.on_internal_state), (FlushCacheReqInput, _service.on_flush)]
    )


def before_event_loop(controller: Any) -> None:
    assert _service is not None, "the dispatcher is made before the loop starts"
    controller.soft_watchdog = Turns(controller.soft_watchdog, _service)


def ready_info(patience_s: float) -> dict[str, Any]:
    """Once every rank reports: our seams in this process, and the roles that the ranks have been told."""
    from pla_patches.install import verify_this_process

    if _service is None:
        raise HostMismatchError(["dpc.dispatch: the controller was made without our dispatcher"])
    _service.await_reports(patience_s)
    _service.pools.announce_roles()
    return {
        "config": pla_config.current().to_dict(),
        "hooks": verify_this_process(),
        "roles": list(_service.pools.roles),
    }
