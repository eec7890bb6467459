"""What the hosts of real engines add to the times of a profile. All off by default."""

from __future__ import annotations

import dataclasses

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.kernel import LATEST_S

TIME = Range(0, LATEST_S)


@dataclasses.dataclass(frozen=True)
class HostKnobs:
    """How SGLang's host works beside its device, and constants that ``python -m bench fidelity`` measures.

    Attributes:
        overlap: a pass is decided when the one before it starts on the device (SGLang's overlap schedule, its default):
            what arrives meanwhile waits for one pass more, prefix blocks of a pass are visible one decision later, and
            a batch runs one step more after its last request has ended. See ``overlap``.
        room_first: a pair does as SGLang's: the decode instance makes room before the prefill may begin, and gives the
            first token, once it has the KV.
        place_first: the decode instance of a pair is named with the dispatch, as SGLang's router does, and makes room
            when the prefill is done (``--disaggregation-decode-allocation-policy prefill_complete``). ``room_first``
            is the other policy, ``early``.
        front_s: of a request, from its arrival at the router to the queue of the engine.
        handshake_s: of a pair, from the room at the decode instance to the queue of the prefill instance.
        handoff_s: of a pair, from the end of the prefill until the decode instance can see that KV may come.
        step_s: added to every pass.

    Raises:
        ConfigError: a time is out of range, or ``room_first`` without ``overlap``.
    """

    overlap: bool = False
    room_first: bool = False
    place_first: bool = False
    front_s: float = knob(0.0, allowed=TIME)
    handshake_s: float = knob(0.0, allowed=TIME)
    handoff_s: float = knob(0.0, allowed=TIME)
    step_s: float = knob(0.0, allowed=TIME)

    def __post_init__(self) -> None:
        check_fields(self, "host")
        if self.room_first and not self.overlap:
            raise ConfigError("host room_first is set without overlap; allowed: both, or overlap alone")


NO_HOST = HostKnobs()
