"""The control message that carries the told peers from the HTTP process to every scheduler rank, in one order."""

from __future__ import annotations

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

from pla_sglang.engine.stateless.peers import Told


class PlaPeers(BaseReq, kw_only=True):  # type: ignore[call-arg]  # a msgspec class that mypy is told to skip
    told: Told


def register_message() -> None:
    """Let this process's decoder know the message."""
    hook_custom_types(PlaPeers)
