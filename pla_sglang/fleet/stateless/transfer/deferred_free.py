"""Pages of a transfer that was given up stay allocated until nobody can read or write them any more.

SGLang frees a sender's pages at once when a request is aborted, while its worker still reads, and 0.5.17 a receiver's
while the sender may still write into them (its NIXL connection says so in a comment). Whoever gets the pages next would
then read foreign KV. Here pages are freed once the sender is known to be through: it has acknowledged the abort, its
process is gone, or a time-out has passed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pla_sglang.fleet.stateless.host.calls import Agree
from pla_sglang.plugin.engine.faults import Faults

TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Deferred:
    """What is held.

    Attributes:
        tokens: KV tokens.
        is_through: whether no transfer touches the pages any more, as far as this rank knows.
        release: frees everything; called once.
        until_s: then it is released in any case.
    """

    tokens: int
    is_through: Callable[[], bool]
    release: Callable[[], None]
    until_s: float


class DeferredFree:
    """Owned by the scheduler thread. All ranks hold the same in the same order."""

    def __init__(self, agree: Agree, faults: Faults) -> None:
        self._agree = agree
        self._faults = faults
        self._held: list[Deferred] = []
        self.timeouts = 0

    def __len__(self) -> int:
        return len(self._held)

    def state(self) -> dict[str, int]:
        """Plain values."""
        return {
            "requests": len(self._held),
            "kv_tokens": sum(held.tokens for held in self._held),
            "timeouts": self.timeouts,
        }

    def hold(self, tokens: int, *, is_through: Callable[[], bool], release: Callable[[], None], now_s: float) -> None:
        """Keep pages until ``is_through``; ``release`` frees them."""
        self._held.append(Deferred(tokens, is_through, release, now_s + TIMEOUT_S))

    def sweep(self, now_s: float) -> None:
        """Release what all ranks agree to be through."""
        if not self._held:
            return
        own = [held.is_through() for held in self._held]
        late = [now_s >= held.until_s for held in self._held]
        agreed = self._agree([through or overdue for through, overdue in zip(own, late, strict=True)])
        kept: list[Deferred] = []
        over: list[Deferred] = []
        for held, done, through in zip(self._held, agreed, own, strict=True):
            (over if done else kept).append(held)
            self.timeouts += bool(done and not through)
        self._held = kept  # first: an exception while one is released must not release another twice
        self._faults.for_each(over, lambda held: held.release(), "freeing pages")
