"""What the ledger orders and the monitor posts: the abort of one leg of a request."""

from __future__ import annotations

import dataclasses

from pla_sglang.fleet.router.wire.messages import Leg


@dataclasses.dataclass(frozen=True, slots=True)
class AbortOrder:
    """Tell instance ``worker`` to drop what attempt ``attempt`` of ``rid`` has there.

    ``rids``: under which ids SGLang knows the prompts of the request.
    """

    rid: str
    leg: Leg
    worker: int
    attempt: int
    rids: tuple[str, ...]
