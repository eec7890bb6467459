"""What the control plane keeps over its own restarts: which worker has which number, and what operators asked for.

Relays name instances by number, also to a control plane that has just started, so numbers must mean the same then.
Everything else is asked of the instances and the relays. The file is replaced as a whole at each change.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from pla_sglang.common.errors import ConfigError

logger = logging.getLogger(__name__)


class SavedWorker(msgspec.Struct, omit_defaults=True):
    """One worker.

    Attributes:
        identity: that of its process; another process gets another number.
        ready: it gets requests.
        role, role_epoch: of a stateless instance.
        length_class: of its prompts; empty: both.
    """

    number: int
    url: str
    identity: str = ""
    draining: bool = False
    leaves: bool = False
    ready: bool = False
    role: str = ""
    role_epoch: int = 0
    length_class: str = ""


class SavedState(msgspec.Struct):
    """The file.

    Attributes:
        removed: addresses that an operator or a planner has removed, and nobody has added since.
        starts_s: how long the last instances took to start that a planner had ordered, in device time.
    """

    next_number: int = 0
    workers: list[SavedWorker] = []
    removed: list[str] = []
    starts_s: list[float] = []


class StateFile:
    """The saved state, and its file if there is one (``path``). Raises ConfigError for a damaged file."""

    def __init__(self, path: Path | None) -> None:
        self.state = SavedState() if path is None else load_state(path)
        self._path = path
        self._changed = self._failing = False

    def is_removed(self, url: str) -> bool:
        return url in self.state.removed

    def mark_changed(self, *, removed: str | None = None, added: str | None = None) -> None:
        """``removed``: an address that an operator or a planner has removed. ``added``: one that may serve again."""
        if added in self.state.removed:
            self.state.removed.remove(added)
        if removed is not None and removed not in self.state.removed:
            self.state.removed.append(removed)
        self._changed = True

    def save_changes(self, next_number: int, workers: Iterable[SavedWorker]) -> None:
        """Does nothing without a change. A file that cannot be written is logged once, and tried again."""
        if self._path is None or not self._changed:
            return
        self.state.next_number = next_number
        self.state.workers = list(workers)
        try:
            save_state(self._path, self.state)
        except OSError as error:  # a full disk, say
            if not self._failing:
                logger.error("the memory file cannot be written; a restart would mix up workers: %s", error)
        else:
            self._changed = False
        self._failing = self._changed


def load_state(path: Path) -> SavedState:
    """Empty if the file does not exist. Raises ConfigError for a damaged file: guessing would mix up numbers."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedState)
    except FileNotFoundError:
        return SavedState()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"memory file {path}: {error}; remove it to start afresh") from None


def save_state(path: Path, state: SavedState) -> None:
    """Atomic: a reader sees the old file or the new one. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
    temporary.replace(path)
