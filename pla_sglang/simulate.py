"""``python -m pla_sglang.simulate``: replay a trace through a simulated fleet.

    simulate --trace FILE --policy NAME [--report out.html]         one run
    simulate --trace FILE --compare a,b,c --rates 4,8,16 --jobs 2   a sweep
    simulate find-capacity --trace FILE --compare a,b               the highest rate that keeps the target
    simulate find-instances --trace FILE --rate 30 --target 0.99    the fewest instances that keep it
    simulate --trace RECORDING --policy NAME ...                    what a router's recording would have met with it
    simulate lower-bound --trace FILE --target 0.99                 the fewest GPU hours of any autoscaler

Prints a table. Where stdout is no terminal, or with --json, the last line is one JSON object. Ctrl-C shows the runs
that are finished, and ends with status 130.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import platform
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from pla_sglang.common import cli, terminal
from pla_sglang.common.checks import Choice, Range, check_fields, declared_fields, knob, plain
from pla_sglang.common.console import TableConsole, progress_bar
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.fleet_policy import NO_PLANNER
from pla_sglang.policy_packages import find_policy
from pla_sglang.recording.rows import RecordError
from pla_sglang.sim.core.errors import SimError
from pla_sglang.sim.core.experiment import Experiment, ExperimentResult, run_experiment
from pla_sglang.sim.core.sweep import iterate_capacities, iterate_runs
from pla_sglang.sim.metrics.goodput import Capacity
from pla_sglang.sim.planning.forms import FleetForm, default_forms, parse_forms
from pla_sglang.sim.planning.lower_bound import BoundTask, find_lower_bound
from pla_sglang.sim.planning.lower_bound_table import show_bound
from pla_sglang.sim.planning.plan import check_task, make_plan, plan_forms
from pla_sglang.sim.planning.planned_fleet import PlannedFleet
from pla_sglang.sim.planning.recorded import RecordedRun, is_recording, read_run
from pla_sglang.sim.planning.result import FleetRow
from pla_sglang.sim.planning.table import show_plan
from pla_sglang.sim.planning.task import INSTANCES_MOST, PlanTask
from pla_sglang.sim.planning.what_if import experiment_of, predict_all, replay_recorded
from pla_sglang.sim.planning.what_if_table import as_json, show_what_if
from pla_sglang.sim.report import files
from pla_sglang.sim.report.capacity_page import make_capacity_page
from pla_sglang.sim.report.lower_bound_page import make_lower_bound_page
from pla_sglang.sim.report.page import Page, render_page, require_libraries
from pla_sglang.sim.report.plan_page import make_plan_page
from pla_sglang.sim.report.result_tables import show_capacities, show_runs
from pla_sglang.sim.report.run_page import make_run_page
from pla_sglang.sim.report.what_if_page import make_what_if_page
from pla_sglang.sim.workload import TRACE_KINDS, AgenticKnobs, Arrivals, Trace, load_trace
from pla_sglang.sim.workload.mapped import MAPPING, parse_columns

COMMANDS = {  # each with what it takes instead of flags of another
    "run": "--rates",
    "find-capacity": "--low, --high, --target, --tolerance",
    "find-instances": "--rate, --target, --tolerance, --most",
    "lower-bound": "--rate, --target, --startup-s, --instances-min, --planner",
}
FLAGS_FOR = {  # flags that are not for every command
    "rates": ("run",),
    **dict.fromkeys(("low", "high"), ("find-capacity",)),
    **dict.fromkeys(("most", "beyond-profile", "gpu-hour-price"), ("find-instances",)),
    "rate": ("find-instances", "lower-bound"),
    "policy": ("run", "find-capacity", "find-instances", "lower-bound"),
    **dict.fromkeys(("compare", "jobs"), ("run", "find-capacity", "find-instances")),
    "tolerance": ("find-capacity", "find-instances"),
    **dict.fromkeys(("instances", "prefills", "planner"), ("run", "find-capacity", "lower-bound")),
}
OF_PLANNED = ("policy", "instances", "prefills")  # of ``lower-bound`` only beside --planner
COUNT = Range(1)
RATE = Range(0, unit="requests/s", above=True)
SHARE = Range(0, 1, above=True)
# What cuts a trace, or says how it is read.
NOT_OF_RECORDINGS = frozenset(("window", "head", "sort", "bad-rows", "columns", "trace-kind", "sessions-per-s"))
MOST_REASONS = 10  # each may name the value of one row


@dataclasses.dataclass(frozen=True)
class WorkloadConfig:
    """Which requests of which trace."""

    trace: Path = knob(flag="--trace FILE", help="file, .gz or not", heading="workload")
    trace_kind: str | None = knob(
        None,
        "--trace-kind KIND",
        f"{', '.join(TRACE_KINDS)}; default: found out from the file",
        allowed=Choice(TRACE_KINDS),
    )
    columns: str | None = knob(
        None,
        "--columns MAPPING",
        f"of a CSV file or JSON lines: {MAPPING}; units: s, ms, us, ns, iso; instead of --trace-kind",
    )
    bad_rows: str = knob(
        "refuse", "--bad-rows {refuse,skip}", "rows that cannot be read", allowed=Choice(("refuse", "skip"))
    )
    sort: bool = knob(False, "--sort", "bring rows into order of arrival")
    window: tuple[float, ...] = knob((), "--window START,END", "seconds of the trace")
    head: int | None = knob(None, "--head", "its first requests only", allowed=COUNT)
    sessions_per_s: float = knob(1.0, "--sessions-per-s", "for formats without times", allowed=RATE)
    agentic: AgenticKnobs = dataclasses.field(default_factory=AgenticKnobs)

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.window) not in (0, 2):
            raise ConfigError("--window needs two numbers; allowed: START,END in seconds")
        if self.window and not 0 <= self.window[0] < self.window[1]:
            start_s, end_s = map(plain, self.window)
            raise ConfigError(f"--window {start_s},{end_s} is not allowed; allowed: 0 <= START < END, in seconds")

    def read(self, seed: int) -> Trace:
        """Raises TraceError."""
        if self.columns is not None and self.trace_kind is not None:
            raise ConfigError("--columns and --trace-kind contradict each other: allowed: one of them")
        arrivals = Arrivals(self.sessions_per_s, random.Random(seed))
        bad_rows: Literal["refuse", "skip"] = "skip" if self.bad_rows == "skip" else "refuse"
        trace = load_trace(
            self.trace,
            kind=self.trace_kind,
            columns=None if self.columns is None else parse_columns(self.columns),
            bad_rows=bad_rows,
            sort=self.sort,
            arrivals=arrivals,
            agentic=self.agentic,
        )
        trace = self._cut_window(trace) if self.window else trace
        trace = trace if self.head is None else trace.head(self.head)
        return trace.require_requests()

    def _cut_window(self, trace: Trace) -> Trace:
        """Raises ConfigError for a window without requests."""
        cut = trace.require_requests().window(*self.window)
        if not len(cut):
            start_s, end_s = map(plain, self.window)
            first_s, last_s = (f"{trace.arrival_s[row]:.6g} s" for row in (0, -1))
            span = f"{trace.name} has {len(trace)} requests from {first_s} to {last_s}"
            raise ConfigError(f"--window {start_s},{end_s} is empty; {span}")
        return cut


@dataclasses.dataclass(frozen=True)
class SimulateConfig:
    """The command line: what to run, and where results go."""

    compare: str | None = knob(
        None, "--compare NAMES", "several policies, with commas between; instead of --policy", heading="what to run"
    )
    rates: tuple[float, ...] = knob(
        (), "--rates NUMBERS", "mean rates in requests/s, with commas between; default: as recorded", allowed=RATE
    )
    jobs: int = knob(1, "--jobs", "processes of a sweep", allowed=COUNT)
    rate: float | None = knob(
        None, "--rate", "find-instances, lower-bound: mean rate in requests/s; default: as recorded", allowed=RATE
    )
    target: float = knob(0.9, "--target", "share of requests to keep in target", allowed=SHARE)
    low: float = knob(0.5, "--low", "find-capacity: lowest rate", allowed=RATE)
    high: float = knob(200.0, "--high", "find-capacity: highest rate", allowed=RATE)
    tolerance: float = knob(
        0.02, "--tolerance", "find-capacity, find-instances: relative width to stop at", allowed=SHARE
    )
    most: int = knob(INSTANCES_MOST, "--most", "find-instances: instances to try at most", allowed=COUNT)
    beyond_profile: str = knob(
        "refuse",
        "--beyond-profile {refuse,warn}",
        "find-instances: a load with sizes that the profile was not made from",
        allowed=Choice(("refuse", "warn")),
    )
    gpu_hour_price: float | None = knob(
        None,
        "--gpu-hour-price",
        "find-instances: of one GPU, in any currency; tells what each fleet costs",
        allowed=Range(0, above=True),
    )
    report: Path | None = knob(None, "--report FILE.html", "a page with figures that needs nothing else")
    out: Path | None = knob(None, "--out FOLDER", "summary.json, report.html, parquet per run")
    verbose: bool = knob(False, "--verbose", "also the simulator's own speed")
    json: bool = knob(False, "--json", terminal.JSON_HELP)
    workload: WorkloadConfig = dataclasses.field(kw_only=True)
    experiment: Experiment = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)

    def experiments(self, command: str) -> list[Experiment]:
        """One per policy and rate. Raises ConfigError."""
        if command == "find-capacity" and self.rates:
            raise ConfigError("--rates is for run; find-capacity takes --low, --high, --target, --tolerance")
        names = self.compare.split(",") if self.compare else [self.experiment.policy]
        rates = self.rates or (None,)
        return [dataclasses.replace(self.experiment, policy=name, rate_per_s=rate) for name in names for rate in rates]

    def forms(self, *, policy_named: bool) -> list[FleetForm]:
        """What find-instances compares; without any name ours and stock ones. Raises ConfigError."""
        if self.compare or policy_named:
            return parse_forms((self.compare or self.experiment.policy).split(","), self.experiment)
        return default_forms(self.experiment)

    def plan_task(self, trace: Trace) -> PlanTask:
        """What find-instances is asked for. Raises TraceError for a trace without a rate."""
        trace.at_rate(self.rate or 1.0)  # refuses what has no rate to scale
        return PlanTask(
            self.rate or trace.rate_per_s,
            self.experiment.slo,
            self.target,
            self.tolerance,
            instances_most=self.most,
            beyond_profile=self.beyond_profile == "warn",
            gpu_hour_price=self.gpu_hour_price,
        )


def setting(command: str, config: SimulateConfig, trace: Trace) -> dict[str, Any]:
    """What results state about themselves."""
    flags = {
        cli.key_of(declared.knob.name).replace("-", "_"): cli.typed(value, declared)
        for declared, value in cli.values_of(config)
        if value is not None
    }
    return {
        "seed": config.experiment.seed,
        "workload": {
            "name": trace.name,
            "requests": len(trace),
            "rate_per_s": trace.rate_per_s if math.isfinite(trace.rate_per_s) else None,
            "mean_input_tokens": float(trace.input_tokens.mean()),
            "mean_output_tokens": float(trace.output_tokens.mean()),
            "skipped_rows": len(trace.skipped),
            "skipped_reasons": dict(Counter(row.reason for row in trace.skipped).most_common(MOST_REASONS)),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("pla-sglang", "numpy", "scipy")},
        },
        "flags": {"command": command, **flags},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def run(config: SimulateConfig, trace: Trace, console: Console) -> dict[str, Any]:
    """Runs, writes files, prints the table; returns the last line."""
    work = config.experiments("run")
    by_index: dict[int, ExperimentResult] = {}
    with terminal.end_at_interrupt() as interruption, progress_bar("runs", len(work), console) as show_done:

        def watch(ended: int, requests: int) -> None:
            show_done(len(by_index) + ended / (requests + 1))  # a run counts when its result is here

        seen = watch if console.is_terminal else None
        for index, outcome in iterate_runs(work, trace, jobs=config.jobs, progress=seen):
            by_index[index] = outcome
            show_done(len(by_index))
    if interruption.happened:
        say_interrupted(f"{len(by_index)} of {len(work)} runs done")
    outcomes = [by_index[index] for index in sorted(by_index)]
    summary = {
        **setting("run", config, trace),
        "runs": [files.as_json(outcome) for outcome in outcomes],
        "complete": not interruption.happened,
    }
    if outcomes:
        make_page = functools.partial(make_run_page, outcomes, trace, summary, target=config.target)
        written = list(write_files(config, make_page, summary, outcomes))
        show_runs(outcomes, trace, verbose=config.verbose)
        say_written(written)
    return summary


def say_written(lines: Sequence[str]) -> None:
    print("\n".join(lines), end="\n" if lines else "", flush=True)


def say_interrupted(what_is_done: str) -> None:
    print(f"simulate: interrupted, {what_is_done}", file=sys.stderr, flush=True)


def write_files(
    config: SimulateConfig,
    make_page: Callable[[], Page],
    summary: dict[str, Any],
    outcomes: Sequence[ExperimentResult] = (),
) -> Iterator[str]:
    """Yields a line for each place that was written."""
    if config.report is None and config.out is None:
        return
    html = render_page(make_page())
    if config.report is not None:
        config.report.write_text(html, encoding="utf-8")
        yield f"report: {config.report}"
    if config.out is not None:
        files.write_results(outcomes, summary, config.out)
        (config.out / "report.html").write_text(html, encoding="utf-8")
        yield f"results: {config.out}"


def find(config: SimulateConfig, trace: Trace, console: Console) -> dict[str, Any]:
    """The search for each policy; returns the last line."""
    work = config.experiments("find-capacity")
    search = {
        "low_per_s": config.low,
        "high_per_s": config.high,
        "target": config.target,
        "tolerance": config.tolerance,
    }
    by_index: dict[int, Capacity] = {}
    with terminal.end_at_interrupt() as interruption, progress_bar("policies", len(work), console) as show_done:

        def tell(rate_per_s: float) -> None:
            show_done(len(by_index), f"{rate_per_s:.3g} requests/s")

        for index, capacity in iterate_capacities(work, trace, search, jobs=config.jobs, tell=tell):
            by_index[index] = capacity
            show_done(len(by_index))
    if interruption.happened:
        say_interrupted(f"{len(by_index)} of {len(work)} searches done")
    capacities = {work[index].policy: by_index[index] for index in sorted(by_index)}
    summary = {
        **setting("find-capacity", config, trace),
        "capacity": {policy: dataclasses.asdict(capacity) for policy, capacity in capacities.items()},
        "complete": not interruption.happened,
    }
    if capacities:
        make_page = functools.partial(
            make_capacity_page, capacities, trace, config.experiment, summary, target=config.target
        )
        written = list(write_files(config, make_page, summary))
        show_capacities(capacities, trace, config.experiment, config.target)
        say_written(written)
    return summary


def find_instances(
    config: SimulateConfig, trace: Trace, console: Console, *, forms: Sequence[FleetForm]
) -> dict[str, Any]:
    """The least fleet of each form; returns the last line. Raises ConfigError where none can have an answer."""
    task = config.plan_task(trace)
    rows: list[FleetRow | None] = [None] * len(forms)
    with terminal.end_at_interrupt() as interruption, progress_bar("fleets", len(forms), console) as show_done:

        def tell(what: str) -> None:
            show_done(len(forms) - rows.count(None), what)

        tell("sizes of the load")
        check_task(forms, trace, task)
        for index, row in plan_forms(forms, trace, task, jobs=config.jobs, tell=tell if config.jobs == 1 else None):
            rows[index] = row
            show_done(len(forms) - rows.count(None))
    plan = make_plan(forms, rows, trace=trace, task=task)
    if interruption.happened:
        say_interrupted(f"{len(plan.rows)} of {len(forms)} fleets found")
    summary = {
        **setting("find-instances", config, trace),
        "plan": plan.as_json(),
        "complete": not interruption.happened,
    }
    if plan.rows:
        make_page = functools.partial(make_plan_page, plan, trace, summary)
        written = list(write_files(config, make_page, summary))
        show_plan(plan, TableConsole(120))
        say_written(written)
    return summary


def bound_below(config: SimulateConfig, trace: Trace, console: Console, *, floor: int) -> dict[str, Any]:
    """What any autoscaler pays at least; returns the last line. Raises ConfigError where there is no bound."""
    trace = trace if config.rate is None else trace.at_rate(config.rate)
    task = BoundTask(config.target, config.experiment.startup_s or 0.0, floor)
    planned = None
    with console.status("lower bound") as status:
        bound = find_lower_bound(config.experiment, trace, task, lambda what: status.update(f"lower bound: {what}"))
        if config.experiment.planner != NO_PLANNER:
            status.update(f"planner {config.experiment.planner}")
            planned = PlannedFleet.of(run_experiment(config.experiment, trace))
    beside = {} if planned is None else {"planned": planned.as_json()}
    summary = {**setting("lower-bound", config, trace), **bound.as_json(), **beside, "complete": True}
    make_page = functools.partial(make_lower_bound_page, bound, trace, summary, planned)
    written = list(write_files(config, make_page, summary))
    show_bound(bound, TableConsole(120), planned)
    say_written(written)
    return summary


def read_recording(argv: Sequence[str] | None) -> RecordedRun | None:
    """What ``--trace`` names, if it is a recording. Raises RecordError, TraceError."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    peek.add_argument("--trace", type=Path)
    try:
        path = peek.parse_known_args(argv)[0].trace
    except (argparse.ArgumentError, SystemExit):
        return None  # the parser of all flags says what is wrong
    return read_run(path) if path is not None and is_recording(path) else None


