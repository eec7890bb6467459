"""What the instances of a fleet were and did over a span of time: load at regular times, and every change of a pool.

Pure data: times come from outside, all on one clock. Memory is bounded: samples older than the window go, so do
instances that have died before it, and of changes a bounded number stays: the document begins where they are complete.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pla_sglang.policy.common.length_errors import ErrorSums
from pla_sglang.policy.interface.fleet import InstanceView

WINDOW_S = 600.0
INTERVAL_S = 2.0  # of samples
MOST_INSTANCES = 128  # that have samples of their own: the first ones of a fleet that is larger
MOST_CHANGES = 4096
MOST_MOVES = 1024  # of requests, of which the page lists the last ones
BOTH_CLASSES = "both"  # what orders and moves call a length class that is none
GONE = "dead"  # the state of an instance that does not come back


class Membership(NamedTuple):
    """Where an instance belongs. ``length_class`` is empty where it takes prompts of both classes."""

    state: str
    role: str
    length_class: str


def membership_of(view: InstanceView) -> Membership:
    """Where a policy sees it."""
    length_class = "" if view.length_class is None else view.length_class.value
    return Membership(view.state.value, view.role.value, length_class)


class InstanceChange(NamedTuple):
    """An instance has got another state, role or class. ``epoch``: number of the order, where orders have one."""

    at_s: float
    instance: int
    membership: Membership
    reason: str
    epoch: int | None


class RequestMove(NamedTuple):
    """A request has gone on at another instance.

    Attributes:
        source, target: names of instances, which may be forgotten before it.
        how, reason: pull or redo, and why.
        kv_bytes: that went from one to the other, by the profile.
        pause_s: of its client.
    """

    at_s: float
    rid: str
    source: str
    target: str
    how: str
    reason: str
    kv_bytes: int
    pause_s: float


class Load(NamedTuple):
    """The load of one instance at one time. The last three are sums since its start, so that any span has its means.

    Attributes:
        requests: prefills in its queue, decodes that run or wait.
        first_tokens: requests with a prediction that have had their first token there.
        ttft_ms, predicted_ttft_ms: from dispatch to first token of these requests, summed.
    """

    queued_tokens: int
    decode_tokens: int
    requests: int
    kv_used_tokens: int
    busy_percent: int
    first_tokens: int
    ttft_ms: int
    predicted_ttft_ms: int


@dataclass(slots=True)
class TtftSums:
    """Times from dispatch to first token of the requests of one instance, and what was predicted for them.

    ``error_s`` sums the absolute differences.
    """

    count: int = 0
    measured_s: float = 0.0
    predicted_s: float = 0.0
    error_s: float = 0.0

    def add_request(self, measured_s: float, predicted_s: float) -> None:
        self.count += 1
        self.measured_s += measured_s
        self.predicted_s += predicted_s
        self.error_s += abs(measured_s - predicted_s)


NO_REQUESTS = TtftSums()


def describe_scale(time_scale: float) -> dict[str, str]:
    """For the box at the top of the page: nothing on a real device, whose time is that of the wall."""
    if time_scale == 1:
        return {}
    return {"durations": f"wall time; the emulated device's are 1/{time_scale:g} of it"}


BUCKETS_PER_DOUBLING = 8  # of durations: a quantile is at most 9 % above the true one


def find_bucket(seconds: float) -> int:
    """The number of the bucket of a duration, whose upper bound is 2 ** (number / BUCKETS_PER_DOUBLING) seconds."""
    return math.ceil(BUCKETS_PER_DOUBLING * math.log2(max(seconds, 1e-6)))


class RequestFigures:
    """Requests that have ended in some span of time, and first tokens that came in it.

    ``ttft``, ``tpot``: how many have missed and met the target; ``ttft_buckets``, ``tpot_buckets``: durations counted
    by ``find_bucket``. Failed are those that the fleet owed an answer.
    """

    FIELDS = ("ended", "failed", "output_tokens", "ttft", "tpot", "ttft_buckets", "tpot_buckets")
    __slots__ = FIELDS

    def __init__(self) -> None:
        self.ended = self.failed = self.output_tokens = 0
        self.ttft, self.tpot = [0, 0], [0, 0]
        self.ttft_buckets: dict[int, int] = {}
        self.tpot_buckets: dict[int, int] = {}

    def add_first_token(self, ttft_s: float) -> None:
        bucket = find_bucket(ttft_s)
        self.ttft_buckets[bucket] = self.ttft_buckets.get(bucket, 0) + 1

    def add_end(
        self, failed: bool, ttft_met: bool | None, tpot_met: bool | None, tpot_s: float | None, output_tokens: int
    ) -> None:
        """None: the request says nothing of that target, or has no such time."""
        self.ended += 1
        self.failed += failed
        self.output_tokens += output_tokens
        if ttft_met is not None:
            self.ttft[ttft_met] += 1
        if tpot_met is not None:
            self.tpot[tpot_met] += 1
        if tpot_s is not None:
            bucket = find_bucket(tpot_s)
            self.tpot_buckets[bucket] = self.tpot_buckets.get(bucket, 0) + 1

    def to_row(self) -> list[Any]:
        """JSON-ready, in the order of ``FIELDS``."""
        return [getattr(self, name) for name in self.FIELDS]


def measure_load(view: InstanceView, ttft: TtftSums = NO_REQUESTS) -> Load:
    """What a policy sees of an instance now, as whole numbers."""
    return Load(
        view.queued_tokens,
        view.assigned_decode_tokens(),
        view.requests(),
        view.kv_used_tokens,
        round(100 * view.utilisation),
        ttft.count,
        round(1e3 * ttft.measured_s),
        round(1e3 * ttft.predicted_s),
    )


@dataclass(slots=True)
class _Instance:
    """``base``: where it belonged before the first change that is kept; None: it was not there yet."""

    name: str
    kind: str = ""
    kv_capacity_tokens: int | None = None
    base: Membership | None = None
    last: Membership | None = None
    last_s: float = -math.inf


class _Sample(NamedTuple):
    """``values``: int64 [instances, 1 + fields of ``Load``], an instance's index in front of its load.

    ``lengths``: mean absolute errors of predicted lengths and of the best constant, in tokens; None: there are none.
    ``figures``: since the sample before; None: they are not known.
    """

    at_s: float
    open_requests: int
    waiting: int
    values: array[int]
    lengths: tuple[float, float] | None = None
    figures: RequestFigures | None = None


_WIDTH = 1 + len(Load._fields)


class FleetHistory:
    """The last ``window_s`` of a fleet, sampled every ``interval_s``."""

    def __init__(
        self, *, window_s: float = WINDOW_S, interval_s: float = INTERVAL_S, most_changes: int = MOST_CHANGES
    ) -> None:
        self.window_s, self.interval_s = window_s, interval_s
        self._most_changes = most_changes
        self._whole_from_s = -math.inf  # since then no change was lost
        self._instances: dict[int, _Instance] = {}
        self._samples: deque[_Sample] = deque()
        self._changes: deque[InstanceChange] = deque()
        self._moves: deque[RequestMove] = deque(maxlen=MOST_MOVES)
        self._moved = 0
        self._left_out = 0

    # -- what happens ------------------------------------------------------------------------------------------------

    def note_instance(self, index: int, name: str, kind: str, kv_capacity_tokens: int | None) -> None:
        """What an instance is; it may become known after its first change."""
        instance = self._instances.setdefault(index, _Instance(name))
        instance.kind, instance.kv_capacity_tokens = kind, kv_capacity_tokens

    def find_membership(self, index: int) -> Membership | None:
        """Where an instance of ``note_instance`` belongs now; None: nothing was noted of it."""
        instance = self._instances.get(index)
        return None if instance is None else instance.last

    def note_membership(
        self, index: int, membership: Membership, at_s: float, *, reason: str = "", epoch: int | None = None
    ) -> None:
        """An instance belongs there from ``at_s`` on; a change if it did not before. Changes come in order of time."""
        instance = self._instances[index]
        if instance.last == membership:
            return
        instance.last, instance.last_s = membership, at_s
        self._changes.append(InstanceChange(at_s, index, membership, reason, epoch))
        if len(self._changes) > self._most_changes:
            self._whole_from_s = self._changes[0].at_s
            self._forget_change()

    def note_move(self, move: RequestMove) -> None:
        """A request goes on elsewhere since ``at_s``. Moves come in order of time."""
        self._moved += 1
        self._moves.append(move)

    def is_due(self, now_s: float) -> bool:
        """True if it is time for the next sample."""
        return not self._samples or now_s - self._samples[-1].at_s >= self.interval_s

    def add_sample(
        self,
        now_s: float,
        loads: Mapping[int, Load],
        *,
        open_requests: int,
        waiting: int,
        lengths: ErrorSums | None = None,
        figures: RequestFigures | None = None,
    ) -> None:
        """``loads`` by index of instance; ``waiting``: requests that have no instance yet; ``lengths``: errors of
        predictions that were judged lately; ``figures``: of requests since the last sample."""
        values = array("q")
        for index in sorted(loads)[:MOST_INSTANCES]:
            values.append(index)
            values.extend(loads[index])
        self._left_out = max(0, len(loads) - MOST_INSTANCES)
        means = None
        if lengths is not None and lengths.count:
            means = round(lengths.mae_tokens, 1), round(lengths.mae_constant_tokens, 1)
        self._samples.append(_Sample(round(now_s, 3), open_requests, waiting, values, means, figures))
        self._forget_before(now_s - self.window_s)

    def _forget_before(self, limit_s: float) -> None:
        while self._samples and self._samples[0].at_s < limit_s:
            self._samples.popleft()
        while self._changes and self._changes[0].at_s < limit_s:
            self._forget_change()
        while self._moves and self._moves[0].at_s < limit_s:
            self._moves.popleft()
        for index, instance in list(self._instances.items()):
            if instance.last is not None and instance.last.state == GONE and instance.last_s < limit_s:
                del self._instances[index]

    def _forget_change(self) -> None:
        change = self._changes.popleft()
        instance = self._instances.get(change.instance)
        if instance is not None:
            instance.base = change.membership

    # -- what the page gets ------------------------------------------------------------------------------------------

    def to_document(self, now_s: float, since_s: float = -math.inf) -> dict[str, Any]:
        """JSON-ready; of samples those after ``since_s`` only. Times are rounded to milliseconds."""
        start_s = max(now_s - self.window_s, self._whole_from_s, self._find_start(now_s))
        kept = [change for change in self._changes if change.instance in self._instances]
        return {
            "now_s": round(now_s, 3),
            "start_s": round(start_s, 3),
            "interval_s": self.interval_s,
            "left_out": self._left_out,
            "load_fields": Load._fields,
            "figure_fields": RequestFigures.FIELDS,
            "buckets_per_doubling": BUCKETS_PER_DOUBLING,
            "instances": [
                {
                    "index": index,
                    "name": instance.name,
                    "kind": instance.kind,
                    "kv_capacity_tokens": instance.kv_capacity_tokens,
                    "base": instance.base,
                }
                for index, instance in sorted(self._instances.items())
            ],
            "changes": [
                [round(change.at_s, 3), change.instance, *change.membership, change.reason, change.epoch]
                for change in kept
            ],
            "moved": self._moved,
            "moves": [[round(move.at_s, 3), *move[1:]] for move in self._moves],
            "samples": [_describe_sample(sample) for sample in self._samples if sample.at_s > since_s],
        }

    def _find_start(self, now_s: float) -> float:
        """When the first thing happened that is kept."""
        first = [self._samples[0].at_s] if self._samples else []
        first += [self._changes[0].at_s] if self._changes else []
        return min(first, default=now_s)


def _describe_sample(sample: _Sample) -> list[Any]:
    figures = None if sample.figures is None else sample.figures.to_row()
    return [sample.at_s, sample.open_requests, sample.waiting, _split_rows(sample.values), sample.lengths, figures]


def _split_rows(values: array[int]) -> list[list[int]]:
    return [values[start : start + _WIDTH].tolist() for start in range(0, len(values), _WIDTH)]
