"""Instances on this machine: orders go to the cluster that ``launch_cluster`` runs, over its control socket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from pla_sglang.fleet.actuators.cluster_socket import decode_instance, lease_path, require_state_file, send_command
from pla_sglang.fleet.actuators.interface import ActuatorError, StartedInstance
from pla_sglang.fleet.actuators.lease import FileLease

# The cluster takes an order at once. A machine on which all cores import SGLang may take its time.
ANSWER_TIMEOUT_S = 10.0


class LocalActuator:
    """Actuator of the cluster that writes ``state_file``. Each order is a connection of its own, so that a cluster may
    start after its planner, and start again.

    Raises:
        ConfigError: a state file cannot be there.
    """

    def __init__(self, state_file: Path) -> None:
        require_state_file("--actuator local:STATE_FILE", state_file)
        self._state_file = state_file
        self.lease = FileLease(lease_path(state_file))

    async def start_instance(self, kind: str, plan: int) -> StartedInstance:
        return decode_instance(await self._ask("start", kind, str(plan)))

    async def stop_instance(self, name: str) -> None:
        await self._ask("remove", name)

    async def list_instances(self) -> list[StartedInstance]:
        rows = await self._ask("list")
        if not isinstance(rows, list):
            raise ActuatorError(f"list: not an answer of a cluster: {rows!r}")
        return [decode_instance(row) for row in rows]

    async def close(self) -> None:
        self.lease.release()

    async def _ask(self, *words: str) -> Any:
        answer = await asyncio.to_thread(send_command, self._state_file, words, ANSWER_TIMEOUT_S)
        try:
            return json.loads(answer)
        except ValueError:
            raise ActuatorError(f"{' '.join(words)}: not an answer of a cluster: {answer!r}") from None
