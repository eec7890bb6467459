"""The launcher's side of the zygote: requests out, events in, output of each child to a log."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pla_sglang.common.errors import PlaError
from pla_sglang.fleet.cluster.zygote import MESSAGE_BYTES


class ClusterError(PlaError):
    """The cluster cannot start, or a process that it needs has ended."""


class Children:
    """One zygote process and its forked children."""

    def __init__(self, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pla_sglang.fleet.cluster.zygote", str(theirs.fileno())],
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

    def fork_process(self, name: str, argv: Sequence[str], output: int, *, module: str | None = None) -> None:
        """Fork an engine, or ``python -m module argv``.

        ``output`` is the descriptor that gets its stdout and stderr; the caller closes it.
        """
        self._send_request({"op": "fork", "name": name, "module": module, "argv": list(argv)}, [output])

    def kill_group(self, name: str, number: int) -> None:
        """Signal the process group of ``name``; no effect if it has ended."""
        self._send_request({"op": "kill", "name": name, "signal": int(number), "group": True}, [])

    def kill_first(self, name: str, number: int) -> None:
        """Signal the process that the others of ``name`` were forked from; no effect if it has ended."""
        self._send_request({"op": "kill", "name": name, "signal": int(number), "group": False}, [])

    def read_event(self) -> dict[str, Any]:
        """The next event; blocks. Raises ClusterError when the zygote is gone."""
        data = self._channel.recv(MESSAGE_BYTES)
        if not data:
            raise ClusterError("the process that forks engines has ended; its output is above")
        event: dict[str, Any] = json.loads(data)
        return event

    def close_zygote(self) -> None:
        """The zygote kills everything and ends; wait for it."""
        self._channel.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its children die with it
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _send_request(self, request: dict[str, Any], descriptors: list[int]) -> None:
        socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
