"""The control socket of a cluster (``launch_cluster``): one command in a line, one answer in a line.

    restart NAME        ok, once it is ready again
    stop                ok
    list                [INSTANCE, ...]
    start KIND [PLAN]   INSTANCE, at once
    remove NAME         INSTANCE, at once

INSTANCE is a JSON object with the fields of ``StartedInstance``. ``error: ...`` stands for any other answer.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.common.terminal import require_file_path
from pla_sglang.fleet.actuators.interface import ActuatorError, StartedInstance

ERROR = "error: "
SOCKET, LEASE, TEMPORARY = ".sock", ".planner", ".tmp"  # endings of the files beside a state file


def socket_path(state_file: Path) -> Path:
    """The control socket of the cluster that writes ``state_file``."""
    return state_file.with_suffix(SOCKET)


def lease_path(state_file: Path) -> Path:
    """The file that the planner of this cluster holds."""
    return state_file.with_suffix(LEASE)


def require_state_file(flag: str, path: Path) -> None:
    """The name can be that of a state file. Raises ConfigError."""
    require_file_path(flag, path)
    if path.suffix in (SOCKET, LEASE, TEMPORARY):
        raise ConfigError(f"{flag} {path} has the name of a file beside a state file; allowed: such as cluster.json")


def send_command(state_file: Path, words: Sequence[str], timeout_s: float = 300.0) -> str:
    """Send a command to the cluster of ``state_file``; returns its answer. Blocks.

    Raises:
        ActuatorError: no cluster answers, or it answers that it cannot.
    """
    command = " ".join(words)
    if any(word.split() != [word] for word in words):
        raise ActuatorError(f"{command!r}: {words[-1]!r} cannot be a name; allowed: one word")
    path = socket_path(state_file)
    try:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(timeout_s)
            channel.connect(str(path))
            channel.sendall(command.encode() + b"\n")
            answer = channel.makefile().readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ActuatorError(f"{command}: no cluster answers at {path}: {error}") from None
    if not answer:
        raise ActuatorError(f"{command}: the cluster at {path} ended before its answer")
    if answer.startswith(ERROR):
        raise ActuatorError(f"{command}: {answer.removeprefix(ERROR)}")
    return answer


def encode_instance(instance: StartedInstance) -> dict[str, Any]:
    """For an answer."""
    return dataclasses.asdict(instance)


def decode_instance(row: Any) -> StartedInstance:
    """Raises ActuatorError for what is no instance. Unknown fields are left out: the cluster may be newer."""
    if not isinstance(row, dict):
        raise ActuatorError(f"not an answer of a cluster: {row!r} is no instance")
    values: dict[str, Any] = {field.name: row.get(field.name) for field in dataclasses.fields(StartedInstance)}
    made = StartedInstance(**values)
    texts = (made.name, made.url, made.kind, made.state)
    if not all(isinstance(text, str) for text in texts) or not (made.plan is None or type(made.plan) is int):
        raise ActuatorError(f"not an answer of a cluster: {json.dumps(row)} is no instance")
    return made
