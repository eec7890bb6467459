"""What the HTTP process and the scheduler ranks say to each other. Every rank gets all messages, in one order."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

from pla_sglang.fleet.stateless.requests.commands import Answer, Command
from pla_sglang.fleet.stateless.transfer.peers import Told


class PlaPeers(BaseReq, kw_only=True):  # type: ignore[call-arg]  # a msgspec class that mypy is told to skip
    told: Told


class PlaHops(BaseReq, kw_only=True):  # type: ignore[call-arg]  # as above
    ticket: int
    commands: tuple[Command, ...]


class PlaHopAnswers(BaseReq, kw_only=True):  # type: ignore[call-arg]  # as above
    ticket: int
    answers: list[Answer]


def register_messages() -> None:
    """Let this process's decoder know them."""
    hook_custom_types(PlaPeers, PlaHops, PlaHopAnswers)


def send_answers(scheduler: Any, ticket: int, answers: list[Answer]) -> None:
    """To the process of HTTP; ranks other than the first have no socket and send nothing."""
    message = PlaHopAnswers(ticket=ticket, answers=answers)
    scheduler.ipc_channels.send_to_tokenizer.send_output(message, message)
