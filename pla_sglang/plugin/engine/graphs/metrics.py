"""The graph cache's Prometheus series. Created in the scheduler process, scraped through SGLang's ``/metrics``."""

from __future__ import annotations

from pla_graphs.cache import GraphCache
from pla_sglang.common.series import BoundSeries, LabelledSeries


class GraphSeries:
    """Brought up to date from the cache's totals whenever the host asks for its state or publishes its load."""

    def __init__(self, series: LabelledSeries) -> None:
        self._batches = series.total("pla_graph_batches", "Prefill batches by why they used a graph.", "reason")
        self._hits = series.total("pla_graph_hits", "Replays by shape.", "bucket")
        self._tokens = series.total("pla_graph_tokens", "Tokens of replayed batches.", "kind")
        self._capture_s = series.total("pla_graph_capture_seconds", "Time spent on captures.")
        self._failures = series.total("pla_graph_capture_failures", "Captures that failed, by the step.", "step")
        self._evictions = series.total("pla_graph_evictions", "Graphs dropped for the memory budget.")
        self._graphs = series.gauge("pla_graph_captured", "Graphs that are captured.")
        self._bytes = series.gauge("pla_graph_bytes", "Device memory that captures took.")
        self._shown: dict[tuple[str, ...], float] = {}

    def update(self, cache: GraphCache) -> None:
        counts = cache.counts
        for reason, batches in counts.reasons.items():
            self._add(self._batches, batches, "batches", reason.value)
        for bucket, hits in counts.hits.items():
            self._add(self._hits, hits, "hits", bucket.name)
        self._add(self._tokens, counts.real_tokens, "tokens", "real")
        self._add(self._tokens, counts.padded_tokens, "tokens", "padded")
        self._add(self._capture_s, counts.capture_s, "capture_s")
        for failure, captures in counts.failures.items():
            self._add(self._failures, captures, "failures", failure.value)
        self._add(self._evictions, counts.evictions, "evictions")
        self._graphs.at().set(len(cache.captured))
        self._bytes.at().set(cache.memory_bytes)

    def _add(self, metric: BoundSeries, total: float, name: str, *extra: str) -> None:
        key = (name, *extra)
        more = total - self._shown.get(key, 0.0)
        if more > 0:
            metric.at(*extra).inc(more)
            self._shown[key] = total
