"""The launcher's side of the zygote: requests out, events in, output of each child to a log."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pla_sglang.cluster.zygote import MESSAGE_BYTES
from pla_sglang.errors import PlaError


class ClusterError(PlaError):
    """The cluster cannot start, or something it needs has ended."""


class Children:
    """One zygote process and what it has forked."""

    def __init__(self, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pla_sglang.cluster.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()

    def fileno(self) -> int:
        return self._channel.fileno()

    def fork(self, name: str, argv: Sequence[str], env: Mapping[str, str], output: int) -> None:
        """Fork an engine. ``output`` is the descriptor that gets its stdout and stderr; the caller closes it."""
        self._request({"op": "fork", "name": name, "argv": list(argv), "env": dict(env)}, [output])

    def run(self, name: str, module: str, argv: Sequence[str], env: Mapping[str, str], output: int) -> None:
        """Fork ``python -m module argv``, under the same care."""
        request = {"op": "run", "name": name, "module": module, "argv": list(argv), "env": dict(env)}
        self._request(request, [output])

    def kill(self, name: str, number: int) -> None:
        """Signal the process group of ``name``; nothing happens where it has ended."""
        self._request({"op": "kill", "name": name, "signal": int(number)}, [])

    def event(self) -> dict[str, Any]:
        """The next event; blocks. Raises ClusterError when the zygote is gone."""
        data = self._channel.recv(MESSAGE_BYTES)
        if not data:
            raise ClusterError("the process that forks engines has ended; its output is above")
        event: dict[str, Any] = json.loads(data)
        return event

    def close(self) -> None:
        """The zygote kills everything and ends; wait for it."""
        self._channel.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its children die with it
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _request(self, request: dict[str, Any], descriptors: list[int]) -> None:
        socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
