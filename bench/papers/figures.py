"""The scripts by name, in the order of the papers. Each module has ``run(context) -> Finding``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from bench.papers.context import Context
from bench.papers.finding import Finding
from pla_sglang.errors import ConfigError

# name -> what it shows
FIGURES: Mapping[str, str] = {
    "arrow_fig7": "Arrow Fig. 7: rates at 90 % attainment on four traces against colocated and static disaggregated",
    "arrow_fig8": "Arrow Fig. 8: SLO-aware, Minimal Load, Round Robin",
    "arrow_fig9": "Arrow Fig. 9: two to eight GPUs",
    "star_fig10": "STAR Fig. 10: throughput, goodput, P99 TPOT against the rate",
    "star_fig11": "STAR Fig. 11 and 12: variance and KV cache over time",
    "star_fig13": "STAR Fig. 13: cluster sizes, and the time of a decision",
    "star_table3": "STAR Table 3: exactness of the prediction",
    "star_table4": "STAR Table 4: interval of the prediction",
    "dopd_fig6": "DOPD Fig. 6: the P/D ratio, and throughput by prefill instances",
    "dopd_fig7": "DOPD Fig. 7: static, against aggregation",
    "dopd_fig8": "DOPD Fig. 8: static, against disaggregation; mixed lengths",
    "dopd_fig9": "DOPD Fig. 9 and 10: dynamic, against two autoscalers",
    "pla_fig1": "PLA-Serve Fig. 1 and 3: long and short prefills in each other's way",
    "pla_fig5": "PLA-Serve Fig. 5: the waiting window",
    "pla_fig6": "PLA-Serve Fig. 6: throughput and latency, one and eight instances",
    "pla_fig7": "PLA-Serve Fig. 7: violations, one and eight instances",
    "pla_table2": "PLA-Serve Table 2: a data set without deadlines, 4 P + 4 D",
    "fleets": "beyond the papers: the combination against each system; forecasts by GPU-hours",
    "theory": "the simulator against Pollaczek and Khinchine",
}
ALL = "all"


def named(names: list[str]) -> list[str]:
    """The scripts that are meant, in their order. Raises ConfigError for one that is not known."""
    if ALL in names:
        return list(FIGURES)
    for name in names:
        if name not in FIGURES:
            raise ConfigError(f"figure {name!r} is not known; allowed: {ALL}, {', '.join(FIGURES)}")
    return [name for name in FIGURES if name in names]


def script(name: str) -> Callable[[Context], Finding]:
    """Imported when it is needed: some take a second to import."""
    run: Callable[[Context], Finding] = importlib.import_module(f"bench.papers.{name}").run
    return run
