"""The graph cache's Prometheus series. Created in the scheduler process, scraped through SGLang's ``/metrics``."""

from __future__ import annotations

from typing import Any

from pla_graphs.cache import GraphCache


class GraphSeries:
    """Brought up to date from the cache's totals whenever the host asks for its state or publishes its load."""

    def __init__(self, labels: dict[str, Any]) -> None:
        from prometheus_client import Counter, Gauge

        names = list(labels)
        self._values = list(labels.values())
        self._batches = Counter("pla:graph_batches", "Prefill batches by why they used a graph.", [*names, "reason"])
        self._hits = Counter("pla:graph_hits", "Replays by shape.", [*names, "bucket"])
        self._tokens = Counter("pla:graph_tokens", "Tokens of replayed batches.", [*names, "kind"])
        self._capture_s = Counter("pla:graph_capture_seconds", "Time spent on captures.", names)
        self._evictions = Counter("pla:graph_evictions", "Graphs dropped for the memory budget.", names)

        def gauge(name: str, text: str) -> Any:
            return Gauge(name, text, names, multiprocess_mode="mostrecent")

        self._graphs = gauge("pla:graph_captured", "Graphs that are captured.")
        self._bytes = gauge("pla:graph_bytes", "Device memory that captures took.")
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
        self._add(self._evictions, counts.evictions, "evictions")
        self._graphs.labels(*self._values).set(len(cache.captured))
        self._bytes.labels(*self._values).set(cache.memory_bytes)

    def _add(self, metric: Any, total: float, name: str, *extra: str) -> None:
        key = (name, *extra)
        more = total - self._shown.get(key, 0.0)
        if more > 0:
            metric.labels(*self._values, *extra).inc(more)
            self._shown[key] = total
