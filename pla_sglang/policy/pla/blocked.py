"""Classes of prefills that cannot run: their last pass admitted nothing, for want of KV cache or of slots."""

from __future__ import annotations

import dataclasses

from pla_sglang.policy.interface.prefill import PassView, PrefillClass


@dataclasses.dataclass(slots=True)
class _Blocked:
    """The state in which a pass of the class admitted nothing."""

    kv_free_tokens: int
    slots: int
    running: int

    def still(self, view: PassView) -> bool:
        """Nothing has been freed since, so trying again would fail again."""
        return view.kv_free_tokens <= self.kv_free_tokens and view.slots <= self.slots and view.running >= self.running


class BlockedClasses:
    """Remembers what has failed, until trying again can succeed."""

    def __init__(self) -> None:
        self._blocked: dict[PrefillClass, _Blocked] = {}

    def on_pass(self, cls: PrefillClass, view: PassView, *, admitted: bool) -> None:
        if admitted:
            self._blocked.pop(cls, None)
        else:
            self._blocked[cls] = _Blocked(view.kv_free_tokens, view.slots, view.running)

    def clear_if_all(self) -> None:
        """Each class has let the other try; begin again."""
        if len(self._blocked) == len(PrefillClass):
            self._blocked.clear()

    def is_blocked(self, cls: PrefillClass, view: PassView, *, other: bool) -> bool:
        """Trying ``cls`` again is pointless. ``other``: something else waits that could run instead."""
        blocked = self._blocked.get(cls)
        if blocked is None:
            return False
        # With nothing running nothing will be freed. If nothing else can run either, refusing would be a deadlock; if
        # something can, insisting would be one.
        if blocked.still(view) and (view.running > 0 or other):
            return True
        del self._blocked[cls]
        return False
