"""A workload as columns: arrival times, lengths and shared prefixes of requests."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pla_sglang.common.errors import ConfigError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
HashIds = tuple[tuple[int, ...], ...]

LATEST_ARRIVAL_S = 1e10  # 300 years: beyond, microseconds would be lost in the rounding of doubles
OPTIONAL_COLUMNS = ("session", "turn", "client", "think_s")
ID_COLUMNS = ("hash_ids", "answer_ids")


class TraceError(ConfigError):
    """A trace, or a row of one, is not usable. Names the file or row, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """One skipped row of a file."""

    line: int  # 1-based line (record for JSON and parquet) in the file
    reason: str


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. All columns have the same length ``n``; the arrays must not be modified.

    Attributes:
        name: name in reports.
        arrival_s: [n] float64, seconds from the start of the trace, ascending, from 0 on.
        input_tokens: [n] int64, whole prompt, at least 1.
        output_tokens: [n] int64, tokens generated, at least 1.
        session: [n] int64 or None; requests of one conversation share it.
        turn: [n] int64 or None; place in the conversation, from 0.
        client: [n] int64 or None.
        think_s: [n] float64 or None; where known, sessions are closed loops: a request comes so many seconds after the
            answer before it in its session has ended. Only the first of a session's rows comes at its ``arrival_s``;
            for the others that is when they would come after answers that take as long as in the recording.
        hash_ids: [n] tuples or None; ids of the leading whole blocks of the prompt. The same id means the same whole
            prefix up to and including that block, so ids compare as prefixes do.
        answer_ids: [n] tuples or None; of the whole blocks that prompt and answer fill together, those beyond
            ``hash_ids``: what a later prompt of the conversation goes on with. Only with ``hash_ids``.
        block_tokens: tokens per id of ``hash_ids`` and ``answer_ids``.
        skipped: skipped rows of the file, in file order.

    Raises:
        TraceError: columns of different length, a time that is negative, not finite or before its predecessor, a
            length below 1, or think times without sessions. An empty trace is a legal value (a window may be empty);
            callers that need requests call ``require_requests``.
    """

    name: str
    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    session: Ints | None = None
    turn: Ints | None = None
    client: Ints | None = None
    think_s: Floats | None = None
    hash_ids: HashIds | None = None
    answer_ids: HashIds | None = None
    block_tokens: int = 512
    skipped: tuple[BadRow, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        for column in ("input_tokens", "output_tokens", *OPTIONAL_COLUMNS, *ID_COLUMNS):
            values = getattr(self, column)
            if values is not None and len(values) != n:
                raise TraceError(f"trace {self.name}: {column} has {len(values)} rows, arrival_s has {n}")
        if self.block_tokens < 1:
            raise TraceError(f"trace {self.name}: block_tokens is {self.block_tokens}; allowed: 1 and more")
        allowed = f"finite, 0 and more, up to {LATEST_ARRIVAL_S:g}"
        self._refuse(~((self.arrival_s >= 0) & (self.arrival_s <= LATEST_ARRIVAL_S)), "arrival_s", allowed)
        if self.think_s is not None:
            if self.session is None:
                raise TraceError(f"trace {self.name} has think_s but no session; allowed: both, or no think_s")
            self._refuse(~((self.think_s >= 0) & (self.think_s <= LATEST_ARRIVAL_S)), "think_s", allowed)
        for column in ("input_tokens", "output_tokens"):
            self._refuse(getattr(self, column) < 1, column, "1 and more")
        back = np.zeros(n, dtype=bool)
        back[1:] = np.diff(self.arrival_s) < 0
        self._refuse(back, "arrival_s", "not before the row above it; sort the trace first")

    def _refuse(self, bad: npt.NDArray[np.bool_], column: str, allowed: str) -> None:
        if bad.any():
            row = int(bad.argmax())
            value = getattr(self, column)[row]
            raise TraceError(f"trace {self.name}: {column} of row {row} is {value}; allowed: {allowed}")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def require_requests(self) -> Trace:
        """Itself; raises TraceError when there is no request."""
        if not len(self):
            skipped = f" ({len(self.skipped)} rows were skipped)" if self.skipped else ""
            raise TraceError(f"trace {self.name} is empty{skipped}; allowed: at least one request")
        return self

    @property
    def span_s(self) -> float:
        """From the first to the last arrival."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate over the span; NaN if undefined (fewer than two times).

        With think times: of the sessions' starts, times the requests of a session. That is what arrives once as many
        sessions end as start.
        """
        if self.think_s is None:
            return (len(self) - 1) / self.span_s if self.span_s > 0 else float("nan")
        starts_s = self.arrival_s[self.session_starts()]
        span_s = float(np.ptp(starts_s)) if len(starts_s) else 0.0
        return len(self) * (1 - 1 / len(starts_s)) / span_s if span_s > 0 else float("nan")

    def session_starts(self) -> Ints:
        """The first row of every session, in order of rows. Only with sessions."""
        assert self.session is not None
        return np.sort(np.unique(self.session, return_index=True)[1])

    def start_s(self) -> Floats:
        """[n] when the session of each row starts, that is when its first row in this trace arrives. With sessions."""
        assert self.session is not None
        _, first, session = np.unique(self.session, return_index=True, return_inverse=True)
        starts_s: Floats = self.arrival_s[first][session]
        return starts_s

    # -- new traces from this one --------------------------------------------------------------------------------------

    def take(self, rows: Ints | Sequence[int] | slice) -> Trace:
        """The given rows, in the order given (which must be one of arrival). Times stay as they are."""
        index = np.arange(len(self))[rows]
        columns: dict[str, typing.Any] = {
            column: getattr(self, column)[index]
            for column in ("arrival_s", "input_tokens", "output_tokens", *OPTIONAL_COLUMNS)
            if getattr(self, column) is not None
        }
        for column in ID_COLUMNS:
            if (ids := getattr(self, column)) is not None:
                columns[column] = tuple(ids[row] for row in index)
        return dataclasses.replace(self, **columns)

    def window(self, start_s: float, end_s: float) -> Trace:
        """Requests with ``start_s <= arrival_s < end_s``; times count from ``start_s``."""
        if not 0 <= start_s < end_s:
            raise TraceError(f"window {start_s} to {end_s}; allowed: 0 <= start < end, in seconds")
        first, last = np.searchsorted(self.arrival_s, [start_s, end_s], side="left")
        part = self.take(slice(int(first), int(last)))
        return dataclasses.replace(part, arrival_s=part.arrival_s - start_s)

    def head(self, count: int) -> Trace:
        """The first ``count`` requests."""
        if count < 1:
            raise TraceError(f"head of {count} requests; allowed: 1 and more")
        return self.take(slice(0, count))

    def repeat(self, times: int) -> Trace:
        """So many copies one after the other, a mean gap between them; they share no session and no prefix.

        With think times, the sessions of a copy begin when those of the one before have begun, not ended.
        """
        if times < 1:
            raise TraceError(f"a trace repeated {times} times; allowed: 1 and more")
        copies = np.repeat(np.arange(times), len(self))
        begun_s = self.arrival_s if self.think_s is None else self.arrival_s[self.session_starts()]
        span_s = float(np.ptp(begun_s)) if len(begun_s) else 0.0
        shifts: dict[str, typing.Any] = {"arrival_s": copies * (span_s + span_s / max(1, len(begun_s) - 1))}
        if self.session is not None:
            shifts["session"] = copies * (int(self.session.max(initial=0)) + 1)
        columns = ("input_tokens", "output_tokens", "turn", "client", "think_s", *shifts)
        tiled = {name: np.tile(values, times) for name in columns if (values := getattr(self, name)) is not None}
        repeated: dict[str, typing.Any] = {name: values + shifts.get(name, 0) for name, values in tiled.items()}
        given = {name: rows for name in ID_COLUMNS if (rows := getattr(self, name)) is not None}
        ids = max((block for rows in given.values() for blocks in rows for block in blocks), default=0) + 1
        for name, rows in given.items():
            repeated[name] = tuple(
                tuple(block + copy * ids for block in blocks) for copy in range(times) for blocks in rows
            )
        return dataclasses.replace(self, **(repeated if self.think_s is None else sort_by_arrival(repeated)))

    def scale_rate(self, factor: float) -> Trace:
        """``factor`` times as many requests a second: the times are divided by a constant, as Arrow (7.1) does.

        With think times only the sessions' starts are: users think as long as they do.
        """
        if not (np.isfinite(factor) and factor > 0):
            raise TraceError(f"rate factor is {factor}; allowed: a finite number above 0")
        if self.think_s is None:
            return dataclasses.replace(self, arrival_s=self.arrival_s / factor)
        start_s = self.start_s()
        arrival_s = start_s / factor + (self.arrival_s - start_s)
        return self.with_arrivals(arrival_s)

    def with_arrivals(self, arrival_s: Floats) -> Trace:
        """The same rows at these times, in the order of them; rows with equal times keep their order."""
        order = np.argsort(arrival_s, kind="stable")
        rows = dataclasses.replace(self, arrival_s=np.zeros(len(self))).take(order)
        return dataclasses.replace(rows, arrival_s=arrival_s[order])

    def at_rate(self, rate_per_s: float) -> Trace:
        """The same requests at this mean rate."""
        if not np.isfinite(self.rate_per_s):
            raise TraceError(f"trace {self.name} has no rate of its own to scale: it spans {self.span_s} s")
        return self.scale_rate(rate_per_s / self.rate_per_s)

    def as_recorded(self) -> Trace:
        """Open loop: every request comes at its ``arrival_s``, whether the answer before it has ended or not."""
        return dataclasses.replace(self, think_s=None)

    def with_session_hashes(self, block_tokens: int = 64) -> Trace:
        """Block ids generated from sessions: a turn shares its prompt's leading blocks with earlier turns.

        For traces whose prompts hold the earlier turns and answers. The id of a block depends on the session and the
        block's place, so two sessions never share anything. Blocks of answers beyond the longest prompt of the trace
        have no id: nobody asks for them.
        """
        if self.session is None:
            raise TraceError(f"trace {self.name} has no sessions to make block ids from")
        most = int(self.input_tokens.max(initial=0)) // block_tokens + 1
        rows = list(zip(self.session.tolist(), self.input_tokens.tolist(), self.output_tokens.tolist(), strict=True))
        prompts = tuple(
            tuple(range(session * most, session * most + tokens // block_tokens)) for session, tokens, _ in rows
        )
        answers = tuple(
            tuple(
                range(
                    session * most + tokens // block_tokens,
                    session * most + min(most, (tokens + answer) // block_tokens),
                )
            )
            for session, tokens, answer in rows
        )
        return dataclasses.replace(self, hash_ids=prompts, answer_ids=answers, block_tokens=block_tokens)


def sort_by_arrival(trace_columns: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """Columns of a new trace, in order of arrival; rows with equal times keep their order."""
    order = np.argsort(trace_columns["arrival_s"], kind="stable")
    return {
        name: tuple(values[row] for row in order) if name in ID_COLUMNS else values[order]
        for name, values in trace_columns.items()
        if values is not None
    }
