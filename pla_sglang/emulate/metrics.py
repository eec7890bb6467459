"""Prometheus series of the emulated device. Created in the scheduler process, scraped through SGLang's ``/metrics``."""

from __future__ import annotations

from typing import Any

from pla_sglang.emulate.timeline import Span


class Series:
    """Totals, so that any share over any window can be computed from two scrapes."""

    def __init__(self, labels: dict[str, Any], profile: str, time_scale: float) -> None:
        from prometheus_client import Counter, Gauge

        names, values = list(labels), list(labels.values())

        def total(name: str, text: str) -> Any:
            metric = Counter(name, text, names)
            return metric.labels(*values) if names else metric

        info = Gauge(
            "pla:emulated_device",
            "1: this engine has no GPU; forward passes take the time of a profile, times time_scale.",
            [*names, "profile", "time_scale"],
            multiprocess_mode="mostrecent",
        )
        info.labels(*values, profile, f"{time_scale:g}").set(1)
        self._steps = total("pla:emulated_steps", "Forward passes on the emulated device.")
        self._busy_s = total("pla:emulated_busy_seconds", "Time in which the emulated device worked.")
        self._gap_s = total("pla:emulated_host_gap_seconds", "Time in which it had work but waited for its host.")

    def on_step(self, span: Span) -> None:
        self._steps.inc()
        self._busy_s.inc(span.cost_s)
        self._gap_s.inc(span.gap_s)
