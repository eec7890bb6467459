"""NIXL's progress thread on a host whose cores compute as well: it sleeps until something happens."""

from __future__ import annotations

from typing import Any

REST_US = 10_000  # events end the wait; this is only how often NIXL looks without one


def let_nixl_rest(manager: Any, *args: Any, **keywords: Any) -> None:
    """Before ``NixlKVManager.__init__``: NIXL agents of this process are made with a pause between two looks.

    NIXL's Python API fixes ``pthrDelay`` at 0. Its progress thread then polls without a pause, in every prefill and
    decode engine: three quarters of a core each, measured with nothing to transfer. With a pause it waits on UCX's
    event descriptors, so a transfer that begins ends it.
    """
    from nixl import _api

    binding = _api.nixlBind
    if not getattr(binding.nixlAgentConfig, "pla_rests", False):
        binding.nixlAgentConfig = resting(binding.nixlAgentConfig)


def resting(config: type) -> type:
    """A kind of agent configuration ``config`` whose ``pthrDelay`` is ``REST_US`` whatever it is set to."""
    delay: Any = config.__dict__["pthrDelay"]

    class Resting(config):
        pla_rests = True

        @property
        def pthrDelay(self) -> int:
            return int(delay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, wanted: int) -> None:
            delay.__set__(self, REST_US)

    return Resting