def recorded_flags(recorded: RecordedRun) -> dict[str, str]:
    """The recorded setting, for flags that need a value."""
    setup = recorded.header.setup
    targets = {f"slo-{name}-ms": f"{1e3 * setup.get(f'{name}_slo_s', math.inf):g}" for name in ("ttft", "tpot")}
    return {"policy": recorded.header.policy, "profile": recorded.header.profile, **targets}


def what_if(config: SimulateConfig, recorded: RecordedRun, given: set[str], console: Console) -> dict[str, Any]:
    """The recorded fleet, and the one that the flags in ``given`` make of it; returns the last line.

    Raises ConfigError, RecordError outside of what was recorded.
    """
    base = experiment_of(recorded)
    others = [change_fleet(base, asked, given) for asked in config.experiments("run")]
    with console.status("the recorded fleet") as status:
        known = replay_recorded(recorded, base)
        others = [other for other in others if other != base]
        answers = predict_all(known, others, lambda what: status.update(what))
    what = as_json(known, others, answers)
    summary = {**setting("what-if", config, recorded.trace), "what_if": what, "complete": True}
    make_page = functools.partial(make_what_if_page, known, others, answers, summary)
    written = list(write_files(config, make_page, summary))
    show_what_if(known, others, answers, TableConsole(160))
    say_written(written)
    return summary


