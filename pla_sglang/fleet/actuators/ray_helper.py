"""The process that speaks to Ray for ``RayActuator``: ``python -m pla_sglang.fleet.actuators.ray_helper ADDRESS NAME``.

One JSON object in a line, each way: ``{"id": 1, "call": "list_instances", "arguments": []}``, and ``{"id": 1, "answer":
...}`` or ``{"id": 1, "error": "..."}``. The answer with id 0 comes first: whether Ray was found.

A process of its own, because Ray ends a driver whose head is away for long, and a router is to serve on.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from pla_sglang.fleet.actuators.ray_names import FLEET, describe_error, listens

CALLS = frozenset({"start_instance", "stop_instance", "list_instances", "end_fleet"})


class Helper:
    """Answers calls of its parent until there is no more input."""

    def __init__(self, name: str, output: int) -> None:
        self._name, self._output = name, output
        self._head = ray.get_runtime_context().gcs_address
        self._fleet: Any = None  # its actor, once it was found: the head alone knows where

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        tasks: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            tasks.add(task := loop.create_task(self._answer(json.loads(line))))
            task.add_done_callback(tasks.discard)

    async def _answer(self, request: dict[str, Any]) -> None:
        try:
            answer = {"answer": await self._call(request["call"], request["arguments"])}
        except (RayError, OSError, ValueError) as error:
            answer = {"error": describe_error(error)}
        write_line(self._output, {"id": request["id"]} | answer)

    async def _call(self, method: str, arguments: list[Any]) -> Any:
        assert method in CALLS, method
        if not await asyncio.to_thread(listens, self._head):  # the fleet's actor answers for a while after that
            raise ConnectionError(f"the head of Ray at {self._head} is gone")
        fleet = self._fleet = self._fleet or await asyncio.to_thread(ray.get_actor, FLEET, namespace=self._name)
        try:
            answer = await getattr(fleet, method).remote(*arguments)
        except ActorDiedError:
            self._fleet = None  # another may have its name
            raise
        if method == "end_fleet":
            ray.kill(fleet)
        return answer


def write_line(output: int, value: dict[str, Any]) -> None:
    os.write(output, json.dumps(value).encode() + b"\n")


def main(address: str, name: str) -> None:
    output = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is no answer
    try:
        if not listens(address):
            raise ConnectionError(f"no head of Ray listens at {address}")
        ray.init(address=address, namespace=name, log_to_driver=False, logging_level="ERROR")
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        write_line(output, {"id": 0, "error": describe_error(error)})
        return
    write_line(output, {"id": 0, "answer": None})
    asyncio.run(Helper(name, output).serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
