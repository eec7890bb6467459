"""How the control plane passes from one process to the next: the lease, what a standby prepares, and how long it took.

Relays hold the truth on open requests and say it to each new control plane; the memory file has the workers. What a
standby has beside is what takes long: its code, descriptions of the instances, the tokenizer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.observability.series import Row
from pla_sglang.fleet.router.control.requests.prompts import load_tokenizer
from pla_sglang.fleet.router.control.workers.discovery import Description, parse_url
from pla_sglang.fleet.router.control.workers.errors import ControlError
from pla_sglang.fleet.router.control.workers.instance_client import InstanceClient
from pla_sglang.fleet.router.control.workers.state_file import SavedWorker, load_state
from pla_sglang.fleet.router.keys_file import KeysFile
from pla_sglang.fleet.router.tls import TlsContext, WorkerTls
from pla_sglang.policy_packages import find_policy

logger = logging.getLogger(__name__)
FOLLOW_S = 1.0
EXIT_DEPOSED = 3


@dataclasses.dataclass(frozen=True)
class Lease:
    """The launcher's word that this process leads.

    Attributes:
        epoch: grows with each control process that leads.
        lost_s: when the former one was heard last, monotonic; None: there was none.
        relays: how many will say what they have open.
    """

    epoch: int = 1
    lost_s: float | None = None
    relays: int = 1


class Preparation:
    """What a control process has before it leads.

    Attributes:
        tls: for instances with https.
        client: for all instances; who leads closes it.
        keys: of clients, for the limits of their tenants; None: nobody has one.
        scheme: by which clients come.
        described: what a standby gets to know of the instances that serve, each process of theirs once, by URL.
    """

    def __init__(
        self,
        knobs: ControlKnobs,
        *,
        tls: TlsContext | None = None,
        keys: KeysFile | None = None,
        scheme: str = "http",
    ) -> None:
        self.knobs, self.keys, self.scheme = knobs, keys, scheme
        self.tls = tls or TlsContext(WorkerTls(), now_s=time.time())
        self.client = InstanceClient(
            self.tls,
            timeout_s=knobs.health.timeout_s,
            api_key=knobs.worker_api_key,
            admin_key=knobs.worker_admin_key,
        )
        self.described: dict[str, Description] = {}
        self._reads_prompts = not find_policy(knobs.policy).length_blind

    async def follow_workers(self) -> None:
        """Never ends."""
        while True:
            self.tls.follow_files(time.time())
            await asyncio.gather(*(self._describe(worker) for worker in self._find_unknown()))
            await asyncio.sleep(FOLLOW_S)

    def _find_unknown(self) -> list[SavedWorker]:
        """Those that the leader has as ready, and that are not described."""
        try:
            workers = [] if self.knobs.memory_file is None else load_state(self.knobs.memory_file).workers
        except ConfigError:  # the leader says so
            return []
        known = {url: said.identity for url, said in self.described.items()}
        return [worker for worker in workers if worker.ready and known.get(worker.url) != worker.identity]

    async def _describe(self, worker: SavedWorker) -> None:
        try:
            said = await self.client.describe(parse_url(worker.url), with_model=True)
        except ControlError:  # a matter of the leader's health checks
            return
        self.described[worker.url] = said
        if self._reads_prompts:
            load_tokenizer(self.knobs.tokenizer or said.tokenizer)


class Succession:
    """One control plane among those before and after it.

    Attributes:
        takeover_s: from the last sign of the former one until all relays had said what is open and a request could be
            sent to an instance; None: there was none, or it is not over.

    Args:
        has_standby: whether another process is ready to take over; None: there is to be none.
    """

    def __init__(
        self,
        lease: Lease,
        clock: Callable[[], float],
        can_serve: Callable[[], bool],
        has_standby: Callable[[], bool | None],
    ) -> None:
        self.lease, self.has_standby = lease, has_standby
        self.takeover_s: float | None = None
        self._clock, self._can_serve = clock, can_serve
        self._heard: set[int] = set()  # relays that have said what is open

    def on_hello(self, relay: int) -> None:
        self._heard.add(relay)
        self.note_progress()

    def note_progress(self) -> None:
        """Called when a relay or an instance has got ready."""
        lost_s = self.lease.lost_s
        if lost_s is None or self.takeover_s is not None:
            return
        if len(self._heard) >= self.lease.relays and self._can_serve():
            self.takeover_s = self._clock() - lost_s
            logger.info("epoch %d: the take-over is done, %.2f s", self.lease.epoch, self.takeover_s)

    def end_deposed(self, epoch: int) -> None:
        """Relays follow a later control plane: this process does nothing more, not even write its state."""
        logger.error("epoch %d is over: relays follow epoch %d; this control process ends", self.lease.epoch, epoch)
        os._exit(EXIT_DEPOSED)

    def gauges(self) -> Iterator[Row]:
        text = "Of the control process that leads: 1, and one more at each take-over."
        yield "control_epoch", text, {}, float(self.lease.epoch)
        if self.takeover_s is not None:
            yield "takeover_seconds", "How long the last take-over was.", {}, self.takeover_s
        has_standby = self.has_standby()
        if has_standby is not None:
            yield "standby_ready", "1: a second control process is ready to take over.", {}, float(has_standby)

    def to_dict(self) -> dict[str, Any]:
        """For /pla/state."""
        return {
            "epoch": self.lease.epoch,
            "pid": os.getpid(),
            "takeovers": self.lease.epoch - 1,
            "takeover_s": None if self.takeover_s is None else round(self.takeover_s, 3),
            "standby": self.has_standby(),
        }
