"""Digests of simulator runs: every policy over several workloads, for comparing two versions of the code.

A digest covers the times, places and ends of all requests of a run, and the reasons of all decisions. A change that
should not affect decisions leaves all digests as they are: write them before it with ``--out``, and compare after it
with ``--against`` (exit status 1 if one differs). Synthetic workloads always; recorded traces too with ``--data``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.registry import policy_names
from pla_sglang.sim.core.experiment import Experiment, run_experiment
from pla_sglang.sim.metrics.goodput import SLOS, Slo
from pla_sglang.sim.workload import Arrivals, Trace, chat_trace, generated_trace, length_model, load_trace

# name: (file, rows, rate per s)
RECORDED = {
    "azure_code": ("azure_code_2023.csv.gz", 2500, 90.0),
    "azure_conv": ("azure_conv_2023.csv.gz", 2500, 200.0),
    "mooncake": ("mooncake_conv_min00_10.csv.gz", 800, 12.0),
}
ENGINE_ORDERS = (("least-tokens", "temporal"), ("pla", "temporal"), ("round-robin", "temporal"), ("arrow", "pass-srpt"))
Run = tuple[str, str, str, Path]  # policy, engine order, workload, folder of the recorded traces


def load_workload(name: str, data: Path) -> tuple[Trace, Slo, float]:
    """The trace, its targets and its rate per second."""
    if name == "chat":
        return chat_trace(700, Arrivals(2.0, random.Random(1), think_s=20.0)), Slo(0.5, 0.04), 80.0
    if name == "star":
        lengths = length_model("star_sharegpt_input"), length_model("star_sharegpt_output")
        return generated_trace(250, Arrivals(2.0, random.Random(1)), *lengths, name="star"), Slo(2.0, 0.03), 12.0
    file, rows, rate_per_s = RECORDED[name]
    return load_trace(data / file).head(rows), SLOS[name], rate_per_s


def measure(run: Run) -> tuple[str, dict[str, Any]]:
    """Name, and digest, attainment and events of one run."""
    policy, engine, workload, data = run
    trace, slo, rate_per_s = load_workload(workload, data)
    done = run_experiment(Experiment(policy, slo, engine=engine, rate_per_s=rate_per_s), trace)
    figures = {"digest": done.result.digest(), "attainment": done.figures.attainment, "events": done.result.events}
    return f"{policy}/{engine}/{workload}", figures


def list_runs(data: Path | None) -> list[Run]:
    """Raises ConfigError for a folder that lacks a trace."""
    recorded = RECORDED if data else {}
    folder = data or Path()
    for file, *_ in recorded.values():
        if not (folder / file).is_file():
            raise ConfigError(f"--data {folder}: {file} is not there")
    orders = [*((policy, "fcfs") for policy in policy_names()), *ENGINE_ORDERS]
    workloads = ("chat", "star", *recorded)
    return [(policy, engine, workload, folder) for policy, engine in orders for workload in workloads]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a digest differs, 2 for a folder without the traces. The last line of stdout is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="FILE", help="digests that an earlier run has written")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="recorded traces, of the names in this module")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the digests are written")
    options = parser.parse_args(argv)
    before: dict[str, Any] = {} if options.against is None else json.loads(options.against.read_text(encoding="utf-8"))
    try:
        runs = list_runs(options.data)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with ProcessPoolExecutor(max_workers=2) as processes:
        digests = dict(processes.map(measure, runs))
    if options.out is not None:
        options.out.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
    compared = digests.keys() & before.keys()
    differ = sorted(name for name in compared if before[name]["digest"] != digests[name]["digest"])
    for name in differ:
        print(f"{name} differs: attainment {before[name]['attainment']:.4f}, now {digests[name]['attainment']:.4f}")
    print(json.dumps({"runs": len(digests), "compared": len(compared), "differ": differ}), flush=True)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
