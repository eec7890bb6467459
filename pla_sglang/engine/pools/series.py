"""Prometheus series of the pools, from the data-parallel controller process, shown by SGLang's ``/metrics``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pla_sglang.engine.pools.driver import Pools

EVERY_S = 0.25


class Series:
    """Follows the counts of ``Pools``."""

    def __init__(self, model_name: str) -> None:
        from prometheus_client import Counter as Total
        from prometheus_client import Gauge

        def gauge(name: str, text: str, *labels: str) -> Any:
            return Gauge(name, text, ["model_name", *labels], multiprocess_mode="mostrecent")

        def total(name: str, text: str) -> Any:
            return Total(name, text, ["model_name", "reason"])

        self._model_name = model_name
        self._ranks = gauge("pla:pool_ranks", "Data-parallel ranks in each pool.", "cls")
        self._pressure = gauge("pla:pool_pressure", "P of each pool (PLA-Serve Algorithm 2).", "cls")
        self._signal = gauge("pla:rank_signal", "Signals of each rank: q, e, u, psi.", "rank", "signal")
        self._totals = {
            "dispatched": total("pla:pool_dispatch", "Requests dispatched to ranks, by reason."),
            "ticks": total("pla:pool_ticks", "Decisions of the pressure controller, by reason."),
            "move_count": total("pla:pool_moves", "Ranks that changed pools, by reason."),
        }
        self._shown: dict[str, Counter[str]] = {name: Counter() for name in self._totals}
        self._next_s = 0.0

    def show(self, pools: Pools, now_s: float) -> None:
        """At most four times a second."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        for cls, pressure in pools.pressures().items():
            self._pressure.labels(self._model_name, cls).set(pressure)
        for role in ("short", "long", "mixed"):
            self._ranks.labels(self._model_name, role).set(pools.roles.count(role))
        for rank in range(len(pools.roles)):
            for name, value in pools.signals(rank).items():
                self._signal.labels(self._model_name, rank, name).set(value)
        for name, series in self._totals.items():
            counts: Counter[str] = getattr(pools, name)
            for reason, count in (counts - self._shown[name]).items():
                series.labels(self._model_name, reason).inc(count)
            self._shown[name] = counts.copy()
