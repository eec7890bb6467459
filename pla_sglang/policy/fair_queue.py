"""The router's own queue: by priority, and fair between tenants within one priority.

Fair means equal service in tokens while tenants compete, by virtual token counters (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024, Algorithm 2): the tenant with the least service goes next, each dispatch adds its
tokens, and a tenant that comes back from idleness starts at the level of those that stayed, so that nobody saves up.
Requests of one tenant go by their deadlines, which with equal targets is in order of arrival: the time left of each
falls alike, so the order holds while they wait. Whose turn it is costs O(tenants).
"""

from __future__ import annotations

import enum
import operator
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

TENANTS_KEPT = 10_000  # counters of idle tenants beyond this are forgotten, the least served first


class QueueReason(enum.Enum):
    """Why a request is dispatched before those that wait on."""

    SLACK = "slack"  # its first token is due first
    FAIR = "fair"  # another tenant, which has had more service, has one that is due sooner
    PRIORITY = "priority"  # one of a lower priority is due sooner


class QueueItem(Protocol):
    """A request that can wait in the queue.

    Attributes:
        cost_tokens: what its dispatch adds to its tenant's service.
        due_s: when its first token is due; infinite without a target.
    """

    @property
    def rid(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def priority(self) -> int: ...

    @property
    def cost_tokens(self) -> int: ...

    @property
    def due_s(self) -> float: ...


Item = TypeVar("Item", bound=QueueItem)
_DUE_S = operator.attrgetter("due_s")


class FairQueue(Generic[Item]):
    """Waiting requests of all tenants.

    Attributes:
        turns: those of them that were dispatched, by reason.
    """

    def __init__(self) -> None:
        self.turns: Counter[QueueReason] = Counter()
        self._queues: dict[int, dict[str, list[Item]]] = {}  # priority -> tenant -> in order of ``due_s``
        self._held: dict[str, Item] = {}
        self._served: dict[str, float] = {}  # virtual counters
        self._waiting: dict[str, int] = {}  # requests by tenant, over all priorities

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, rid: object) -> bool:
        return rid in self._held

    def __iter__(self) -> Iterator[Item]:
        """In order of arrival."""
        return iter(self._held.values())

    def push(self, held: Item) -> None:
        """Raises ValueError for a request that waits already."""
        if held.rid in self._held:
            raise ValueError(f"{held.rid} waits already")
        if not self._waiting.get(held.tenant):
            self._lift(held.tenant)
        self._held[held.rid] = held
        self._waiting[held.tenant] = self._waiting.get(held.tenant, 0) + 1
        insort(self._queues.setdefault(held.priority, {}).setdefault(held.tenant, []), held, key=_DUE_S)

    def head(self) -> Item | None:
        """Who is next: the highest priority, then the tenant with the least service, the first of equals."""
        if not self._queues:
            return None
        tenants = self._queues[max(self._queues)]
        return tenants[min(tenants, key=lambda tenant: self._served.get(tenant, 0.0))][0]

    def explain(self, held: Item) -> QueueReason:
        """Why ``held``, which is the head, goes before those that wait."""
        for priority, tenants in sorted(self._queues.items(), reverse=True):
            if min(queue[0].due_s for queue in tenants.values()) < held.due_s:
                return QueueReason.FAIR if priority == held.priority else QueueReason.PRIORITY
        return QueueReason.SLACK

    def take(self, held: Item) -> None:
        """It has been dispatched: its tenant has had that much service."""
        if held.rid in self._held:
            self.turns[self.explain(held)] += 1
            self.remove(held.rid)
        self.charge(held.tenant, held.cost_tokens)

    def charge(self, tenant: str, tokens: float) -> None:
        """Service that became known later, such as output tokens, or that did not wait here."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens
        if len(self._served) > TENANTS_KEPT:
            self._forget()

    def remove(self, rid: str) -> Item | None:
        """It waits no more; None if it did not."""
        held = self._held.pop(rid, None)
        if held is None:
            return None
        tenants = self._queues[held.priority]
        queue = tenants[held.tenant]
        queue.remove(held)
        if not queue:
            del tenants[held.tenant]
        if not tenants:
            del self._queues[held.priority]
        self._waiting[held.tenant] -= 1
        if not self._waiting[held.tenant]:
            del self._waiting[held.tenant]
        return held

    def drop(self, over: Callable[[Item], bool]) -> list[Item]:
        """Removes and returns those for which ``over`` is true, in order of arrival."""
        gone = [held for held in self._held.values() if over(held)]
        for held in gone:
            self.remove(held.rid)
        return gone

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def _lift(self, tenant: str) -> None:
        """Back from idleness: not below those that have waited all along (line 8 of the algorithm)."""
        if self._waiting:
            level = min(self._served.get(other, 0.0) for other in self._waiting)
            self._served[tenant] = max(self._served.get(tenant, 0.0), level)

    def _forget(self) -> None:
        idle = sorted((tenant for tenant in self._served if tenant not in self._waiting), key=self._served.__getitem__)
        for tenant in idle[: len(self._served) - TENANTS_KEPT // 2]:
            del self._served[tenant]
