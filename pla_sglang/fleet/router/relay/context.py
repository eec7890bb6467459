"""What the parts of one relay share. They are handed this object, and none of them knows the relay."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.keys_file import KeysFile
from pla_sglang.fleet.router.relay.aborts import InstanceAborts, LingeringLegs
from pla_sglang.fleet.router.relay.counters import ByteAccount, Counters
from pla_sglang.fleet.router.relay.request_translation import IdGenerator
from pla_sglang.fleet.router.relay.upstream_connection import UpstreamPool
from pla_sglang.fleet.router.relay.worker_directory import WorkerDirectory
from pla_sglang.fleet.router.tls import TlsContext
from pla_sglang.fleet.router.wire.messages import FromRelay


class RelayContext:
    """One relay's clock, configuration, counters, connections to instances, and its way to the control plane.

    Args:
        number: of the relay, from 0; named in every message.
        send_to_control: takes messages for the control plane.
        rng: for request and trace ids.
        now_s: CLOCK_MONOTONIC.
        control_is_silent: whether the control plane was not heard for a while.
        control_lost_s: for how many seconds it was not heard.

    Attributes:
        incoming: bytes of request bodies that are being received, or wait to be sent to an instance.
        kept: bytes of request bodies that are kept for another attempt.
        ending: the router was told to end, and is not ready for clients that do not know it yet; set by the relay.
        draining: no new requests; set by the relay.
        keys: of clients; None: there is no file of them.
        client_tls, worker_tls: for clients (None: they come by plain HTTP), and for instances with https.
    """

    def __init__(
        self,
        config: RelayConfig,
        *,
        number: int,
        send_to_control: Callable[[FromRelay], None],
        rng: random.Random,
        now_s: Callable[[], float] = time.monotonic,
        control_is_silent: Callable[[], bool] = lambda: False,
        control_lost_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.config, self.number, self.send_to_control = config, number, send_to_control
        self.control_is_silent, self.control_lost_s = control_is_silent, control_lost_s
        self.now_s, self.loop = now_s, asyncio.get_running_loop()
        self.call_soon, self.call_later = self.loop.call_soon, self.loop.call_later
        self.ids = IdGenerator(rng)
        self.counters = Counters()
        self.workers = WorkerDirectory()
        self.client_tls = None if config.tls.cert is None else TlsContext(config.tls, now_s=time.time())
        self.worker_tls = TlsContext(config.worker_tls, now_s=time.time())
        self.keys = None if config.keys_file is None else KeysFile(config.keys_file)
        self.pool = UpstreamPool(self.worker_tls, connect_timeout_s=config.connect_timeout_s)
        self.aborts = InstanceAborts(self.pool, self.workers, self.counters)
        self.lingering = LingeringLegs(self.aborts)
        self.incoming = ByteAccount(config.max_buffered_bytes)
        self.kept = ByteAccount(config.max_kept_bytes)
        self.ending = self.draining = False
