"""What the ledger orders and the monitor posts: the abort of what one instance has of a request."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class AbortOrder:
    """Tell instance ``worker`` to drop what attempt ``attempt`` of ``rid`` has there.

    ``rids``: under which ids SGLang knows the prompts of the request.
    """

    rid: str
    worker: int
    attempt: int
    rids: tuple[str, ...]
