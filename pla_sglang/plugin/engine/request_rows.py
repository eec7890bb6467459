"""Rows of the requests that decode here, for routers that move requests: at a cadence of their own, and bounded.

A router asks for them together with the list of peers (``POST /pla/peers``), and for none by a list that does not name
them. They travel in the first load report that is due after each interval.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.load.report import MOST_ROWS, RequestRow

FindRest = Callable[[Any], int | None]  # of a request: tokens predicted to come still, if any
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.02, 3600.0
LONGEST_RID_CHARS = 256  # requests with longer ids have no row, so that a report stays below its largest size


@dataclasses.dataclass(frozen=True, slots=True)
class RowsWanted:
    """Rows every ``every_s`` seconds of wall time, of at most ``most`` requests."""

    every_s: float
    most: int


def parse_rows(entry: Any) -> RowsWanted | None:
    """``rows`` of a list of peers; None: no rows are wanted. Raises ConfigError."""
    if entry is None:
        return None
    if not isinstance(entry, Mapping) or set(entry) != {"every_s", "most"}:
        raise ConfigError(f'rows {entry!r} is not valid; allowed: {{"every_s": SECONDS, "most": REQUESTS}}')
    every_s, most = entry["every_s"], entry["most"]
    if isinstance(every_s, bool) or not isinstance(every_s, (int, float)):
        raise ConfigError(f"rows: every_s {every_s!r} is not valid; allowed: a number")
    if not LEAST_INTERVAL_S <= every_s <= MOST_INTERVAL_S:
        allowed = f"{LEAST_INTERVAL_S} to {MOST_INTERVAL_S:g} s"
        raise ConfigError(f"rows: every_s {every_s} is out of range; allowed: {allowed}")
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MOST_ROWS:
        raise ConfigError(f"rows: most {most!r} is not valid; allowed: 1 to {MOST_ROWS}")
    return RowsWanted(float(every_s), most)


class RowCadence:
    """When rows are due, and of which requests. ``sent``: rows given out since the start."""

    def __init__(self) -> None:
        self.wanted: RowsWanted | None = None
        self.sent = 0
        self._due_s = float("-inf")

    def ask_rows(self, wanted: RowsWanted | None) -> None:
        """From now on; None: no more. The same wish again changes nothing."""
        if wanted != self.wanted:
            self.wanted, self._due_s = wanted, float("-inf")

    def take_rows(
        self, running: Iterable[Any], held: Iterable[Any], now_s: float, find_rest: FindRest | None = None
    ) -> tuple[RequestRow, ...] | None:
        """None: they are not due. Of more requests than are wanted, those with the most KV tokens."""
        wanted = self.wanted
        if wanted is None or now_s < self._due_s:
            return None
        self._due_s = now_s + wanted.every_s
        rows = [*_rows_of(running, find_rest, held=False), *_rows_of(held, find_rest, held=True)]
        if len(rows) > wanted.most:
            rows = heapq.nlargest(wanted.most, rows, key=lambda row: row.prompt_tokens + row.output_tokens)
        self.sent += len(rows)
        return tuple(rows)

    def to_dict(self) -> dict[str, Any] | None:
        """For /pla/state; None: nobody wants rows."""
        if self.wanted is None:
            return None
        return {"every_s": self.wanted.every_s, "most": self.wanted.most, "sent": self.sent}


def _rows_of(reqs: Iterable[Any], find_rest: FindRest | None, *, held: bool) -> Sequence[RequestRow]:
    return [
        RequestRow(
            req.rid,
            len(req.origin_input_ids),
            len(req.output_ids),
            held,
            None if find_rest is None else find_rest(req),
        )
        for req in reqs
        if len(req.rid) <= LONGEST_RID_CHARS
    ]
