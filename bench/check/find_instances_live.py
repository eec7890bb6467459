"""Does the number that ``simulate find-instances`` names hold? So many live engines keep the target, one fewer do not.

    python -m bench find_instances_live --traces azure_code=FILE azure_conv=FILE mooncake=FILE

A case is FORM@WORKLOAD@RATE or FORM@WORKLOAD@RATE@ROW: a form of find-instances (POLICY[/WORD...]), a trace, requests
per second, and the row of the trace to begin with. find-instances names a number n for ``--duration-s`` of the trace
at this rate; then n engines and n-1 engines behind our router get the same requests. A case is confirmed where both
runs can be trusted, n keep the target and n-1 do not. Finished runs are kept in ``--out``; plans are made anew.

The rates of the default cases were chosen in the simulator alone: the lowest multiple of 0.5/s at which find-instances
names 2 or 3 engines, these are above the target by the largest error of attainment that ``fidelity`` has measured
(0.0073), and one fewer is below it by 0.05, more than the largest that ``fidelity`` allows.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bench.check.fidelity import DRAIN_S, Options, add_live_arguments, start_engines
from bench.check.live_case import ENGINE_FLAGS, LiveCase
from bench.harness import cli, fidelity, report
from bench.harness.bench import Result, measuring
from bench.harness.live_fleet import SLOTS, is_valid
from bench.harness.steps import NoStepError, Row, Steps
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy_packages import find_policy
from pla_sglang.sim.metrics.goodput import goodput
from pla_sglang.sim.planning.forms import ROUTERS, parse_form
from pla_sglang.sim.planning.plan import plan_form
from pla_sglang.sim.planning.result import FleetRow, SizeTried
from pla_sglang.sim.planning.task import PlanTask
from pla_sglang.sim.workload import Trace

DEFAULT_CASES = (
    "round-robin@azure_conv@8.5,least-tokens/mixed@azure_conv@9,least-tokens/temporal@azure_conv@3.5,"
    "cache-aware/split@mooncake@3.5,minimal-load@azure_code@1@4000"
)
SETTINGS = ("profile", "time_scale", "seed", "duration_s", "max_input_tokens", "kv_gbps")
TARGET = 0.99
INSTANCES_MOST = 3
KNEE_TOLERANCE = 0.5  # of the margin, which is of no interest here


@dataclasses.dataclass(frozen=True)
class SizedRun:
    """One live run of a case. ``simulated``: the attainment that find-instances found for it."""

    case: str
    cluster: LiveCase
    trace: Trace
    simulated: float

    @property
    def size(self) -> str:
        """``3``, or ``2+1``."""
        return self.cluster.cluster.partition("/")[0].removeprefix("unified-")

    def key(self, options: Options) -> dict[str, Any]:
        return key_of(options) | {"case": self.case, "size": self.size}


def key_of(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in SETTINGS}


Pair = tuple[SizedRun, SizedRun]  # of a case: the number that is named, and one fewer

# -- what find-instances says ------------------------------------------------------------------------------------------


def plan_case(text: str, traces: Mapping[str, Trace], options: Options) -> Pair:
    """Raises ConfigError for a case that names no number, or one that cannot be started here."""
    form, _, rest = text.partition("@")
    workload, _, numbers = rest.partition("@")
    rate_text, _, first_text = numbers.partition("@")
    try:
        rate_per_s, first = float(rate_text), int(first_text or 0)
    except ValueError:
        raise ConfigError(f"--cases {text!r} is not FORM@WORKLOAD@RATE or FORM@WORKLOAD@RATE@ROW") from None
    if workload not in traces:
        raise ConfigError(f"--cases {text!r} needs --traces {workload}=FILE; given: {', '.join(traces)}")
    trace = cli.part(traces[workload], first, max(2, round(rate_per_s * options.duration_s))).at_rate(rate_per_s)
    engine, row = find_instances(form, trace, workload, options)
    if row.instances is None or row.instances < 2:
        why = row.problem or "one instance is enough, and there is none fewer"
        raise ConfigError(f"--cases {text!r}: {why}; allowed: 2 to {INSTANCES_MOST} instances")

    def make_run(size: SizeTried) -> SizedRun:
        split = None if size.prefills is None else f"{size.prefills}+{size.instances - size.prefills}"
        layout = split or f"unified-{size.instances}"
        return SizedRun(text, live_case(layout, engine, row.policy, workload), trace, size.attainment)

    named, fewer = (
        max((size for size in row.sizes if size.instances == count), key=lambda size: size.attainment)
        for count in (row.instances, row.instances - 1)
    )
    return make_run(named), make_run(fewer)


def find_instances(name: str, trace: Trace, workload: str, options: Options) -> tuple[str, FleetRow]:
    """The engine as ``LiveCase`` names it, and the answer for a form. Raises ConfigError."""
    slo, plain = cli.slo_of(workload), live_case("unified-1", "fcfs", "round-robin", workload)
    settings: dict[str, Any] = {"profile": options.profile, "slo": slo, "kv_gbps": options.kv_gbps, "slots": SLOTS}
    form = parse_form(name, plain.experiment(**settings))
    engine = "mixed" if form.experiment.mixed else form.experiment.engine
    policy = form.experiment.policy
    fixed = find_policy(policy).live and (policy in ROUTERS or form.split)
    if engine not in ENGINE_FLAGS or not fixed:
        allowed = f"engines {', '.join(ENGINE_FLAGS)}; the router's policies that leave roles as they are"
        raise ConfigError(f"--cases {name!r} cannot run live; allowed: {allowed}")
    if form.experiment != live_case("unified-1", engine, policy, workload).experiment(**settings):
        raise ConfigError(f"--cases {name!r}: live engines are as they start; allowed: temporal, mixed, split")
    task = PlanTask(trace.rate_per_s, slo, TARGET, KNEE_TOLERANCE, instances_most=INSTANCES_MOST, beyond_profile=True)
    return engine, plan_form(form, trace, task=task)


def live_case(layout: str, engine: str, policy: str, workload: str) -> LiveCase:
    """At a rate of its own, so its load says nothing."""
    return LiveCase.parse(f"{layout}/{engine}/{policy}/{workload}/1")


# -- live --------------------------------------------------------------------------------------------------------------


def run_alike(runs: Sequence[SizedRun], steps: Steps, options: Options) -> None:
    """What is open of runs that can share engines, as far as the time goes. Raises ServerError, ConfigError."""
    needed_s = options.duration_s * options.time_scale + DRAIN_S
    missing = [run for run in runs if steps.get(run.key(options)) is None]
    if not missing or not steps.has_time(options.start_s + needed_s):
        return
    most = dataclasses.replace(
        missing[0].cluster,
        prefill=max(run.cluster.prefill for run in missing),
        decode=max(run.cluster.decode for run in missing),
    )
    with start_engines(most, options, "find_instances_live") as fleet:
        for run in missing:
            if steps.has_time(needed_s):
                engines = fleet.choose_engines(run.cluster.counts)
                row = engines.measure_trace(f"{run.case}, {run.size}", run.cluster.policy, run.trace)
                steps.add(run.key(options), row)


# -- result ------------------------------------------------------------------------------------------------------------


def describe_run(run: SizedRun, row: Row, options: Options) -> Row:
    """Attainment live and simulated, and whether the live run can be trusted."""
    live = goodput(fidelity.served_of(row["points"], "live"), cli.slo_of(run.cluster.workload))
    figures = {"size": run.size, "simulated": run.simulated, "live": live.attainment, "requests": len(run.trace)}
    kept = {name: row[name] for name in ("rate_rps", "host_overhead_share", "client_lag_p99_ms", "tokens_wrong")}
    return figures | kept | {"valid": is_valid(row, options.max_overhead), "plugin_commit": row["plugin_commit"]}


def judge_case(named: Row, fewer: Row) -> Row:
    valid = named["valid"] and fewer["valid"]
    keeps, misses = named["live"] >= TARGET, fewer["live"] < TARGET
    return {"named": named, "one_fewer": fewer, "valid": valid, "confirmed": valid and keeps and misses}


def sum_up(by_case: Mapping[str, Row]) -> dict[str, int]:
    """No case is left out: an invalid one counts, and is not confirmed."""
    confirmed = sum(row["confirmed"] for row in by_case.values())
    invalid = sum(not row["valid"] for row in by_case.values())
    return {"cases": len(by_case), "confirmed": confirmed, "cases_invalid": invalid}


def table(by_case: Mapping[str, Row]) -> report.Cells:
    cells = []
    for case, row in by_case.items():
        runs = row["named"], row["one_fewer"]
        shares = [text for run in runs for text in (run["size"], f"{run['simulated']:.4f}", f"{run['live']:.4f}")]
        limits = [f"{max(run['host_overhead_share'] for run in runs):.0%}", report.yes_no(row["valid"])]
        cells.append([case, str(runs[0]["requests"]), *shares, *limits, report.yes_no(row["confirmed"])])
    fewer = ["one fewer", "its attainment, simulated", "its attainment, live"]
    header = ["case", "requests", "instances", "simulated", "live", *fewer, "host", "valid", "confirmed"]
    return header, cells


def summarise(pairs: Mapping[str, Pair], steps: Steps, options: Options) -> int:
    """Shows and keeps everything. The exit status is 1 where a case is invalid; one not confirmed is a finding.

    Raises NoStepError where no case has both of its runs.
    """
    by_case: dict[str, Row] = {}
    points: dict[str, fidelity.Points] = {}
    for text, pair in pairs.items():
        rows = [row for run in pair if (row := steps.get(run.key(options))) is not None]
        if len(rows) == len(pair):
            by_case[text] = judge_case(*(describe_run(*both, options) for both in zip(pair, rows, strict=True)))
            points |= {f"{text} {run.size}": row["points"] for run, row in zip(pair, rows, strict=True)}
    if not by_case:
        raise NoStepError("no time was left for both runs of a case")
    result = {"bench": "find_instances_live", **sum_up(by_case), "cases_open": len(pairs) - len(by_case)}
    result |= {"valid": not result["cases_invalid"], "target": TARGET} | key_of(options)
    commits = {run["plugin_commit"] for row in by_case.values() for run in (row["named"], row["one_fewer"])}
    result |= {"by_case": by_case, "commits": sorted(commits), "environment": report.environment()}
    report.show(f"Instances for {TARGET:.0%} in target, named and live", *table(by_case))
    fidelity.write_points(points, options.out / "find_instances_live.parquet")
    report.emit(result, "find_instances_live", options.out)
    return 0 if result["valid"] else 1


def page(result: Result) -> str:
    confirmed = f"{result['confirmed']} of {result['cases']} cases confirmed, {result['cases_invalid']} not valid."
    where = report.emulated_conditions(result, result["profile"], report.scale_text(result), seed="seed")
    header, rows = table(result["by_case"])
    kept = [at for at, name in enumerate(header) if name not in ("requests", "host", "valid")]
    shown = [[row[at] for at in kept] for row in (header, *rows)]
    return "\n\n".join([report.markdown(shown[0], shown[1:], right=True), confirmed, where])


PAGES = {"find_instances_live": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_live_arguments(parser, layouts=None, duration_s=75.0)
    parser.add_argument("--cases", default=DEFAULT_CASES, help="with commas between")


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    traces = cli.read_traces(options.traces, max_input_tokens=options.max_input_tokens)
    pairs = {text: plan_case(text, traces, options) for text in options.cases.split(",")}
    steps = Steps(options.out / "find_instances_live.steps.jsonl", options.budget_s)
    alike: dict[tuple[str, bool], list[SizedRun]] = {}
    for sized in (sized for pair in pairs.values() for sized in pair):
        alike.setdefault((sized.cluster.engine, bool(sized.cluster.decode)), []).append(sized)
    with measuring():
        for runs in alike.values():
            run_alike(runs, steps, options)
    return summarise(pairs, steps, options)
