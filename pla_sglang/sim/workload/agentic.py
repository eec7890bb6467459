"""Recorded sessions of agents in JSON lines: prefix blocks, think times, subagents.

The format of ``callanjfox/kv-cache-tester``, which AIPerf replays, one session a line: ``block_size``,
``hash_id_scope`` ("local": an id means something within its session only), ``tool_tokens``, ``system_tokens``,
``requests``. A request has ``t`` (seconds from the start of the session), ``in``, ``out`` (tokens), ``think_time``
(seconds from the answer before), ``api_time`` (seconds that its answer took) and ``hash_ids``, an id for each whole
block of the prompt; the same id means the same prefix up to and including that block. Instead of the ids,
``hash_runs`` may hold runs of them, ``[[first, count], ...]``. A request of type ``subagent`` has ``requests`` of its
own, whose ``t`` counts from its start.

A session becomes one closed loop, subagents included: requests come in order of time, each after the answer before it.
That is so in the recordings but where a subagent runs beside its session.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

import numpy as np

from pla_sglang.common.checks import Choice, Range, check_fields, knob
from pla_sglang.sim.workload.generate import Arrivals
from pla_sglang.sim.workload.json_formats import read_json_lines
from pla_sglang.sim.workload.rows import BadRows, Columns, RowError, number, require_tokens, whole_number
from pla_sglang.sim.workload.trace import LATEST_ARRIVAL_S, Trace, sort_by_arrival

Record = dict[str, typing.Any]
SUBAGENT = "subagent"


@dataclasses.dataclass(frozen=True, slots=True)
class AgenticKnobs:
    """What of the recorded sessions becomes a trace.

    Attributes:
        window_tokens: of the model that is to serve them: the longest prompt; None: as recorded.
        too_long: prompts above it are left out ("drop"), or lose their middle ("cut"): they keep all new tokens, and of
            what their session has sent before the beginning, so that both the work and the prefix are as recorded.
        think_most_s: longer think times (a user who is away) are cut to this; None: as recorded. 34 s is the third
            quartile of the recorded coding sessions.
        requests_least: sessions of fewer requests, too long ones left out, are left out.
        shared_system: sessions of one model have the prompt's first ``tool_tokens + system_tokens`` in common. The
            recordings do not say so, as their ids are local; it is the most that they can share.
        block_tokens: of the trace; a multiple of the file's blocks, of which the trace has whole groups.
    """

    window_tokens: int | None = knob(None, "--window-tokens", "of agent sessions: longest prompt", allowed=Range(1))
    too_long: str = knob(
        "drop", "--too-long {drop,cut}", "prompts above --window-tokens", allowed=Choice(("drop", "cut"))
    )
    think_most_s: float | None = knob(
        34.0, "--think-most-s", "of agent sessions: longest think time", allowed=Range(0), none="none"
    )
    requests_least: int = knob(1, "--requests-least", "of agent sessions: fewer make no session", allowed=Range(1))
    shared_system: bool = knob(
        False, "--shared-system", "agent sessions of one model share tool descriptions and system prompt"
    )
    block_tokens: int = knob(512, allowed=Range(1))

    def __post_init__(self) -> None:
        check_fields(self, "agentic")


def load_agentic(
    path: Path, *, arrivals: Arrivals, bad_rows: BadRows = "refuse", knobs: AgenticKnobs | None = None
) -> Trace:
    """Sessions that start at ``arrivals``; with think times, so that each is a closed loop.

    Requests that are left out (too long, of too short a session, without an answer) are counted in ``skipped``, as
    are those that cannot be read where ``bad_rows`` is "skip"; ``skipped`` has the line of their session.

    Raises:
        TraceError: no such file, a session or a request that cannot be read (unless skipped): a field that is missing
            or out of range, fewer or more ids than the prompt has blocks, ids out of order (one id after two others),
            times that go back, a negative think time.
    """
    knobs, columns = knobs or AgenticKnobs(), Columns(path.name, bad_rows)
    reader = _SessionReader(knobs, columns)
    sessions = [turns for line, record in read_json_lines(path, columns) if (turns := reader.read(line, record))]
    starts = zip(arrivals.times(), sessions)  # noqa: B905 - one of them has no end
    rows = [
        (start_s + turn.at_s, session, place, turn)
        for session, (start_s, turns) in enumerate(starts)
        for place, turn in enumerate(turns)
    ]
    made: dict[str, typing.Any] = {
        "arrival_s": np.array([row[0] for row in rows], dtype=np.float64),
        "session": np.array([row[1] for row in rows], dtype=np.int64),
        "turn": np.array([row[2] for row in rows], dtype=np.int64),
        "think_s": np.array([row[3].think_s for row in rows], dtype=np.float64),
        "input_tokens": np.array([row[3].input_tokens for row in rows], dtype=np.int64),
        "output_tokens": np.array([row[3].output_tokens for row in rows], dtype=np.int64),
        "hash_ids": tuple(row[3].ids for row in rows),
    }
    made = sort_by_arrival(made)
    return Trace(path.name, **made, block_tokens=knobs.block_tokens, skipped=tuple(columns.skipped))


@dataclasses.dataclass(slots=True)
class _Turn:
    """One request of a session; ``at_s`` counts from the session's first one, with think times cut."""

    at_s: float
    think_s: float
    input_tokens: int
    output_tokens: int
    ids: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class _Thread:
    """The requests of a session itself, or of one subagent: they go on with one prompt.

    Attributes:
        start_s: from the start of the session.
        system_tokens: of tool descriptions and system prompt.
        model: of the first request.
        system: blocks of the first request within the system tokens.
    """

    start_s: Decimal
    system_tokens: int
    model: str = ""
    system: list[int] | None = None


