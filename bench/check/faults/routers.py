"""Several routers before one fleet, whose control processes and who themselves are ended by SIGKILL and started again.

A control process is started again by its router: nothing may fail for that. With a router all its connections end: what
was open there, or came while nobody listened, has a right to fail. Both must move requests again afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from bench.check.leftovers import sum_series
from bench.harness import servers
from bench.harness.report import say
from bench.harness.servers import Router, is_healthy
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.testing.server import HttpError, ServerError, fetch

CONTROL, WHOLE = "control", "router"
BACK_S = 60.0  # within which one that was started again serves
POLL_S = 0.1


@dataclasses.dataclass(slots=True)
class Restart:
    """Of a router or of its control process. Times are CLOCK_MONOTONIC's."""

    what: str
    router: int
    at_s: float
    back_s: float
    moves: int = 0  # that it has made since, until its next restart or the end of the run


def plan_restarts(count: int, routers: int) -> list[tuple[str, int]]:
    """What, and of which router: control processes and routers in turns, each router in turns too."""
    return [((CONTROL, WHOLE)[number % 2], (number // 2 + number) % routers) for number in range(count)]


class Routers:
    """Of one run, in a ``with``: each has a port of its own, over its restarts too."""

    def __init__(self, router: Router, described: Mapping[str, Any], folder: Path, count: int) -> None:
        self._router, self._described, self._folder = router, described, folder
        self._ports = [free_port() for _ in range(count)]
        self._stacks = [contextlib.ExitStack() for _ in range(count)]
        self._pids = [0] * count
        self._one_at_a_time = threading.Lock()
        self.restarts: list[Restart] = []
        self.moves = 0  # of all control processes that there were

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def __enter__(self) -> Routers:
        try:
            for number, url in enumerate(self.urls):
                self._start(number)
                wait_until_serving(url)
                servers.wait_until_paired(url)
                label_instances(url)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for stack in self._stacks:
            stack.close()

    def _start(self, number: int) -> None:
        command = servers.router_command(self._router, self._described, self._ports[number])
        log = self._folder / f"chaos.router-{number}.{len(self.restarts)}.log"
        child = servers.running_child(command, log, stop_s=servers.ROUTER_STOP_S)
        self._pids[number] = self._stacks[number].enter_context(child).pid

    def restart(self, what: str, number: int) -> None:
        """One at a time. Raises ServerError where it does not serve again."""
        with self._one_at_a_time:
            self._restart(what, number)

    def _restart(self, what: str, number: int) -> None:
        self.count_moves(number)
        at_s = time.monotonic()
        if what == CONTROL:
            control = find_control(self._pids[number])
            os.kill(control, signal.SIGKILL)
            self._wait_for_control(number, control)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pids[number], signal.SIGKILL)  # its relays and control process end with it
            self._stacks[number].close()
            self._start(number)
        restart = Restart(what, number, at_s, 0.0)
        wait_until_serving(self.urls[number])
        restart.back_s = time.monotonic()
        label_instances(self.urls[number])
        self.restarts.append(restart)
        say(f"killed the {what} of router {number}; it serves again after {restart.back_s - at_s:.1f} s")

    def _wait_for_control(self, number: int, before: int) -> None:
        """Until the router has another one: its relay is well all the time. Raises ServerError."""
        end_s = time.monotonic() + BACK_S
        while time.monotonic() < end_s:
            with contextlib.suppress(ServerError):
                if find_control(self._pids[number]) != before:
                    return
            time.sleep(POLL_S)
        raise ServerError(f"router {number} has no new control process {BACK_S:.0f} s after the end of the last")

    def count_moves(self, number: int) -> None:
        """Before its next restart, and at the end: its control process takes the counts with it."""
        moves = int(sum_series(fetch(f"{self.urls[number]}/metrics"), "pla_router_migrations_total", 'how="pull"'))
        self.moves += moves
        mine = [restart for restart in self.restarts if restart.router == number]
        if mine:
            mine[-1].moves = moves

    def is_excused(self, number: int, from_s: float, until_s: float) -> bool:
        """Tells whether the router was ended, and not back, at some time of these."""
        return any(
            restart.what == WHOLE and restart.router == number and from_s < restart.back_s and until_s > restart.at_s
            for restart in self.restarts
        )


def find_control(router_pid: int) -> int:
    """The control process of a router. Raises ServerError."""
    for child in psutil.Process(router_pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.cmdline()[-1:] == [CONTROL]:
                return child.pid
    raise ServerError(f"router {router_pid} has no control process")


def label_instances(url: str) -> None:
    """The first half prefill, the others decode: so requests move after their prefill. One that is down is left out.

    A control process that has just been started knows its instances a moment later. Raises ServerError where one that
    is well cannot be labelled.
    """
    end_s = time.monotonic() + BACK_S
    while True:
        rows = sorted(fetch(f"{url}/workers")["workers"], key=lambda row: str(row["url"]))
        wanted = {row["number"]: "prefill" if place < len(rows) / 2 else "decode" for place, row in enumerate(rows)}
        # "decode_to_prefill" is on its way there.
        unlabelled = [row for row in rows if not row["role"].endswith(wanted[row["number"]])]
        left = [row for row in unlabelled if is_healthy(row["url"])]
        if rows and not left:
            return
        if time.monotonic() > end_s:
            raise ServerError(f"{url} labels {len(rows) - len(left)} of {len(rows)} instances within {BACK_S:.0f} s")
        for row in left:
            with contextlib.suppress(HttpError):
                fetch(f"{url}/workers/{row['number']}/role", {"role": wanted[row["number"]]})
        time.sleep(POLL_S)


def wait_until_serving(url: str) -> None:
    """Until it is healthy, which takes an instance that is ready. Raises ServerError."""
    end_s = time.monotonic() + BACK_S
    while not is_healthy(url):
        if time.monotonic() > end_s:
            raise ServerError(f"{url} does not serve {BACK_S:.0f} s after its start")
        time.sleep(POLL_S)
