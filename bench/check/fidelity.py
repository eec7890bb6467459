"""Is the simulator right? Emulated clusters and the simulator serve the same requests; how far are they apart?

    python -m bench fidelity --traces azure_conv=FILE mooncake=FILE

A case is LAYOUT/ENGINE/POLICY/WORKLOAD/LOAD: engines, a policy of our router, and a load as a share of the capacity
that the simulator finds. Lone requests measure what the hosts add (constants of the simulator); then an excerpt of the
trace goes through the router, and the simulator gets the same requests at the times at which they were sent. Finished
steps are kept in ``--out``; simulations are made anew in each run. Every request is in ``fidelity.parquet``.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from bench.check.live_case import LiveCase, list_grid
from bench.harness import cli, fidelity, report
from bench.harness.bench import Result, measuring
from bench.harness.figures import log_seconds, panels
from bench.harness.latency import ecdf
from bench.harness.live_fleet import SLOTS, LiveFleet, is_valid, points_of, running_fleet
from bench.harness.replay import Planned
from bench.harness.steps import Row, Steps
from pla_sglang.sim import chain
from pla_sglang.sim.core.experiment import Experiment
from pla_sglang.sim.workload import Trace

DEFAULT_CASES = (
    "unified-2/fcfs/round-robin/azure_conv/0.8,unified-2/fcfs/cache-aware/mooncake/0.5,"
    "1+1/fcfs/static-pd-round-robin/azure_conv/0.8,2+2/fcfs/minimal-load/azure_conv/0.5,"
    "unified-2/temporal/least-tokens/azure_conv/0.95,unified-2/mixed/cache-aware/mooncake/0.8"
)
LONE_TOKENS = (64, 256, 1024, 2048, 4096) * 2  # prompts of the calibration
LONE_ANSWER_TOKENS, LONE_GAP_S = 17, 1.5
SETTINGS = ("profile", "time_scale", "seed", "duration_s", "min_requests", "first", "max_input_tokens", "kv_gbps")
SHOWN = ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99", "tpot_mean", "tpot_p99", "e2e_mean", "throughput")
CAPACITY_REQUESTS = 600
Options = argparse.Namespace
DRAIN_S = 15.0  # of real time, for the last answers


def experiment_of(case: LiveCase, options: Options) -> Experiment:
    slo = cli.slo_of(case.workload)
    return case.experiment(profile=options.profile, slo=slo, kv_gbps=options.kv_gbps, slots=SLOTS)


def excerpt(case: LiveCase, trace: Trace, options: Options) -> Trace:
    """``--duration-s`` of arrivals, or more until there are ``--min-requests``: a P99 of fewer is the slowest one."""
    rate = case.rate_per_s(experiment_of(case, options), cli.part(trace, options.first, CAPACITY_REQUESTS))
    requests = max(2, round(rate * options.duration_s), options.min_requests)
    return cli.part(trace, options.first, requests).at_rate(rate)


def needed_s(trace: Trace, options: Options) -> float:
    """Real time of one case."""
    return trace.span_s * options.time_scale + DRAIN_S


def key_of(options: Options, **what: str) -> dict[str, Any]:
    return what | {name: getattr(options, name) for name in SETTINGS}


# -- live --------------------------------------------------------------------------------------------------------------


def measure_lone(fleet: LiveFleet, policy: str) -> Row:
    """One request after the other, each with a prompt of its own. Raises ServerError."""
    rng, scale, answer = random.Random(fleet.seed), fleet.time_scale, LONE_ANSWER_TOKENS
    prompts = [chain.prompt_of(tokens, answer, rng) for tokens in LONE_TOKENS]
    planned = [Planned(at, at * LONE_GAP_S * scale, prompt, answer) for at, prompt in enumerate(prompts)]
    return {"points": points_of(fleet.send(policy, planned), scale)}


def start_engines(case: LiveCase, options: Options, bench: str = "fidelity") -> AbstractContextManager[LiveFleet]:
    """``bench``: whose logs these are. Entering it raises ServerError."""
    flags = ["--pla-emulate-kv-gbps", f"{options.kv_gbps:g}", *case.launch_flags]
    return running_fleet(f"{bench}-{case.cluster.replace('/', '-')}", flags, options)


def run_cluster(cases: Sequence[LiveCase], traces: Mapping[str, Trace], steps: Steps, options: Options) -> None:
    """What is open of the cases of one cluster, as far as the time goes. Raises ServerError, ConfigError."""
    missing = [case for case in cases if steps.get(key_of(options, case=case.text)) is None]
    excerpts = {case: excerpt(case, traces[case.workload], options) for case in missing}
    if not missing or not steps.has_time(options.start_s + needed_s(excerpts[missing[0]], options)):
        return
    with start_engines(cases[0], options) as fleet:
        lone = key_of(options, lone=cases[0].cluster)
        if steps.get(lone) is None:
            steps.add(lone, measure_lone(fleet, cases[0].policy))
        for case in missing:
            if steps.has_time(needed_s(excerpts[case], options)):
                row = fleet.measure_trace(case.text, case.policy, excerpts[case])
                steps.add(key_of(options, case=case.text), row)


# -- result ------------------------------------------------------------------------------------------------------------


def compare(case: LiveCase, row: Row, lone: Row, trace: Trace, options: Options) -> tuple[Row, fidelity.Points]:
    """Figures of both runs, errors, whether the live run can be trusted; and the points with the simulated times."""
    experiment, points = experiment_of(case, options), row["points"]
    host = fidelity.calibrate_host(experiment, lone["points"], gap_s=row["host_gap_s"])
    source = cli.part(trace, options.first, len(points["row"]))
    points = fidelity.simulate_points(dataclasses.replace(experiment, host=host), points, source)
    known = {name: value for name, value in row.items() if name != "points"} | {"requests": len(points["row"])}
    known |= {"valid": is_valid(row, options.max_overhead), "host": dataclasses.asdict(host)}
    return known | fidelity.compare_points(points, experiment.slo), points


def table(by_case: Mapping[str, Row]) -> report.Cells:
    cells = []
    for case, row in by_case.items():
        errors = [f"{row['errors'][name]:+.1%}" for name in SHOWN]
        live = [f"{row['live']['ttft_mean']:.3f}", f"{row['live']['tpot_p99'] * 1e3:.0f}"]
        limits = [f"{row['host_overhead_share']:.0%}", report.yes_no(row["valid"])]
        cells.append([case, str(row["requests"]), *live, *errors, f"{row['errors']['attainment']:+.3f}", *limits])
    header = ["case", "requests", "live TTFT mean, s", "live TPOT p99, ms", *SHOWN, "attainment", "host", "valid"]
    return header, cells


def sum_up(by_case: Mapping[str, Row]) -> dict[str, float]:
    """A host in the way is an error of the live run; where all runs have one, there is nothing better to show."""
    trusted = [row for row in by_case.values() if row["valid"]] or list(by_case.values())
    return fidelity.summarise_errors([row["errors"] for row in trusted])


def summarise(compared: Mapping[str, tuple[Row, fidelity.Points]], cases: int, options: Options) -> int:
    """Shows and keeps everything. The exit status is 1 where a case is invalid; a missed goal is a finding."""
    by_case = {text: row for text, (row, _) in compared.items()}
    overall = sum_up(by_case)
    result = {"bench": "fidelity", "cases": len(by_case), "cases_open": cases - len(by_case), **overall}
    result |= {"cases_invalid": sum(not row["valid"] for row in by_case.values())}
    result |= {"valid": not result["cases_invalid"], "goals_missed": fidelity.find_missed(overall)}
    result |= key_of(options) | {"by_case": by_case, "environment": report.environment()}
    result["commits"] = sorted({row["plugin_commit"] for row in by_case.values()})
    report.show("The simulator's errors", *table(by_case))
    with panels(options.out / "fidelity.png", 2 * len(by_case), size=(9, 2.4 * len(by_case)), columns=2) as axes:
        for place, (text, (_, points)) in enumerate(compared.items()):
            draw_against_live(axes[2 * place : 2 * place + 2], points, text)
    fidelity.write_points({text: points for text, (_, points) in compared.items()}, options.out / "fidelity.parquet")
    report.emit(result, "fidelity", options.out)
    return 0 if result["valid"] else 1


def draw_against_live(axes: Sequence[Any], points: fidelity.Points, title: str) -> None:
    """Distributions of TTFT and TPOT of a live run and of its simulation, on two axes."""
    for panel, what in zip(axes, ("ttft", "tpot"), strict=True):
        shown: list[float] = []
        for kind, label, style in (("live", "live", "-"), ("sim", "simulated", "--")):
            values = getattr(fidelity.served_of(points, kind), f"{what}_s")()
            known = values[np.isfinite(values)].tolist()
            panel.plot(*ecdf(known), style, label=label)
            shown += known
        panel.set_title(title, fontsize=8)
        panel.set(xscale="log", xlabel=what.upper(), ylabel="share of requests")
        if shown:
            log_seconds(panel.xaxis, min(shown), max(shown))
            panel.tick_params(axis="x", labelsize=8)
        panel.grid(alpha=0.3)


def page(result: Result) -> str:
    errors = [f"{name} {result[f'{name}_error']:.3f} ({result[f'worst_{name}_error']:.3f})" for name in fidelity.GOALS]
    goals = f"Mean absolute errors over the valid cases (worst case): {', '.join(errors)}."
    missed = f"Goals missed: {', '.join(f'`{name}`' for name in result['goals_missed']) or 'none'}."
    where = report.emulated_conditions(result, result["profile"], report.scale_text(result), seed="seed")
    shown = report.keep_columns(table(result["by_case"]), ("case", *fidelity.GOALS, "valid"))
    return "\n\n".join([report.markdown(*shown, right=True), f"{goals} {missed}", where])


PAGES = {"fidelity": page}


def add_live_arguments(parser: argparse.ArgumentParser, *, layouts: str | None, duration_s: float) -> None:
    """Of a bench whose engines serve excerpts of traces."""
    cli.add_trace_arguments(parser, layouts=layouts, time_scale=2.0, timeout_s=600.0)
    parser.set_defaults(profile="h100-llama70b-fp8-dopd", max_input_tokens=8192)
    parser.add_argument("--duration-s", type=float, default=duration_s, help="of arrivals, device time")
    parser.add_argument("--kv-gbps", type=float, default=400.0, help="of the link into a decode instance")
    cli.add_max_overhead(parser, "a case")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_live_arguments(parser, layouts="unified-2,1+1,2+2", duration_s=120.0)
    parser.add_argument("--min-requests", type=int, default=300, help="of a case; it is longer where these need it")
    parser.add_argument("--cases", default=DEFAULT_CASES, help="with commas between")
    parser.add_argument("--grid", action="store_true", help="all cases instead: hours, in several runs (--budget-s)")
    parser.add_argument("--first", type=int, default=0, help="row of the traces to begin with")


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    chosen = list_grid() if options.grid else options.cases.split(",")
    parsed = [LiveCase.parse(text) for text in chosen if text.partition("/")[0] in options.layouts.split(",")]
    cases = {case.text: case for case in parsed}
    traces = cli.read_traces(options.traces, max_input_tokens=options.max_input_tokens)
    steps = Steps(options.out / "fidelity.steps.jsonl", options.budget_s)
    with measuring():
        for cluster in dict.fromkeys(case.cluster for case in cases.values()):
            run_cluster([case for case in cases.values() if case.cluster == cluster], traces, steps, options)
    compared = {}
    for key, row in steps.finished([key_of(options, case=text) for text in cases]):
        case = cases[key["case"]]
        [(_, lone)] = steps.finished([key_of(options, lone=case.cluster)])
        compared[case.text] = compare(case, row, lone, traces[case.workload], options)
    return summarise(compared, len(cases), options)
