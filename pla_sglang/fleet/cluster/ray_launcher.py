"""A fleet in Ray with a router of ours on this machine: starts both, tells the router where instances are, ends both.

Ray starts lost instances again (``ray_fleet``). They come back at other addresses, which the router has to be told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from pla_sglang.fleet.actuators.interface import ActuatorError
from pla_sglang.fleet.actuators.ray_actuator import RayActuator
from pla_sglang.fleet.actuators.ray_names import RayFleetName
from pla_sglang.fleet.cluster.children import ClusterError
from pla_sglang.fleet.cluster.logs import LineReader
from pla_sglang.fleet.cluster.memory import tree_pss_bytes
from pla_sglang.fleet.cluster.spec import ROUTER_MODULES, ClusterConfig, router_arguments
from pla_sglang.fleet.cluster.supervisor import Sink, is_healthy, write_state_file
from pla_sglang.fleet.cluster.tied import start_tied
from pla_sglang.launch_server import request_line

LOOK_S = 0.5  # between two looks at the fleet
ROUTER_STOP_S = 10.0
LOST = (
    "instances and router serve on; until it answers nothing is started or stopped. With Ray's head gone the list of"
    " instances is lost, nothing is started again, and Ray ends all actors, and their instances with them, after"
    " RAY_gcs_rpc_server_reconnect_timeout_s"
)


class RayCluster:
    """One fleet. ``run`` is its whole life; ``stop`` ends it from a signal handler."""

    def __init__(
        self,
        config: ClusterConfig,
        where: RayFleetName,
        *,
        free_port: Callable[[], int],
        sink: Sink,
        environment: Mapping[str, str],
        state_file: Path | None = None,
        router_key: str = "",
    ) -> None:
        self.config, self._where = config, where
        self._sink, self._environment, self._state_file = sink, environment, state_file
        self._actuator = RayActuator(where)
        self._stop = asyncio.Event()
        self._rows: dict[str, dict[str, Any]] = {}  # instances by name
        self._told: set[str] = set()  # addresses that the router has
        self._away = ""
        self._measured: dict[str, Any] = {}
        self._router: subprocess.Popen[bytes] | None = None
        self._reader: LineReader | None = None
        self._port = config.router_port or free_port()
        self._url = None if config.router == "none" else f"http://{config.host}:{self._port}"
        self._headers = {"Authorization": f"Bearer {router_key}"} if router_key else {}
        self._started_s = time.monotonic()

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Start all, serve until ``stop``, end all. Raises ClusterError."""
        try:
            await self._start_instances()
            if self._url is not None:
                await self._start_router()
            self._note_ready()
            while not await self._is_over():
                await self._look()
                await self._tell_router()
                if self._router is not None and self._router.poll() is not None:
                    raise ClusterError(f"the router ended with status {self._router.returncode}; its output is above")
        finally:
            await self._end()

    # -- start ---------------------------------------------------------------------------------------------------------

    async def _start_instances(self) -> None:
        kinds = [kind for kind, count in self.config.counts.items() for _ in range(count)]
        self._log_line(f"starting {len(kinds)} instance(s) in {self._where}")
        try:
            await asyncio.gather(*(self._actuator.start_instance(kind, None) for kind in kinds))
        except ActuatorError as error:
            raise ClusterError(str(error)) from None
        while True:
            await self._look()
            if self._away:
                raise ClusterError(self._away)
            if all(row["state"] == "ready" for row in self._rows.values()):
                return
            for row in self._rows.values():
                if row["state"] == "dead":
                    raise ClusterError(f"{row['name']} ended while starting{row['detail']}")
            await self._check_start("a fleet")

    async def _start_router(self) -> None:
        assert self._url is not None
        command = router_arguments(self.config, [], self._port, self._port)
        workers = [part for row in self._rows.values() for part in ("--worker", row["url"])]
        self._router = start_tied(ROUTER_MODULES[self.config.router], [*command, *workers], self._environment)
        assert self._router.stdout is not None
        self._reader = LineReader("router", os.dup(self._router.stdout.fileno()), self._sink)
        self._told = {row["url"] for row in self._rows.values()}
        async with aiohttp.ClientSession(trust_env=False) as http:
            while not await is_healthy(self._url, http):
                if self._router.poll() is not None:
                    raise ClusterError(f"router ended with status {self._router.returncode} while starting")
                await self._check_start("router")

    async def _check_start(self, what: str) -> None:
        if await self._is_over():
            raise asyncio.CancelledError
        if time.monotonic() - self._started_s > self.config.start_timeout_s:
            raise ClusterError(f"{what} is not ready {self.config.start_timeout_s:g} s after the start")

    def _note_ready(self) -> None:
        ready_s = time.monotonic() - self._started_s
        self._measured = {"ready_s": round(ready_s, 3), "pss_bytes": tree_pss_bytes(os.getpid())}
        self._log_line(f"all ready after {ready_s:.1f} s")
        if self._url is not None:
            self._log_line(f"try: {request_line(self._url, has_key=bool(self._headers))}")
        self._write_state()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def _is_over(self) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), LOOK_S)
        return self._stop.is_set()

    async def _look(self) -> None:
        try:
            rows = {row["name"]: row for row in await self._actuator.list_rows()}
        except ActuatorError as error:
            if not self._away:
                self._log_line(f"{error}: {LOST}")
            self._away = str(error)
            return
        if self._away:
            self._log_line(f"{self._where} answers again")
        self._away = ""
        before, self._rows = self._rows, rows
        for name in sorted(before.keys() | rows.keys()):
            self._log_change(name, before.get(name), rows.get(name))
        if before != rows:
            self._write_state()

    def _log_change(self, name: str, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> None:
        if new is None:
            self._log_line(f"{name} is gone")
        elif old is None or (old["state"], old["url"]) != (new["state"], new["url"]):
            why = new["detail"] if new["state"] == "dead" else ""
            self._log_line(f"{name} is {new['state']} at {new['url']}{why}")

    async def _tell_router(self) -> None:
        """Tell it of new addresses, and of those that are no more. A planner in it may have been faster."""
        present = {row["url"] for row in self._rows.values() if row["state"] in ("starting", "ready", "stopping")}
        if self._url is None or present == self._told:
            return
        async with aiohttp.ClientSession(trust_env=False, headers=self._headers) as http:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                for url in sorted(present - self._told):
                    await self._send(http, "POST", "/workers", {"url": url})
                    self._told.add(url)
                listed = (await self._send(http, "GET", "/workers"))["workers"]
                for row in [row for row in listed if row["url"] in self._told - present]:
                    await self._send(http, "DELETE", f"/workers/{row['number']}")
                self._told = present

    async def _send(self, http: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
        async with http.request(
            method, f"{self._url}{path}", json=body, timeout=aiohttp.ClientTimeout(total=5.0)
        ) as answer:
            if answer.status >= 400 and answer.status != 409:  # it is there already, or gone
                self._log_line(f"the router answers {answer.status} to {method} {path}")
            return await answer.json()

    # -- end and state -------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        if self._router is not None:
            with contextlib.suppress(ProcessLookupError):
                self._router.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(self._router.wait, ROUTER_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._router.pid, signal.SIGKILL)
                self._router.wait()
        if self._reader is not None:
            self._reader.close_reader()
        try:
            await self._actuator.end_fleet()
            self._log_line("stopped, nothing left running")
        except ActuatorError as error:
            self._log_line(f"instances may be left running: {error}")
        await self._actuator.close()
        if self._state_file is not None:
            self._state_file.unlink(missing_ok=True)

    def _write_state(self) -> None:
        """In the form of a local cluster's, as far as it is the same."""
        if self._state_file is None:
            return
        router = None if self._router is None else {"url": self._url, "pid": self._router.pid}
        state = {
            "pid": os.getpid(),
            "ready": bool(self._measured),
            "url": self._url or next((row["url"] for row in self._rows.values()), None),
            "router": router,
            "instances": list(self._rows.values()),
        }
        write_state_file(self._state_file, self._measured | state)

    def _log_line(self, text: str) -> None:
        self._sink("cluster", text)


async def end_fleet(where: RayFleetName) -> None:
    """End what a launcher that is gone has left. Raises ActuatorError."""
    actuator = RayActuator(where)
    try:
        await actuator.end_fleet()
    finally:
        await actuator.close()
