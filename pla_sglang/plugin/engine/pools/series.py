"""Prometheus series of the pools, from the data-parallel controller process, shown by SGLang's ``/metrics``."""

from __future__ import annotations

from collections import Counter

from pla_sglang.common.series import LabelledSeries
from pla_sglang.plugin.engine.pools.driver import Pools

EVERY_S = 0.25


class Series:
    """Follows the counts of ``Pools``."""

    def __init__(self, series: LabelledSeries) -> None:
        self._ranks = series.gauge("pla_pool_ranks", "Data-parallel ranks in each pool.", "cls")
        self._pressure = series.gauge("pla_pool_pressure", "P of each pool (PLA-Serve Algorithm 2).", "cls")
        self._signal = series.gauge("pla_rank_signal", "Signals of each rank: q, e, u, psi.", "rank", "signal")
        self._totals = {
            "dispatched": series.total("pla_pool_dispatch", "Requests dispatched to ranks, by reason.", "reason"),
            "ticks": series.total("pla_pool_ticks", "Decisions of the pressure controller, by reason.", "reason"),
            "moves": series.total("pla_pool_moves", "Ranks that changed pools, by reason.", "reason"),
        }
        self._shown: dict[str, Counter[str]] = {name: Counter() for name in self._totals}
        self._next_s = 0.0

    def show(self, pools: Pools, now_s: float) -> None:
        """At most four times a second."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        for cls, pressure in pools.compute_pressures().items():
            self._pressure.at(cls).set(pressure)
        for role in ("short", "long", "mixed"):
            self._ranks.at(role).set(pools.roles.count(role))
        for rank in range(len(pools.roles)):
            for name, value in pools.pressure.signals(pools.fleet.instances[rank])._asdict().items():
                self._signal.at(str(rank), name).set(value)
        for name, counts in pools.count_decisions().items():
            series = self._totals[name]
            for reason, count in (counts - self._shown[name]).items():
                series.at(reason).inc(count)
            self._shown[name] = counts.copy()
