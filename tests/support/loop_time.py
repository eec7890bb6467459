"""Time in which an event loop could run, for bounds that a machine which stands still must not break."""

from __future__ import annotations

import asyncio
from typing import Self

STEP_S = 0.01


class LoopTime:
    """``async with LoopTime() as ran``: ``ran.seconds`` of the block in which its loop could run.

    It counts naps of ``STEP_S``. A process or machine that stands still for seconds adds one nap, where a wall clock
    adds seconds; what waits for a time limit of a second or two adds all of it in both.
    """

    def __init__(self) -> None:
        self._naps = 0
        self._counting: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        return self._naps * STEP_S

    async def __aenter__(self) -> Self:
        self._counting = asyncio.ensure_future(self._count_naps())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._counting is not None:
            self._counting.cancel()

    async def _count_naps(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            self._naps += 1