class _SessionReader:
    """Reads session after session; ids of the trace are numbered through all of them."""

    def __init__(self, knobs: AgenticKnobs, columns: Columns) -> None:
        self._knobs = knobs
        self._columns = columns
        self._numbers = itertools.count()
        self._shared: dict[tuple[str, int], int] = {}  # by model and place: ids that sessions have in common

    def read(self, line: int, record: Record) -> list[_Turn]:
        """The requests of a session that stay, in order of time; none where all are left out. Raises TraceError."""
        try:
            if record.get("hash_id_scope", "local") != "local":
                raise RowError(f"hash_id_scope is {record['hash_id_scope']!r}; allowed: 'local'")
            block = whole_number(record.get("block_size"), "block_size")
            if not 1 <= block <= self._knobs.block_tokens or self._knobs.block_tokens % block:
                raise RowError(f"block_size is {block}; allowed: what divides {self._knobs.block_tokens}")
            requests = sorted(_flatten(record, _Thread(Decimal(0), _system_tokens(record))), key=lambda one: one[0])
        except RowError as error:
            self._columns.bad(line, str(error))
            return []
        blocks = _SessionBlocks(self._numbers, self._shared, self._knobs, block)
        turns: list[_Turn] = []
        clock = _Clock(self._knobs.think_most_s)
        for place, (at_s, thread, request) in enumerate(requests):
            try:
                turn = self._turn(at_s, thread, request, blocks, clock)
            except RowError as error:
                self._columns.bad(line, f"request {place}: {error}")
                continue
            if isinstance(turn, str):
                self._columns.drop(line, turn)
            else:
                turns.append(turn)
        if len(turns) < self._knobs.requests_least:
            for _ in turns:
                self._columns.drop(line, f"a session of {len(turns)} requests; least {self._knobs.requests_least}")
            return []
        first_s = turns[0].at_s
        for turn in turns:
            turn.at_s -= first_s
        return turns

    def _turn(
        self, at_s: Decimal, thread: _Thread, request: Record, blocks: _SessionBlocks, clock: _Clock
    ) -> _Turn | str:
        """The request, or why it is left out. Raises RowError; then neither clock nor blocks have noted it."""
        tokens = require_tokens(whole_number(request.get("in"), "in"), "in")
        answer = whole_number(request.get("out"), "out")
        if answer:
            require_tokens(answer, "out")
        recorded_s, took_s = _seconds(request, "think_time"), _seconds(request, "api_time")
        own = blocks.read(request, tokens)
        if thread.system is None:
            thread.model = str(request.get("model", ""))
            thread.system = own[: thread.system_tokens // blocks.size]
        new = blocks.note(own)
        open_s, think_s = clock.go_on(float(at_s), thread, recorded_s, took_s)
        window = self._knobs.window_tokens
        if not answer:
            return "failed: no answer token"
        if window is not None and tokens > window:
            if self._knobs.too_long == "drop":
                return f"a prompt of more than {window} tokens"
            kept = window // blocks.size
            old = max(0, kept - new)
            own = own[:old] + own[len(own) - (kept - old) :]
            tokens = window
        return _Turn(open_s, think_s, tokens, answer, blocks.group(own, thread))


class _SessionBlocks:
    """The blocks of one session's prompts, and the ids that whole groups of them get in the trace.

    A group's id is that of the group before it and its own blocks: the same id means the same prefix.
    """

    def __init__(
        self, numbers: Iterator[int], shared: dict[tuple[str, int], int], knobs: AgenticKnobs, size: int
    ) -> None:
        self.size = size  # tokens of a block
        self._numbers = numbers
        self._shared = shared
        self._shares = knobs.shared_system
        self._each = knobs.block_tokens // size  # blocks of a group
        self._before: dict[int, int | None] = {}  # by block: the one before it
        self._ids: dict[tuple[int | None, tuple[int, ...]], int] = {}
        self._last: tuple[list[int], tuple[int, ...]] = ([], ())  # blocks and ids of the last prompt
        self._noted: list[int] = []

    def read(self, request: Record, tokens: int) -> list[int]:
        """The blocks of a prompt. Raises RowError where they are not one for each whole block, or out of order."""
        runs, ids = request.get("hash_runs"), request.get("hash_ids")
        whole, partly = tokens // self.size, -(-tokens // self.size)
        if isinstance(runs, list) and ids is None:
            own = _expand(runs, partly)
        elif isinstance(ids, list) and runs is None:
            own = ids
            if not all(type(one) is int and one >= 0 for one in own):
                own = [_block_id(one) for one in ids]
        else:
            raise RowError("no list hash_ids or hash_runs; allowed: one of them")
        if not whole <= len(own) <= partly:
            raise RowError(f"{len(own)} block ids for {tokens} tokens; allowed: {whole} of {self.size} tokens")
        own = own[:whole]
        known = _common(own, self._noted)
        for place in range(known, whole):
            before = own[place - 1] if place else None
            if self._before.get(own[place], before) != before:
                raise RowError(f"block {own[place]} is after {before}, and after {self._before[own[place]]} earlier")
        if len(set(own[known:])) < whole - known:
            raise RowError("a block id twice")
        return own

    def note(self, own: list[int]) -> int:
        """These blocks have been sent. How many of them are new."""
        first = _common(own, self._noted)
        while first < len(own) and own[first] in self._before:
            first += 1
        self._before.update(zip(own[first:], [own[first - 1] if first else None, *own[first:]], strict=False))
        self._noted = own
        return len(own) - first

    def group(self, own: list[int], thread: _Thread) -> tuple[int, ...]:
        """Ids of the whole groups of these blocks."""
        known, ids = self._last
        each = self._each
        made = list(ids[: _common(own, known) // each])
        system = thread.system or []
        shared = _common(own, system) // each if self._shares else 0
        for place in range(len(made), len(own) // each):
            if place < shared:
                key = (thread.model, place)
                number_ = (
                    self._shared[key] if key in self._shared else self._shared.setdefault(key, next(self._numbers))
                )
            else:
                mine = (made[-1] if made else None, tuple(own[place * each : (place + 1) * each]))
                number_ = self._ids[mine] if mine in self._ids else self._ids.setdefault(mine, next(self._numbers))
            made.append(number_)
        self._last = own, tuple(made)
        return self._last[1]


class _Clock:
    """Times of a session's requests, with long think times cut."""

    def __init__(self, most_s: float | None) -> None:
        self._most_s = most_s
        self._last: tuple[float, _Thread, float] | None = None  # of the request before: its time, thread, answer's end
        self._cut_s = 0.0  # so far

    def go_on(
        self, at_s: float, thread: _Thread, recorded_s: float | None, took_s: float | None
    ) -> tuple[float, float]:
        """When the request comes, from the session's start, and the think time before it.

        That is the recorded one where the request before is of the same thread; else the time since its answer.
        """
        think_s = 0.0
        if self._last is not None:
            _, before, ended_s = self._last
            use = recorded_s if before is thread else None
            think_s = max(0.0, at_s - ended_s) if use is None else use
        if self._most_s is not None and think_s > self._most_s:
            gap_s = 0.0 if self._last is None else at_s - self._last[0]
            self._cut_s += min(gap_s, think_s - self._most_s)
            think_s = self._most_s
        self._last = at_s, thread, at_s + (took_s or 0.0)
        return at_s - self._cut_s, think_s


def _flatten(record: Record, thread: _Thread) -> Iterator[tuple[Decimal, _Thread, Record]]:
    """Requests with their time from the start of the session, subagents' among them.

    Raises RowError for a session that is not known to be in order.
    """
    requests = record.get("requests")
    if not isinstance(requests, list) or not requests:
        raise RowError("no list 'requests' with a request")
    last_s = thread.start_s
    for place, request in enumerate(requests):
        if not isinstance(request, dict):
            raise RowError(f"request {place} is no object")
        at_s = thread.start_s + _time(request.get("t"), f"request {place}: t")
        if at_s < last_s:
            raise RowError(f"request {place} is before the one above it; allowed: in order of t")
        last_s = at_s
        if request.get("type") == SUBAGENT:
            yield from _flatten(request, _Thread(at_s, _system_tokens(request)))
        else:
            yield at_s, thread, request


def _system_tokens(record: Record) -> int:
    counts = [whole_number(record.get(name) or 0, name) for name in ("tool_tokens", "system_tokens")]
    if min(counts) < 0:
        raise RowError(f"tool_tokens and system_tokens are {counts}; allowed: 0 and more")
    return sum(counts)


def _seconds(request: Record, name: str) -> float | None:
    """None where it is not recorded. Raises RowError."""
    if request.get(name) is None:
        return None
    return float(_time(request[name], name))


def _time(given: typing.Any, what: str) -> Decimal:
    """Seconds. Raises RowError."""
    value = number(given, what)
    if not value.is_finite() or not 0 <= value <= LATEST_ARRIVAL_S:
        raise RowError(f"{what} is {float(value):g} s; allowed: 0 to {LATEST_ARRIVAL_S:g}")
    return value


def _expand(runs: Sequence[typing.Any], most: int) -> list[int]:
    """The ids of runs, ``most`` of them and one more at most. Raises RowError."""
    ids: list[int] = []
    for run in runs:
        if not isinstance(run, list) or len(run) != 2:
            raise RowError("a run of hash_runs is no [first, count]")
        first, count = _block_id(run[0]), whole_number(run[1], "count of hash_runs")
        if count < 1:
            raise RowError(f"count of hash_runs is {count}; allowed: 1 and more")
        ids.extend(range(first, first + min(count, most + 1 - len(ids))))
    return ids


def _block_id(given: typing.Any) -> int:
    value = whole_number(given, "block id")
    if value < 0:
        raise RowError(f"block id is {value}; allowed: 0 and more")
    return value


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading numbers they have in common. Prompts have thousands, nearly all of them: so many at a time."""
    most, step = min(len(one), len(other)), 128
    place = next((at for at in range(0, most, step) if one[at : at + step] != other[at : at + step]), most)
    while place < most and one[place] == other[place]:
        place += 1
    return place
