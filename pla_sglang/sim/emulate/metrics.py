"""Prometheus series of the emulated device. Created in the scheduler process, scraped through SGLang's ``/metrics``."""

from __future__ import annotations

from pla_sglang.common.series import LabelledSeries
from pla_sglang.sim.emulate.timeline import Span


class DeviceSeries:
    """Totals, so that any share over any window can be computed from two scrapes."""

    def __init__(self, series: LabelledSeries, profile: str, time_scale: float) -> None:
        info = series.gauge(
            "pla_emulated_device",
            "1: this engine has no GPU; forward passes take the time of a profile, times time_scale.",
            "profile",
            "time_scale",
        )
        info.at(profile, f"{time_scale:g}").set(1)
        self._steps = series.total("pla_emulated_steps", "Forward passes on the emulated device.").at()
        self._busy_s = series.total("pla_emulated_busy_seconds", "Time in which the emulated device worked.").at()
        waiting = "Time in which it had work but waited for its host."
        self._gap_s = series.total("pla_emulated_host_gap_seconds", waiting).at()
        between = "Time that its passes cost beside their tokens, by its profile."
        self._between_s = series.total("pla_emulated_pass_gap_seconds", between).at()

    def on_step(self, span: Span) -> None:
        self._steps.inc()
        self._busy_s.inc(span.cost_s)
        self._gap_s.inc(span.gap_s)
        self._between_s.inc(span.before_s)
