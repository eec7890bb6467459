"""The commands of ``POST /pla/hops`` as values, and how far a message of them was carried out. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.stateless.transfer.exports import PausedRequest

HOLD, RESUME, COMMIT = "hold", "resume", "commit"
_FIELDS = {HOLD: {"do", "rid", "room", "for_s"}} | {do: {"do", "room"} for do in (RESUME, COMMIT)}
MOST_COMMANDS = 1000
LEAST_HOLD_S, MOST_HOLD_S, DEFAULT_HOLD_S = 0.1, 300.0, 10.0
MOST_ROOM = 2**63 - 1

Answer = dict[str, str | int]


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One of a message; ``rid`` and ``for_s`` of a hold only."""

    do: str
    room: int
    rid: str = ""
    for_s: float = DEFAULT_HOLD_S

    def names(self, hold: PausedRequest) -> bool:
        """Tells whether it is about the request of ``hold``."""
        return hold.room == self.room or hold.req.rid == self.rid


def parse_commands(body: Any) -> tuple[Command, ...]:
    """The body of ``POST /pla/hops``. Raises ConfigError."""
    if not isinstance(body, Mapping) or set(body) != {"commands"} or not isinstance(body["commands"], list):
        raise ConfigError('expected {"commands": [{"do": ..., "room": ...}, ...]}')
    if not 1 <= len(body["commands"]) <= MOST_COMMANDS:
        raise ConfigError(f"{len(body['commands'])} commands; allowed: 1 to {MOST_COMMANDS}")
    return tuple(_parse(entry, f"commands[{place}]") for place, entry in enumerate(body["commands"]))


def _parse(entry: Any, where: str) -> Command:
    do = entry.get("do") if isinstance(entry, Mapping) else None
    if not isinstance(do, str) or do not in _FIELDS:
        raise ConfigError(f"{where}: do {do!r} is not valid; allowed: {', '.join(_FIELDS)}")
    if not {"do", "room"} <= set(entry) <= _FIELDS[do]:
        raise ConfigError(f"{where}: {do} has the members {', '.join(sorted(_FIELDS[do]))}")
    room = check_room(entry["room"], f"{where}.room")
    if do != HOLD:
        return Command(do, room)
    rid = entry.get("rid")
    if not isinstance(rid, str) or not rid:
        raise ConfigError(f"{where}.rid {rid!r} is not valid; allowed: a request id")
    return Command(do, room, rid, check_hold_s(entry.get("for_s", DEFAULT_HOLD_S), f"{where}.for_s"))


def check_room(room: Any, where: str) -> int:
    """Raises ConfigError."""
    if isinstance(room, bool) or not isinstance(room, int) or not 0 <= room <= MOST_ROOM:
        raise ConfigError(f"{where} {room!r} is not valid; allowed: a whole number from 0 to {MOST_ROOM}")
    return room


def check_hold_s(hold_s: Any, where: str) -> float:
    """Raises ConfigError."""
    number = float("nan") if isinstance(hold_s, bool) or not isinstance(hold_s, (int, float)) else float(hold_s)
    if not LEAST_HOLD_S <= number <= MOST_HOLD_S:
        raise ConfigError(f"{where} {hold_s!r} is not valid; allowed: {LEAST_HOLD_S} to {MOST_HOLD_S:.0f} seconds")
    return number


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """A message that is being carried out, command after command.

    Attributes:
        ticket: by which its sender knows the answers.
        answers: of the commands that are done.
        waits_for: the hold whose end of its last step the next answer waits for.
        tries: how often the present command was tried again, a step later each time.
    """

    ticket: int
    commands: tuple[Command, ...]
    answers: list[Answer] = dataclasses.field(default_factory=list)
    waits_for: PausedRequest | None = None
    tries: int = 0

    @property
    def next_command(self) -> Command | None:
        """None: all are done."""
        return self.commands[len(self.answers)] if len(self.answers) < len(self.commands) else None

    def answer(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.waits_for, self.tries = None, 0
