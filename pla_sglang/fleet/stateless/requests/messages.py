"""What the HTTP process and the scheduler ranks say to each other. Every rank gets all messages, in one order."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

from pla_sglang.fleet.stateless.requests.commands import Answer, Command
from pla_sglang.fleet.stateless.transfer.peers import PeerConfig


class PlaPeers(BaseReq, kw_only=True):  # type: ignore[call-arg]  # a msgspec class that mypy is told to skip
    told: PeerConfig


class PlaCommands(BaseReq, kw_only=True):  # type: ignore[call-arg]  # as above
    ticket: int
    commands: tuple[Command, ...]


class PlaCommandAnswers(BaseReq, kw_only=True):  # type: ignore[call-arg]  # as above
    ticket: int
    answers: list[Answer]


def register_messages() -> None:
    """Let this process's decoder know them."""
    hook_custom_types(PlaPeers, PlaCommands, PlaCommandAnswers)


def send_answers(scheduler: Any, ticket: int, answers: list[Answer]) -> None:
    """To the process of HTTP; ranks other than the first have no socket and send nothing."""
    message = PlaCommandAnswers(ticket=ticket, answers=answers)
    scheduler.ipc_channels.send_to_tokenizer.send_output(message, message)
