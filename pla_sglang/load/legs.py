"""What the two ends of a stateless instance hold: in its load reports, and in its answer to who it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
HOLDERS = ("sending", "receiving", "quarantine")  # of KV memory that the host's batches do not own


class LegLoad(msgspec.Struct, frozen=True, array_like=True):
    """The legs of one instance.

    Attributes:
        sending, receiving: legs by state.
        kv_tokens: by holder.
        quarantined: requests that were given up, and whose pages a transfer may still touch.
        refused, faults: since the start: requests refused as no leg that can be served; exceptions of our own code.
        ready: whether it can hand over KV at all; not once a thread that does has ended.
    """

    sending: dict[str, Count] = {}
    receiving: dict[str, Count] = {}
    kv_tokens: dict[str, Count] = {}
    quarantined: Count = 0
    refused: Count = 0
    faults: Count = 0
    ready: bool = True

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """From the block ``stateless`` of an instance's state. Raises KeyError, TypeError, msgspec.ValidationError."""
        return msgspec.convert(
            (
                *(state[end]["legs"] for end in ("sending", "receiving")),
                {holder: state[holder]["kv_tokens"] for holder in HOLDERS},
                state["quarantine"]["requests"],
                state["refused"],
                state["faults"],
                state.get("ready", True),
            ),
            cls,
        )
