"""GPU-hours of a fleet that grows and shrinks over recorded hours, against the smallest fleet of a fixed size.

As ``elastic``, on the arrivals and lengths of recorded hours, at ``--rate`` requests/s: so an hour takes minutes, and
its changes come as many times faster, while instances take as long to start as they do. All arms begin with the
smallest fixed fleet that has 95 % in target, as a recording begins in the middle of a load. An arm is a forecaster of
planner ``dopd`` beside policy ``combined``. Targets are those of Arrow, Table 1.

``mooncake`` is the hour of ``FAST25-release/traces`` of kvcache-ai/Mooncake, commit 3b5a59413395, as it is there.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.compare.elastic import (
    FIXED_MOST,
    Figures,
    SimulatedFleets,
    add_fleet_arguments,
    base_of,
    cells_of,
    simulate_arm,
)
from bench.harness.bench import Result, measuring
from bench.harness.report import Cells, emit, environment, markdown, progress_bar, show
from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.metrics.goodput import SLOS
from pla_sglang.sim.workload import load_trace

TRACES = {  # file in the folder of traces, targets
    "azure_conv": ("azure_conv_2023.csv.gz", SLOS["azure_conv"]),
    "azure_code": ("azure_code_2023.csv.gz", SLOS["azure_code"]),
    "mooncake": ("conversation_trace.jsonl", SLOS["mooncake"]),
}
DEFAULT_TRACES = ("azure_conv", "azure_code")  # ``mooncake`` has prompts ten times as long, for another rate
FORECASTERS = ("arima", "judged")
ARM = "combined+dopd"
BEGIN_TARGET = 0.95


class ForecastFleets(SimulatedFleets):
    """Begins with ``begin`` instances; arms are names of forecasters."""

    begin = 1

    def run_arm(self, name: str) -> Figures:
        return self.run_planned(ARM, self.begin, forecaster=name)


def rows_of(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of one trace, a row a forecaster. Raises ConfigError."""
    if name not in TRACES:
        raise ConfigError(f"--traces {name!r} is not known; allowed: {', '.join(TRACES)}")
    file, slo = TRACES[name]
    base = dataclasses.replace(base_of(options, startup_s=options.startup_s, most=FIXED_MOST), slo=slo)
    fleets = ForecastFleets(base, load_trace(options.data / file).at_rate(options.rate))
    begin = fleets.smallest_fixed(BEGIN_TARGET)
    if begin is None:
        raise ConfigError(f"{name}: {FIXED_MOST} instances do not keep {BEGIN_TARGET:.0%} at {options.rate:g}/s")
    fleets.begin = begin
    return [{"trace": name, "forecaster": one, **simulate_arm(one, fleets)} for one in FORECASTERS]


def table(rows: Sequence[dict[str, Any]]) -> Cells:
    header = ["trace", "forecaster", "GPU h", "lower bound", "attainment"]
    header += ["over fixed", "fixed instances", "attainment", "started", "left"]
    return header, [[f"`{row['trace']}`", f"`{row['forecaster']}`", *cells_of(row)] for row in rows]


def page(result: Result) -> str:
    foot = f"`{ARM}` at {result['rate']:g}/s, `{result['profile']}`, start-up {result['startup_s']:g} s, a plan every"
    foot += f" {result['plan_interval_s']:g} s. Commit {result['environment']['plugin_commit']}."
    return "\n\n".join([markdown(*table(result["rows"]), right=True), foot])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder of the recorded traces")
    parser.add_argument("--traces", default=",".join(DEFAULT_TRACES), help=f"of {', '.join(TRACES)}")
    parser.add_argument("--rate", type=float, default=20.0, help="mean requests/s")
    add_fleet_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the result")


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError."""
    require("--rate", options.rate, 0, above=True)
    about, names, rows = environment(), options.traces.split(","), []
    with measuring(), progress_bar("traces", len(names)) as advance:
        for name in names:
            rows += rows_of(name, options)
            advance()
    ratios = {f"{row['trace']}/{row['forecaster']}": row["gpu_hours_vs_fixed"] for row in rows}
    settings = ("rate", "profile", "startup_s", "plan_interval_s", "instances_min")
    result = {
        "bench": "elastic_recorded",
        "gpu_hours_vs_fixed": ratios,
        "rows": rows,
        **{name: getattr(options, name) for name in settings},
        "environment": about,
    }
    show("GPU-hours over recorded hours, simulated", *table(rows))
    emit(result, "elastic_recorded", options.out)
    return 0


PAGES = {"elastic_recorded": page, "elastic_mooncake": page}  # the second one: ``--traces mooncake --rate 3.4``
