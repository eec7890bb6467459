"""Instances as actors of Ray. Orders go to the fleet's actor, which ``launch_cluster --on ray`` has made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pla_sglang.fleet.actuators.cluster_socket import decode_instance
from pla_sglang.fleet.actuators.interface import ActuatorError, StartedInstance
from pla_sglang.fleet.actuators.ray_names import RayFleetName

ANSWER_TIMEOUT_S = 15.0
PLACED_S = 60.0  # for a node to take an instance: Ray starts a process there first
CONNECT_S = 60.0  # for the helper to import Ray and to find its head
RETRY_S = 5.0  # between the end of a helper and the next one
# An owner that says nothing for so long has lost the lease. It says so at each list, twice a second, and longest not
# where its helper has ended: the next one begins RETRY_S later, and has found Ray after 1.5 s (two cores with a load of
# 20). So twice RETRY_S. With half of it each helper that ends would change the owner; where the owner is gone nobody
# scales for as long as it is.
LEASE_S = 2 * RETRY_S


class RayLease:
    """A lease that the fleet's actor gives, for ``LEASE_S`` from each list on. The first list gets it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.token = secrets.token_hex(8)
        self.holder = f"{os.getpid()} {Path(sys.argv[0]).name} at {socket.gethostname()}"
        self.is_wanted = False
        self._clock = clock
        self._owner = ""
        self._until_s = 0.0

    @property
    def owner(self) -> str:
        """See ``Lease``."""
        return self._owner

    def acquire(self) -> bool:
        """See ``Lease``. True from the first list on that has found it free."""
        self.is_wanted = True
        return self._clock() < self._until_s

    def release(self) -> None:
        """See ``Lease``. The fleet hears of it at the next list, or at the actuator's end."""
        self.is_wanted, self._until_s = False, 0.0

    def note_answer(self, asked_s: float, owner: str, *, leads: bool) -> None:
        """``asked_s``: when the list was asked for, before the fleet's own time began."""
        self._owner = owner
        self._until_s = asked_s + LEASE_S if leads and self.is_wanted else 0.0


class RayActuator:
    """Actuator of the fleet ``where``. Raises ConfigError."""

    def __init__(self, where: RayFleetName) -> None:
        self._where = where
        self._helper: Helper | None = None
        self.lease = RayLease()

    async def start_instance(self, kind: str, plan: int | None) -> StartedInstance:
        """See ``Actuator``. Returns once a node has taken it: there is no address before."""
        return decode_instance(await self._ask("start_instance", kind, plan, timeout_s=PLACED_S + ANSWER_TIMEOUT_S))

    async def stop_instance(self, name: str) -> None:
        await self._ask("stop_instance", name)

    async def list_instances(self) -> list[StartedInstance]:
        return [decode_instance(row) for row in await self.list_rows()]

    async def list_rows(self) -> list[dict[str, Any]]:
        """Instances with all that the fleet knows of them. Keeps the lease. Raises ActuatorError."""
        lease, asked_s = self.lease, time.monotonic()
        answer = await self._ask("list_instances", lease.token, lease.holder, lease.is_wanted)
        lease.note_answer(asked_s, answer["owner"], leads=answer["leads"])
        rows: list[dict[str, Any]] = answer["instances"]
        return rows

    async def end_fleet(self) -> None:
        """All its instances, and the fleet's actor. Raises ActuatorError."""
        await self._ask("end_fleet", timeout_s=PLACED_S)

    async def close(self) -> None:
        held = self.lease.acquire()
        self.lease.release()
        if self._helper is not None:
            if held and self._helper.error is None:
                with contextlib.suppress(ActuatorError):
                    await self.list_rows()
            self._helper.close()
            self._helper = None

    async def _ask(self, call: str, *arguments: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        what = " ".join([call, *map(str, arguments)]) if call == "start_instance" else call
        helper = self._helper
        if helper is None or (helper.error is not None and time.monotonic() > helper.ended_s + RETRY_S):
            helper = self._helper = Helper(self._where)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.shield(asyncio.wrap_future(helper.connected))
            async with asyncio.timeout(timeout_s):
                answer = await asyncio.wrap_future(helper.send(call, arguments))
        except TimeoutError:
            raise ActuatorError(f"{what}: no answer from {self._where}") from None
        except ActuatorError as error:
            raise ActuatorError(f"{what}: {self._where}: {error}") from None
        if isinstance(answer, dict) and "error" in answer:
            raise ActuatorError(f"{what}: {answer['error']}")
        return answer


class Helper:
    """A process of ``ray_helper``, and the answers it owes. It ends when its input does.

    Attributes:
        error: why it has ended; None: it runs. ``ended_s``: when, by ``time.monotonic``.
    """

    def __init__(self, where: RayFleetName) -> None:
        self.error: str | None = None
        self.ended_s = 0.0
        self.connected: Future[Any] = Future()
        self._answers: dict[int, Future[Any]] = {0: self.connected}
        self._last_id = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pla_sglang.fleet.actuators.ray_helper", where.address, where.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        threading.Thread(target=self._read_answers, daemon=True).start()

    def send(self, call: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Its answer. Raises ActuatorError, here or there."""
        if self.error is not None:
            raise ActuatorError(self.error)
        self._last_id += 1
        answer: Future[Any] = Future()
        self._answers[self._last_id] = answer
        line = json.dumps({"id": self._last_id, "call": call, "arguments": arguments})
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ActuatorError(f"Ray's driver has ended: {error}") from None
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()

    def _read_answers(self) -> None:
        """In a thread, until it has ended."""
        assert self._process.stdout is not None
        error = "Ray's driver has ended"
        for line in self._process.stdout:
            row = json.loads(line)
            if row["id"] == 0 and "error" in row:
                error = row["error"]
                break
            self._settle(row["id"], row.get("answer"), row.get("error"))
        self._process.kill()
        self._process.wait()
        self.ended_s, self.error = time.monotonic(), error
        for number in list(self._answers):
            self._settle(number, None, error)

    def _settle(self, number: int, answer: Any, error: str | None) -> None:
        waiting = self._answers.pop(number, None)
        if waiting is None or not waiting.set_running_or_notify_cancel():
            return
        if error is None:
            waiting.set_result(answer)
        else:
            waiting.set_exception(ActuatorError(error))
