"""The messages that carry commands from the HTTP process to every scheduler rank, in one order, and their answers."""

from __future__ import annotations

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

from pla_sglang.engine.hops.orders import Answer, Command


class PlaHops(BaseReq, kw_only=True):  # type: ignore[call-arg]  # a msgspec class that mypy is told to skip
    ticket: int
    commands: tuple[Command, ...]


class PlaHopAnswers(BaseReq, kw_only=True):  # type: ignore[call-arg]  # as above
    ticket: int
    answers: list[Answer]


def register_hop_messages() -> None:
    """Let this process's decoder know the messages."""
    hook_custom_types(PlaHops, PlaHopAnswers)
