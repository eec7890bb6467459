"""What the control plane remembers over its own restarts: who has which number, and what operators have wished.

Relays name instances by number, also to a control plane that has just started, so numbers must mean the same then.
Everything else is asked of the instances and the relays. The file is replaced as a whole at each change.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from pla_sglang.errors import ConfigError


class Remembered(msgspec.Struct, omit_defaults=True):
    """One worker. ``identity`` is that of its process; another process gets another number."""

    number: int
    url: str
    identity: str = ""
    draining: bool = False
    leaves: bool = False


class Memory(msgspec.Struct):
    """The file. ``removed``: addresses of the command line that an operator has removed since."""

    next_number: int = 0
    workers: list[Remembered] = []
    removed: list[str] = []


def load(path: Path) -> Memory:
    """Empty where there is no file yet. Raises ConfigError for one that is damaged: guessing would mix up numbers."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Memory)
    except FileNotFoundError:
        return Memory()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"memory file {path}: {error}; remove it to start afresh") from None


def save(path: Path, memory: Memory) -> None:
    """Atomic: a reader sees the old file or the new one. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(memory), indent=1) + b"\n")
    temporary.replace(path)
