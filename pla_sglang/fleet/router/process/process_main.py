"""What the processes of a router run: a relay, or the control plane. Light imports: each relay pays for them.

A child reads lines of JSON from standard input: its settings, so that no key stands in a command line, and to a control
process when it leads. The end of standard input means that the launcher is gone, and so it ends as well. SIGTERM: a
relay drains first; with ``--drain-pause-s`` it says that it is not ready, and drains at the second one, which the
launcher sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import uvloop

from pla_sglang.common.cli import Settings, report_error
from pla_sglang.common.errors import ConfigError, PlaError
from pla_sglang.fleet.router.wire.messages import HEARTBEAT_INTERVAL_S

LATE_S = 5.0  # a relay whose launcher does not end the pause in time ends it so much later by itself
RARELY = 10_000  # objects that must have been added until the collector looks at the youngest; Python's own value: 700
EXIT_FAILED = 1


class Stop:
    """Set by SIGTERM, SIGINT or the launcher's end. ``forced``: by the latter, or by a second signal.

    Args:
        pause_s: from ``asked`` on; a second signal ends it, and only a further one forces.
        on_line: called with each line of standard input.
    """

    def __init__(
        self, *, watch_stdin: bool, pause_s: float = 0.0, on_line: Callable[[bytes], None] = lambda line: None
    ) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()
        self._on_line, self._begun = on_line, b""  # the latter: what is there of the next line
        self._pause_s, self._pause_over = pause_s, asyncio.Event()
        if not pause_s:
            self._pause_over.set()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        if watch_stdin:
            loop.add_reader(sys.stdin.fileno(), self._on_stdin)

    def request_stop(self) -> None:
        if not self.asked.is_set():
            self.asked.set()
        else:
            (self.forced if self._pause_over.is_set() else self._pause_over).set()

    async def wait_pause(self) -> None:
        """``asked`` is set."""
        await until_first(asyncio.sleep(self._pause_s), self._pause_over.wait(), self.forced.wait())
        self._pause_over.set()

    def _on_stdin(self) -> None:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = os.read(sys.stdin.fileno(), 4096)
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            self._on_line(line)
        if not data:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self.asked.set()
            self.forced.set()


def run_main(main: Coroutine[Any, Any, int]) -> int:
    """On uvloop. The exit status; errors that name their cause are printed. The log goes to stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("pla_sglang").setLevel(logging.INFO)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)
    except PlaError as error:
        return report_error(error)
    except OSError as error:
        report_error(error)
        return EXIT_FAILED


def settle_memory() -> None:
    """What was imported stays, so collections need not look at it again; and requests leave no cycles behind, so
    collections can be rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(RARELY)


@contextlib.contextmanager
def failing_files() -> Iterator[None]:
    """The launcher has found these files good. What is wrong with them when a process is started again may be over at
    its next start, so it is not refused for good. Raises OSError instead of ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise OSError(str(error)) from None


async def relay_main(settings: dict[str, Any]) -> int:
    """Keys: number, address, port, given (``Settings.given``)."""
    from pla_sglang.fleet.router.config import RelayConfig
    from pla_sglang.fleet.router.relay.context import RelayContext
    from pla_sglang.fleet.router.relay.server import Relay
    from pla_sglang.fleet.router.wire.endpoints import RelayWire

    config = dataclasses.replace(Settings(settings["given"]).build(RelayConfig), port=settings["port"])
    stop = Stop(watch_stdin=True, pause_s=config.drain_pause_s + LATE_S if config.drain_pause_s else 0.0)
    wire = RelayWire(settings["address"], settings["number"], now_s=time.monotonic)
    with failing_files():
        context = RelayContext(
            config,
            number=settings["number"],
            send_to_control=wire.send_message,
            rng=random.SystemRandom(),
            control_is_silent=wire.is_silent,
            control_lost_s=wire.silent_s,
        )
        relay = Relay(context)
    wire.start_wire(relay.on_message, relay.on_attached)
    await relay.start_serving(shared=True)
    settle_memory()
    await stop.asked.wait()
    relay.end_readiness()
    await stop.wait_pause()
    await until_first(relay.drain_requests(), stop.forced.wait())
    await relay.stop_serving()
    wire.close_wire()
    return 0


async def control_main(settings: dict[str, Any]) -> int:
    """Keys: address, given (``Settings.given``), router_key (as in ``ControlPlane``), relays (their number), standby
    (whether there are two such processes). It leads from the launcher's word on, with all that it needs imported."""
    from pla_sglang.fleet.router.config import RelayConfig
    from pla_sglang.fleet.router.control.control_plane import ControlPlane
    from pla_sglang.fleet.router.control.knobs import ControlKnobs
    from pla_sglang.fleet.router.control.succession import Lease, Preparation
    from pla_sglang.fleet.router.keys_file import KeysFile
    from pla_sglang.fleet.router.tls import TlsContext, WorkerTls
    from pla_sglang.fleet.router.wire.endpoints import ControlWire

    given, has_standby = Settings(settings["given"]), settings["standby"]
    with failing_files():
        worker_tls = TlsContext(given.build(WorkerTls), now_s=time.time())
        relay = given.build(RelayConfig)
        keys = None if relay.keys_file is None else KeysFile(relay.keys_file)
    prepared = Preparation(given.build(ControlKnobs), tls=worker_tls, keys=keys, scheme=relay.tls.scheme)
    orders = ControlOrders()
    stop = Stop(watch_stdin=True, on_line=orders.on_line)
    beating = None
    if has_standby:
        settle_memory()
        beating = asyncio.ensure_future(send_beats())
        await until_first(prepared.follow_workers(), orders.leads.wait(), stop.asked.wait())
    await until_first(orders.leads.wait(), stop.asked.wait())
    if orders.lease is not None and not stop.asked.is_set():
        lease = Lease(**orders.lease, relays=settings["relays"])
        # What the first control process could do and a later one cannot may work at the next try, and streams go on
        # meanwhile: it is no refusal.
        with contextlib.nullcontext() if lease.lost_s is None else failing_files():
            plane = ControlPlane(
                prepared.knobs,
                prepared=prepared,
                router_key=settings["router_key"],
                lease=lease,
                has_standby=lambda: orders.standby if has_standby else None,
            )
            await plane.start()
        wire = ControlWire(settings["address"], plane, now_s=time.monotonic)
        await wire.start_listening()
        if not has_standby:
            settle_memory()
        await stop.asked.wait()
        wire.close_wire()
        await plane.stop()
    if beating is not None:
        beating.cancel()
    return 0


class ControlOrders:
    """What the launcher says to a control process after its settings: that it leads, and whether there is a standby."""

    def __init__(self) -> None:
        self.leads = asyncio.Event()
        self.lease: dict[str, Any] | None = None
        self.standby = False

    def on_line(self, line: bytes) -> None:
        order = json.loads(line)
        if "epoch" in order:
            self.lease = order
            self.leads.set()
        else:
            self.standby = order["standby"]


async def send_beats() -> None:
    """To the launcher: this loop turns, and what it needs is imported."""
    os.set_blocking(sys.stdin.fileno(), False)
    while True:
        with contextlib.suppress(OSError):
            os.write(sys.stdin.fileno(), b".")
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)


async def until_first(*waits: Awaitable[Any]) -> None:
    """Until one of them is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


MAINS = {"relay": relay_main, "control": control_main}


if __name__ == "__main__":
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as source:  # the event loop watches what follows
        line = source.readline()
    sys.exit(run_main(MAINS[sys.argv[1]](json.loads(line))))
