"""A recording of the router as a workload, and how it was served: arrivals, lengths, shared prefixes, measured times.

All times are device time. What a recording does not hold is not there: a request without an end is left out and
counted. Prefixes are known as far as the router knew them: a prompt shares with the latest earlier one that went to the
same instance, of its session if it has one, as many tokens as the router took for cached there.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pla_sglang.common.reading import open_text, refuse_unreadable
from pla_sglang.recording import rows
from pla_sglang.recording.file import read
from pla_sglang.recording.rows import RecordError
from pla_sglang.sim.metrics.goodput import Served
from pla_sglang.sim.workload.trace import Trace, TraceError

BLOCK_TOKENS = 64
LOOK_BACK = 500  # requests of an instance: of a prefix that is older nothing is left in its cache in most cases
READY = "ready"
MARK = re.compile(r'\s*\{\s*"type":\s*"header"')


@dataclasses.dataclass
class _Request:
    arrival: rows.Arrival
    cached: Mapping[int, int]
    instance: int | None = None
    first_s: float | None = None
    finish_s: float | None = None
    output_tokens: int = 0
    blocks: tuple[int, ...] = ()  # of prompt and answer


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """What was served, and by which fleet.

    Attributes:
        trace: the requests that ended with an answer.
        served: of each of them, the measured times.
        kinds, profiles: of each instance; a profile is empty where it is the header's.
        changes: instances that joined or left for good while requests were served, in words.
        away_s: of all instances, that some were not ready for, and came back. What that did is in the measured times.
        unserved: requests without an answer, and those that came before all instances were ready; in no column.
    """

    header: rows.Header
    trace: Trace
    served: Served
    kinds: tuple[str, ...]
    profiles: tuple[str, ...]
    changes: tuple[str, ...]
    away_s: float
    unserved: int


def is_recording(path: Path) -> bool:
    """Tells whether the file begins as a recording does. Raises TraceError for one that cannot be read."""
    if not path.is_file():
        return False
    with refuse_unreadable(path, TraceError), open_text(path, TraceError) as text:
        return MARK.match(text.read(256)) is not None


def read_run(path: Path) -> RecordedRun:
    """Raises RecordError: no recording, one of another version, one without a served request."""
    lines = read(path)
    header = next(lines)
    assert isinstance(header, rows.Header), "the reader checks it"
    reader = _RecordingReader()
    for line in lines:
        reader.take(line)
    served = [one for one in reader.requests.values() if one.finish_s is not None and one.output_tokens > 0]
    served = [one for one in served if one.arrival.arrival_s >= reader.ready_s]
    if not served:
        raise RecordError(f"{path}: no request was served; allowed: at least one")
    served.sort(key=lambda one: one.arrival.arrival_s)
    shares = any(one.cached and max(one.cached.values()) >= BLOCK_TOKENS for one in served)
    start_s = served[0].arrival.arrival_s
    arrival_s = np.array([one.arrival.arrival_s - start_s for one in served])
    has_sessions = any(one.arrival.session is not None for one in served)
    input_tokens = np.array([one.arrival.input_tokens for one in served], dtype=np.int64)
    output_tokens = np.array([one.output_tokens for one in served], dtype=np.int64)
    ids = _share_blocks(served) if shares else None
    trace = Trace(
        path.name,
        arrival_s,
        input_tokens,
        output_tokens,
        session=_number_sessions(served) if has_sessions else None,
        hash_ids=None if ids is None else tuple(prompt for prompt, _ in ids),
        answer_ids=None if ids is None else tuple(answer for _, answer in ids),
        block_tokens=BLOCK_TOKENS,
    )
    first_s = np.array([math.nan if one.first_s is None else one.first_s - start_s for one in served])
    finish_s = np.array([(one.finish_s or math.nan) - start_s for one in served])
    return RecordedRun(
        header=header,
        trace=trace,
        served=Served(arrival_s, first_s, finish_s, output_tokens),
        kinds=tuple(fields.get("kind", "stateless") for fields in reader.list_ready()),
        profiles=tuple(fields.get("profile", "") for fields in reader.list_ready()),
        changes=tuple(reader.list_changes(max(one.finish_s or 0.0 for one in served))),
        away_s=reader.away_s,
        unserved=len(reader.requests) - len(served),
    )


def _number_sessions(served: list[_Request]) -> npt.NDArray[np.int64]:
    """A request without a session has a number of its own."""
    numbers: dict[str, int] = {}
    names = [one.arrival.session or f"\0{place}" for place, one in enumerate(served)]
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


class _RecordingReader:
    """Takes the lines after the header, in their order.

    Attributes:
        ready_s: when the last of the instances that were named before the first arrival became ready.
    """

    def __init__(self) -> None:
        self.requests: dict[str, _Request] = {}
        self.instances: list[dict[str, str]] = []
        self.named = 0  # instances before the first arrival
        self.ready_s = -math.inf
        self.left_s: dict[int, float] = {}  # when instances that are not ready now were so last, by their object
        self.away_s = 0.0

    def take(self, line: rows.Line) -> None:
        match line:
            case rows.Views():
                self._take_views(line)
            case rows.Arrival():
                self.named = self.named if self.requests else len(self.instances)
                # A further attempt arrives again; the request came with its first.
                self.requests.setdefault(line.rid, _Request(line, line.cached))
            case rows.Dispatched() if (one := self.requests.get(line.rid)) is not None:
                one.cached = one.cached if line.cached is None else line.cached
                one.instance = line.answer.prefill if line.answer.prefill is not None else one.instance
            case rows.FirstToken() if (one := self.requests.get(line.rid)) is not None:
                one.first_s = line.now_s if one.first_s is None else one.first_s
            case rows.Finish() if (one := self.requests.get(line.rid)) is not None:
                one.finish_s = line.now_s
                one.output_tokens += line.output_tokens
            case _:
                pass

    def list_ready(self) -> list[dict[str, str]]:
        """The instances that served, as they were named last."""
        return [fields for fields in self.instances if "ready_s" in fields]

    def list_changes(self, end_s: float) -> list[str]:
        """Instances that joined later than the first request, or were away when the last answer ended."""
        joined = [fields for fields in self.instances[self.named :] if fields.get("ready_s")]
        away = [fields for fields in self.list_ready() if self.left_s.get(id(fields), math.inf) < end_s]
        return [f"{one['name']} {what}" for what, of in (("joined", joined), ("left", away)) for one in of]

    def _take_views(self, line: rows.Views) -> None:
        for index, fields in sorted(line.changed.items()):
            if index == len(self.instances):
                self.instances.append({})
            if not 0 <= index < len(self.instances):
                raise RecordError(f"the recording names instance {index} before instance {len(self.instances)}")
            known = self.instances[index]
            known.update({name: str(fields[name]) for name in ("name", "kind", "profile", "state") if name in fields})
            self._note_state(index, known, line.now_s)

    def _note_state(self, index: int, known: dict[str, str], now_s: float) -> None:
        ready = known.get("state", READY) == READY
        if ready and "ready_s" not in known:
            known["ready_s"] = str(now_s)
            self.ready_s = now_s if self.requests and index < self.named else self.ready_s
        elif ready and id(known) in self.left_s:
            self.away_s += now_s - self.left_s.pop(id(known))
        elif not ready and "ready_s" in known:
            self.left_s.setdefault(id(known), now_s)


def _share_blocks(served: list[_Request]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ids of the prompts' blocks and of the further ones that the answers fill."""
    by_instance: dict[int | None, list[_Request]] = {}
    fresh, ids = 0, []
    for one in served:
        cached = max(one.cached.items(), key=lambda item: item[1], default=(None, 0))
        prompt = one.arrival.input_tokens // BLOCK_TOKENS
        shared = min(cached[1] // BLOCK_TOKENS, prompt)
        beginning = _find_beginning(one, by_instance.get(cached[0], []), shared) if shared else ()
        total = (one.arrival.input_tokens + one.output_tokens) // BLOCK_TOKENS
        one.blocks = beginning + tuple(range(fresh, fresh + total - len(beginning)))
        fresh += total - len(beginning)
        by_instance.setdefault(one.instance, []).append(one)
        ids.append((one.blocks[:prompt], one.blocks[prompt:]))
    return ids


def _find_beginning(one: _Request, earlier: list[_Request], shared: int) -> tuple[int, ...]:
    """So many blocks of the latest that has them, first of the same session; empty where none has."""
    fitting = [other for other in earlier[: -LOOK_BACK - 1 : -1] if len(other.blocks) >= shared]
    session = one.arrival.session
    own = [other for other in fitting if session is not None and other.arrival.session == session]
    return next((other.blocks[:shared] for other in (*own, *fitting)), ())
