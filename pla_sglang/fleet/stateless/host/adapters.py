"""Which requests may join the running batch beside the LoRA adapters that it has.

The host looks at adapters when it admits a prefill. A request that comes with its KV, or that was held, joins without
one: here it waits until its adapter has a place. All ranks have the same batches, so they decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pla_sglang.fleet.stateless.host.calls import list_chunked
from pla_sglang.plugin.engine.host.requests import may_load_adapter

T = TypeVar("T")
PATIENT_PASSES = 100  # that a request waits, while prefills of adapters in use are still admitted


def split_joining(waiting: Iterable[T], places: int, may_join: Callable[[T], bool]) -> tuple[list[T], list[T]]:
    """Who of ``waiting`` joins, in order and at most ``places``; and who waits on. Nobody is asked without a place."""
    joining: list[T] = []
    rest: list[T] = []
    for one in waiting:
        (joining if len(joining) < places and may_join(one) else rest).append(one)
    return joining, rest


class AdapterPlaces:
    """Owned by the scheduler thread. ``count_used`` begins each pass; ``take`` gives out what is left."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._used: set[str | None] = set()  # None: the model without an adapter takes a place too
        self._left_out: Any = None  # the first request of this pass that found no place
        self._passes = 0  # in a row in which one was left out

    def count_used(self, running_batch: Any, last_batch: Any) -> None:
        """What running requests need, and those of the last pass, who will run, and a prompt under way in chunks."""
        self._passes = 0 if self._left_out is None else self._passes + 1
        self._left_out = None
        if not self._scheduler.enable_lora:
            return
        reqs = [req for batch in (running_batch, last_batch) if batch is not None for req in batch.reqs or ()]
        reqs += list_chunked(self._scheduler, last_batch)
        self._used = {req.lora_id for req in reqs if not req.finished()}

    def take(self, req: Any) -> bool:
        """Tells whether ``req`` may join now; its adapter is in use then."""
        if not self._scheduler.enable_lora:
            return True
        if may_load_adapter(self._scheduler, req, set(self._used)):
            self._used.add(req.lora_id)
            return True
        if self._left_out is None:
            self._left_out = req
        return False

    def reserve(self, req: Any, used: set[str | None]) -> set[str | None]:
        """What a prefill of ``req`` has to fit beside: ``used``, and the adapter of whoever was left out."""
        first = self._left_out
        return used if first is None or first.lora_id == req.lora_id else used | {first.lora_id}

    def may_prefill(self, req: Any) -> bool:
        """Tells whether a prefill of ``req`` may go ahead of whoever was left out.

        After a while nobody is admitted to the adapters in use either: they would never become free under load.
        """
        first = self._left_out
        return first is None or first.lora_id == req.lora_id or self._passes < PATIENT_PASSES