def change_fleet(base: Experiment, asked: Experiment, given: set[str]) -> Experiment:
    """``base`` with the flags in ``given`` as ``asked`` has them; stateless where the policy changes roles."""
    names = {cli.key_of(declared.knob.name): declared.field.name for declared in declared_fields(Experiment)}
    changes: dict[str, Any] = {field: getattr(asked, field) for key, field in names.items() if key in given}
    targets = {f"{name}_s": getattr(asked.slo, f"{name}_s") for name in ("ttft", "tpot") if f"slo-{name}-ms" in given}
    changes |= {"policy": asked.policy, "rate_per_s": asked.rate_per_s, "slo": dataclasses.replace(base.slo, **targets)}
    if find_policy(asked.policy).flips and not base.stateless:
        changes |= {"stateless": True, "migrates": True}
    return dataclasses.replace(base, **changes)


def refuse_contradictions(command: str, flags: set[str]) -> None:
    """``flags``: keys of those on the command line; a file may hold all of them. Raises ConfigError."""
    if {"policy", "compare"} <= flags:
        raise ConfigError("--policy and --compare contradict each other: --compare names all policies")
    for key, commands in FLAGS_FOR.items():
        if key in flags and command not in commands:
            raise ConfigError(f"--{key} is for {', '.join(commands)}; {command} takes {COMMANDS[command]}")
        if command == "lower-bound" and key in flags and key in OF_PLANNED and "planner" not in flags:
            raise ConfigError(f"--{key} is for the fleet beside the bound; allowed: with --planner NAME")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 for a bad value, 1 when policies left requests behind, 130 after Ctrl-C."""
    return terminal.run_to_end("simulate", functools.partial(run_command, argv))


def run_command(argv: Sequence[str] | None) -> int:
    console = Console(stderr=True)
    try:
        parser = cli.make_parser(SimulateConfig, "simulate", __doc__)
        parser.add_argument("command", nargs="?", default="run", choices=COMMANDS)
        recorded = read_recording(argv)
        defaults = {"policy": "arrow"} if recorded is None else recorded_flags(recorded)
        parsed = cli.parse(parser, argv, SimulateConfig, defaults=defaults)
        command, config = parsed.options.command, parsed.config
        refuse_contradictions(command, cli.typed_flags(parsed.options))
        terminal.output.as_json = config.json
        given = set(cli.read_settings(parsed.options, SimulateConfig).given)
        if recorded is not None and (refused := given & NOT_OF_RECORDINGS):
            raise ConfigError(f"--{min(refused)} is not for a recording, which is taken as it was served")
        terminal.require_file_path("--report", config.report)
        terminal.require_folder_path("--out", config.out)
        if config.report is not None or config.out is not None:
            require_libraries("--out" if config.report is None else "--report")
        if recorded is not None and command == "run":
            terminal.print_result(what_if(config, recorded, given, console))
            return 0
        with console.status(f"reading {config.workload.trace}"):
            trace = config.workload.read(config.experiment.seed) if recorded is None else recorded.trace
        if command == "lower-bound":
            floor = config.experiment.instances_min if "instances-min" in given else 0
            last = bound_below(config, trace, console, floor=floor)
        elif command == "find-instances":
            policy_named = "policy" in given
            last = find_instances(config, trace, console, forms=config.forms(policy_named=policy_named))
        else:
            last = run(config, trace, console) if command == "run" else find(config, trace, console)
    except (ConfigError, SimError, RecordError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1 if isinstance(error, SimError) and not isinstance(error, ConfigError) else 2
    terminal.print_result(last)
    if not last["complete"]:
        return terminal.EXIT_INTERRUPTED
    return int(any(row["stuck"] for row in last["plan"]["rows"])) if "plan" in last else 0


if __name__ == "__main__":
    sys.exit(main())
