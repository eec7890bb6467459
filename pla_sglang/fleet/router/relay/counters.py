"""What a relay counts: events for its report, and bytes of bodies against their limits."""

from __future__ import annotations

from collections.abc import Iterable


class Counters:
    """Values that only grow, by name; a name may carry labels in Prometheus form."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def show(self, names: Iterable[str]) -> None:
        """With 0 from the start, so that the first event is seen as an increase."""
        self.values = dict.fromkeys(names, 0.0) | self.values

    def count_event(self, name: str, **labels: str) -> None:
        if labels:
            inner = ",".join(f'{key}="{value}"' for key, value in labels.items())
            name = f"{name}{{{inner}}}"
        self.values[name] = self.values.get(name, 0) + 1


class ByteAccount:
    """Bytes of one kind of body that a relay holds in memory at a time."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def try_hold(self, count_bytes: int) -> bool:
        """False, and nothing counted, where they would exceed the limit."""
        if self.held_bytes + count_bytes > self._limit_bytes:
            return False
        self.held_bytes += count_bytes
        return True

    def free_bytes(self, count_bytes: int) -> None:
        self.held_bytes -= count_bytes
