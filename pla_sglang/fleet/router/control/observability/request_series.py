"""Requests that have ended, by model and tenant: how, whether they met their targets, and how long they took.

Counted in plain Python: a request costs two look-ups of its row. Samples are made when somebody scrapes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pla_sglang.fleet.router.control.requests.request_record import End, RequestRecord
from pla_sglang.fleet.router.wire.inference import BY_ENDPOINT
from pla_sglang.fleet.router.wire.messages import Outcome
from pla_sglang.fleet.viewer.history import RequestFigures
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.recording import rows

# A row shows about 60 samples. A scrape of this many takes 60 ms on a busy core; no request is dispatched meanwhile.
MOST_PAIRS = 100  # of model and tenant that have rows of their own
OTHER = "other"  # the tenant under which the rest of a model's is counted
KEY_PREFIX = "key-"  # of the names that a relay makes of API keys: no client has given them
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TPOT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0)
REQUEST_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_LABELS = ("model", "tenant")
_GENERATES = frozenset(endpoint for endpoint, path in BY_ENDPOINT.items() if path.generates)
# Named once: see ``fast_enum``.
_OK, _CLIENT_ERROR, _REFUSED, _CLIENT_GONE = Outcome.OK, Outcome.CLIENT_ERROR, Outcome.REFUSED, Outcome.CLIENT_GONE
_WHOLE = frozenset({_OK, _CLIENT_GONE})  # nothing but its client has cut the answer off
_OVERLOAD = 429  # a status of refusals that are not the client's mistake


class Judgement(NamedTuple):
    """What a request says of its targets; None: nothing, and of ``tpot_s``: it cannot be told.

    ``failed``: its client was owed an answer and did not get one, or not all of it.
    """

    ttft_met: bool | None = None
    tpot_met: bool | None = None
    tpot_s: float | None = None
    failed: bool = False


_UNJUDGED, _FAILED = Judgement(), Judgement(failed=True)


def has_first_token(record: RequestRecord) -> bool:
    """True for streams of answers: of an answer in one piece nobody sees when its first token came."""
    return record.ask.stream and record.ask.endpoint in _GENERATES


def judge_targets(record: RequestRecord, end: End, first_s: float | None, last_s: float | None) -> Judgement:
    """``first_s``, ``last_s``: when the first token came, and when the last byte of the answer was forwarded.

    A client that leaves before the first token says nothing of targets, and neither does a request that is wrong in
    itself. Any other end without a first token has missed TTFT. An answer that was cut off has missed TPOT.
    """
    outcome, tokens = end.outcome, end.output_tokens
    whole = outcome in _WHOLE
    if not whole:
        mistake = outcome is _REFUSED and 400 <= end.status < 500 and end.status != _OVERLOAD
        if mistake or outcome is _CLIENT_ERROR:
            return _UNJUDGED
    if not has_first_token(record):
        return _UNJUDGED if whole else _FAILED
    if first_s is None or (not whole and tokens == 0):  # the first byte was that of an error
        return _UNJUDGED if outcome is _CLIENT_GONE else Judgement(False, failed=True)
    ttft_met = first_s - record.ask.arrived_s <= record.ttft.slo_s
    if not whole:
        return Judgement(ttft_met, False, failed=True)
    if tokens is None or tokens < 2 or last_s is None or not record.ask.is_single:
        return Judgement(ttft_met)
    tpot_s = max(0.0, last_s - first_s) / (tokens - 1)
    return Judgement(ttft_met, tpot_s <= record.tpot.slo_s, tpot_s)


def describe_end(record: RequestRecord, end: End, judged: Judgement, clock: DeviceClock, now_s: float) -> rows.Ended:
    """For the recording, which is in device time."""
    first_s, ttft_s = record.shown_attempt.first_token_s, None
    if judged.ttft_met is not None and first_s is not None:
        ttft_s = clock.device_s(max(0.0, first_s - record.ask.arrived_s))
    return rows.Ended(
        clock.device_s(now_s),
        record.rid,
        end.outcome.label,
        judged.failed,
        end.output_tokens or 0,
        ttft_s,
        None if judged.tpot_s is None else clock.device_s(judged.tpot_s),
        judged.ttft_met,
        judged.tpot_met,
    )


class Buckets:
    """A histogram of seconds, without labels. ``counts``: one for each of ``bounds_s``, and one for what is above."""

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    def to_samples(self) -> list[tuple[str, float]]:
        """Upper bound, and how many are at most that."""
        bounds = [*map(str, self.bounds_s), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self.counts), strict=True))


class _Row:
    """Counts of one pair of model and tenant. ``ttft``, ``tpot``: how many have missed and met the target."""

    __slots__ = ("ends", "input_tokens", "output_tokens", "request_s", "tpot", "tpot_s", "ttft", "ttft_s")

    def __init__(self) -> None:
        self.ends: dict[str, int] = {}
        self.ttft, self.tpot = [0, 0], [0, 0]
        self.input_tokens = 0
        self.output_tokens = [0, 0]  # counted in events; as instances say
        self.ttft_s, self.tpot_s, self.request_s = Buckets(SECONDS), Buckets(TPOT_SECONDS), Buckets(REQUEST_SECONDS)


class RequestSeries(Collector):
    """Rows by model and tenant, at most ``most_pairs`` and one more for each model."""

    def __init__(self, registry: CollectorRegistry, most_pairs: int = MOST_PAIRS) -> None:
        self._rows: dict[tuple[str, str], _Row] = {}
        self._most_pairs = most_pairs
        self._recent = RequestFigures()
        registry.register(self)

    def take_recent(self) -> RequestFigures:
        """What was counted since it was called last, of all models and tenants."""
        recent, self._recent = self._recent, RequestFigures()
        return recent

    def note_first_token(self, model: str, record: RequestRecord, ttft_s: float) -> None:
        self._find_row(model, record.tenant).ttft_s.observe(ttft_s)
        self._recent.add_first_token(ttft_s)

    def add_request(
        self, model: str, record: RequestRecord, end: End, *, at_s: float, last_s: float | None = None
    ) -> Judgement:
        """A request has ended at ``at_s``. ``last_s``: as in ``judge_targets``."""
        row, outcome, first_s = self._find_row(model, record.tenant), end.outcome, record.shown_attempt.first_token_s
        label = outcome.label
        row.ends[label] = row.ends.get(label, 0) + 1
        if outcome is _OK:
            row.request_s.observe(max(0.0, at_s - record.ask.arrived_s))
        if end.output_tokens is not None:
            row.output_tokens[end.exact_tokens] += end.output_tokens
        if first_s is not None:
            row.input_tokens += record.prompt.tokens
        judged = judge_targets(record, end, first_s, last_s)
        ttft_met, tpot_met, tpot_s, failed = judged
        if ttft_met is not None:
            row.ttft[ttft_met] += 1
        if tpot_met is not None:
            row.tpot[tpot_met] += 1
        if tpot_s is not None:
            row.tpot_s.observe(tpot_s)
        self._recent.add_end(failed, ttft_met, tpot_met, tpot_s, end.output_tokens or 0)
        return judged

    def _find_row(self, model: str, tenant: str) -> _Row:
        row = self._rows.get((model, tenant))
        if row is not None:
            return row
        if tenant.startswith(KEY_PREFIX):
            return self._find_row(model, "")
        if len(self._rows) >= self._most_pairs and tenant != OTHER:
            return self._find_row(model, OTHER)
        row = self._rows[model, tenant] = _Row()
        return row

    # -- for those who scrape ------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_counters()
        for name, text in (
            ("ttft", "Arrival to first token, of streams."),
            ("tpot", "Mean time per output token of a stream, from its first to its last."),
            ("request", "Arrival to the last byte, of requests that were answered completely."),
        ):
            family = HistogramMetricFamily(f"pla_router_{name}_seconds", text, labels=_LABELS)
            for labels, row in self._rows.items():
                buckets: Buckets = getattr(row, f"{name}_s")
                family.add_metric(labels, buckets.to_samples(), buckets.sum_s)
            yield family

    def _collect_counters(self) -> Iterator[Metric]:
        rows = self._rows.items()
        targets = [
            ((target, met, *labels), count)
            for labels, row in rows
            for target, counts in (("ttft", row.ttft), ("tpot", row.tpot))
            for met, count in zip(("false", "true"), counts, strict=True)
        ]
        text = "Streams that have ended, by target and whether it was met."
        yield counter_family("targets", text, ("target", "met", *_LABELS), targets)
        ends = [((end, *labels), count) for labels, row in rows for end, count in row.ends.items()]
        yield counter_family("requests", "Requests that have ended, by how.", ("end", *_LABELS), ends)
        outputs = [
            ((by, *labels), count)
            for labels, row in rows
            for by, count in zip(("events", "instance"), row.output_tokens, strict=True)
        ]
        text = "Tokens of answers, as instances say; of answers without a count, events."
        yield counter_family("output_tokens", text, ("by", *_LABELS), outputs)
        inputs = [(labels, row.input_tokens) for labels, row in rows]
        yield counter_family("input_tokens", "Prompt tokens of requests whose answer has begun.", _LABELS, inputs)


def counter_family(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> CounterMetricFamily:
    """``name`` is without prefix; ``rows``: values of the labels, and the count."""
    family = CounterMetricFamily(f"pla_router_{name}", text, labels=labels)
    for values, count in rows:
        family.add_metric(values, count)
    return family
