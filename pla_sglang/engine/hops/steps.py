"""What an endpoint is given, chunk by chunk, and which tokens are new in each."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pla_sglang.engine.hops.feed import Feed

MOVED = "pla_moved"  # type of the finish reason of a request that another instance has


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One chunk for the endpoint.

    Attributes:
        chunk: as the host's TokenizerManager gives it.
        new_ids: ids of the tokens that no earlier step and no other instance has had.
        live: it comes from the engine; else it is of old tokens, and nothing of it need be shown.
    """

    chunk: dict[str, Any]
    new_ids: Sequence[int]
    live: bool = True

    @property
    def moved(self) -> bool:
        """The request goes on elsewhere: nothing of this chunk may be shown, as it ends what is not at its end."""
        return _end_of(self.chunk) == MOVED


def is_abort(chunk: dict[str, Any]) -> bool:
    """Such an answer does not go on, so its ids need not be known; the host may repeat an old one there."""
    return _end_of(chunk) == "abort"


def _end_of(chunk: dict[str, Any]) -> str | None:
    reason = chunk["meta_info"].get("finish_reason")
    return reason.get("type") if isinstance(reason, dict) else None


async def read_steps(feed: Feed, *, incremental: bool) -> AsyncGenerator[Step, None]:
    """Of an answer that begins here.

    ``incremental``: the host gives in each chunk what is new, else all so far. Then the list of ids is the host's own,
    which goes on growing: it is read before anything else may run.
    """
    assert feed.source is not None
    known_tokens = 0
    try:
        async for chunk in feed.source:
            ids = () if is_abort(chunk) else chunk["output_ids"]
            new_ids = ids if incremental else ids[known_tokens:]
            known_tokens += len(new_ids)
            yield Step(chunk, new_ids)
    finally:
        await feed.source.aclose()
