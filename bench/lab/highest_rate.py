"""The highest rate at which arms of live engines keep their targets: from what the simulator says, up or down a ladder.

Rates are rungs of a ladder. The simulator names the rung to begin with; after one that is held comes a higher one,
after one that is missed a lower one. Every token is checked.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.harness import cli, fidelity, report
from bench.harness.arms import INTERVAL, ORDER
from bench.harness.bench import Result
from bench.harness.figures import COLOURS, STOCK_COLOUR, draw_bars, panels
from bench.harness.live_fleet import SLOTS, LiveFleet, is_valid, running_fleet
from bench.harness.steps import NoStepError, Row, Steps
from bench.lab.fleet_arms import STOCK_ORDER, FleetArm
from bench.lab.halving import Ladder, RungSearch, search_rungs
from bench.lab.named_workloads import Workload
from pla_sglang.sim.core.experiment import TEMPORAL, Experiment, run_experiment
from pla_sglang.sim.core.host import NO_HOST, HostKnobs
from pla_sglang.sim.metrics.goodput import Goodput, goodput
from pla_sglang.sim.workload import Trace

TARGET = 0.9  # share of the requests that are to be in target, by default
SETTINGS = ("profile", "time_scale", "seed", "instances", "span_s", "requests", "step", "kv_gbps")
START_S, DRAIN_S = 60.0, 30.0  # of real time: a cluster, and the last answers
PREFILLED = "prefilled"  # value of --place-decode
UNIFIED, STATELESS, PAIRS = "unified", "stateless", "pairs"
Options = argparse.Namespace


@dataclasses.dataclass(frozen=True)
class LiveArm:
    """Engines and a router.

    Attributes:
        fleet: policy, chunks and order; ``prefills``: of a split that is not in halves.
        kind: of the engines: unified, stateless, or pairs (prefill and decode instances of stock).
        router: ``pla``, or ``sglang`` with its round robin.
        late: decodes are placed when their prefill is done (``--place-decode prefilled``), not at dispatch.
        flags: further ones of the engines, which the simulator knows nothing of.
    """

    name: str
    fleet: FleetArm
    kind: str = UNIFIED
    router: str = "pla"
    late: bool = False
    flags: tuple[str, ...] = ()

    def counts(self, instances: int) -> dict[str, int]:
        """Engines by kind, as ``launch_cluster`` names it."""
        if self.kind != PAIRS:
            return {self.kind: instances}
        prefills = self.fleet.prefills or instances // 2
        return {"prefill": prefills, "decode": instances - prefills}

    @property
    def router_policy(self) -> str:
        return self.fleet.policy if self.router == "pla" else "round-robin"

    def as_json(self) -> dict[str, Any]:
        rest = ({"place_decode": PREFILLED} if self.late else {}) | ({"flags": self.flags} if self.flags else {})
        return self.fleet.as_json() | {"kind": self.kind, "router": self.router} | rest


@dataclasses.dataclass(frozen=True)
class Contest:
    """An arm on a workload: the same fleet as live engines and in the simulator.

    Attributes:
        bench: whose logs these are.
        load: its trace has the answers that are sent.
    """

    bench: str
    arm: LiveArm
    load: Workload
    options: Options

    @property
    def name(self) -> str:
        return f"{self.load.name}/{self.arm.name}"

    @property
    def ladder(self) -> Ladder:
        return Ladder(self.options.step)

    def trace_at(self, rung: int) -> Trace:
        """``--requests`` at this rate, or as many as come in ``--span-s``; live clients send in open loop."""
        rate_per_s, requests = self.ladder.rate_per_s(rung), self.options.requests
        return self.load.trace_at(rate_per_s, requests / rate_per_s if requests else self.options.span_s).as_recorded()

    def key_of(self, rung: int) -> dict[str, Any]:
        settings = {name: getattr(self.options, name) for name in SETTINGS}
        return settings | {"load": self.load.name, "arm": self.arm.as_json(), "rung": rung}

    def experiment(self) -> Experiment:
        """Arms that hand KV cache over place decodes as the router does (docs/reference/simulator.md)."""
        apart = self.arm.kind != UNIFIED
        return dataclasses.replace(
            self.arm.fleet.experiment(self.load.slo),
            profile=self.options.profile,
            instances=self.options.instances,
            slots=SLOTS,
            stateless=self.arm.kind == STATELESS,
            bandwidth_bytes_per_s=self.options.kv_gbps * 1e9 / 8,
            report_interval_s=0.02,  # live engines report each change
            host=HostKnobs(overlap=True, room_first=not self.arm.late) if apart else NO_HOST,
        )

    def target_flags(self, prefix: str) -> list[str]:
        """Both targets, in milliseconds of the wall clock."""
        times = {"ttft": self.load.slo.ttft_s, "tpot": self.load.slo.tpot_s}
        scaled_ms = {name: 1e3 * self.options.time_scale * value_s for name, value_s in times.items()}
        return [part for name, value_ms in scaled_ms.items() for part in (f"{prefix}{name}-ms", f"{value_ms:g}")]

    def engine_flags(self) -> list[str]:
        """Of ``launch_cluster``."""
        fleet, counts = self.arm.fleet, self.arm.counts(self.options.instances)
        flags = [part for kind, count in counts.items() for part in (f"--{kind}", str(count))]
        flags += ["--pla-emulate-kv-gbps", f"{self.options.kv_gbps:g}"]
        flags += ["--chunked-prefill-size", str(fleet.chunk_tokens)]
        flags += [*(["--enable-mixed-chunk"] if fleet.mixed else []), *self.arm.flags]
        flags += [INTERVAL[0], str(fleet.decode_interval)] if fleet.decode_interval else []
        if fleet.order != TEMPORAL:
            return flags if fleet.order == STOCK_ORDER else [*flags, ORDER, fleet.order]
        ours = ["--prefill-disagg", TEMPORAL, "--pla-deadlines", fleet.deadlines]
        return [*flags, *ours, *self.target_flags("--pla-slo-")]

    def search_simulated(self) -> int | None:
        """The highest rung that holds in the simulator."""

        def measure(pairs: Sequence[tuple[str, int]]) -> dict[tuple[str, int], float]:
            experiment = self.experiment()
            return {pair: run_experiment(experiment, self.trace_at(pair[1])).figures.attainment for pair in pairs}

        lowest, failed = (self.ladder.rung_of(rate) for rate in (self.load.low_per_s, self.load.high_per_s))
        starts, target = {self.name: (lowest + failed) // 2}, self.options.target
        return search_rungs(starts, measure, target=target, lowest=lowest, failed=failed)[self.name]

    def running(self) -> AbstractContextManager[LiveFleet]:
        """Entering it raises ServerError."""
        return running_fleet(f"{self.bench}-{self.name.replace('/', '-')}", self.engine_flags(), self.options)

    def measure_live(self, fleet: LiveFleet, rung: int) -> Row:
        """Raises ServerError."""
        flags = self.target_flags("--slo-") if self.arm.router == "pla" else []
        flags += ["--migration", "on", "--place-decode", PREFILLED] if self.arm.late else []
        trace, policy = self.trace_at(rung), self.arm.router_policy
        return fleet.measure_trace(self.name, policy, trace, flags, router=self.arm.router) | {"rung": rung}

    def measure(self, rung: int, steps: Steps) -> Row | None:
        """What is shown of a run at this rate, kept or made now; None where no time is left. Raises ServerError."""
        options, row = self.options, steps.get(self.key_of(rung))
        if row is not None and options.retry_invalid and not is_valid(row, options.max_overhead):
            row = None
        if row is None:
            if not steps.has_time(START_S + self.device_s(rung) * options.time_scale + DRAIN_S):
                return None
            with self.running() as fleet:
                row = self.measure_live(fleet, rung)
            steps.add(self.key_of(rung), row)
        return self.judge(row)

    def device_s(self, rung: int) -> float:
        """How long a run takes, about."""
        return self.trace_at(rung).span_s

    def judge(self, row: Row) -> Row:
        """What is shown of a run, with the simulator on the same requests at the times at which they were sent."""
        points = fidelity.simulate_points(self.experiment(), row["points"], self.trace_at(row["rung"]))
        figures = {kind: goodput(fidelity.served_of(points, kind), self.load.slo) for kind in ("live", "sim")}
        return self.show_run(row, figures)

    def show_run(self, row: Row, figures: Mapping[str, Goodput]) -> Row:
        """``figures``: by ``live`` and ``sim``."""
        shown = {name: value for name, value in row.items() if name != "points"}
        shown |= {"requests": len(row["points"]["row"]), "contest": self.name}
        shown |= {"valid": is_valid(row, self.options.max_overhead)}
        for kind, of_kind in figures.items():
            shown[f"{kind}_attainment"] = of_kind.attainment
            shown |= {f"{kind}_ttft_p99_s": of_kind.ttft_p99_s, f"{kind}_tpot_p99_s": of_kind.tpot_p99_s}
        return shown


@dataclasses.dataclass
class Course:
    """The runs of one contest; ``search`` is where it stands."""

    contest: Contest
    simulated: int | None
    rows: list[Row] = dataclasses.field(default_factory=list)
    spoiled: bool = False  # by a run that is not valid: it says nothing, and --retry-invalid measures it again

    def __post_init__(self) -> None:
        load, ladder = self.contest.load, self.contest.ladder
        start = ladder.rung_of(load.low_per_s) if self.simulated is None else self.simulated
        lowest, failed = ladder.rung_of(load.low_per_s / 4), ladder.rung_of(4 * load.high_per_s)
        self.search = RungSearch(start, lowest, failed)

    def take_turn(self, steps: Steps) -> None:
        """Measures the next rung, if one is wanted and there is time. Raises ServerError."""
        contest, rung = self.contest, self.search.wanted
        if rung is None or self.spoiled:
            return
        row = contest.measure(rung, steps)
        if row is None:
            return
        self.rows.append(row)
        self.spoiled = not self.rows[-1]["valid"]
        if not self.spoiled:
            self.search.note(self.rows[-1]["live_attainment"] >= contest.options.target)

    def rate_of(self, rung: int | None) -> float | None:
        return None if rung is None else self.contest.ladder.rate_per_s(rung)


def start_courses(contests: Sequence[Contest], courses: list[Course]) -> None:
    """Adds to ``courses`` what the simulator says of each; an interruption leaves what there is."""
    for contest in contests:
        courses.append(Course(contest, contest.search_simulated()))
        report.say(f"{contest.name}: simulated {report.number(courses[-1].rate_of(courses[-1].simulated))}/s")


def take_turns(
    courses: Sequence[Course], steps: Steps, turns: int, *, has_turn: Callable[[Course], bool] = lambda course: True
) -> None:
    """The arms one after the other, each second time in reverse. Raises ServerError.

    ``has_turn``: asked before each turn; it may name another rung to that course (``RungSearch.ask``).
    """
    for turn in range(turns):
        for course in courses if turn % 2 == 0 else reversed(courses):
            if has_turn(course):
                course.take_turn(steps)


# -- result ------------------------------------------------------------------------------------------------------------


def ratio_of(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def sum_up(courses: Sequence[Course]) -> Row:
    """Rates by workload and arm. Raises NoStepError where nothing was measured."""
    rows = [row for course in courses for row in course.rows]
    if not rows:
        raise NoStepError("no time was left for a single run")
    simulated: dict[str, dict[str, Any]] = {}
    for course in courses:
        contest = course.contest
        simulated.setdefault(contest.load.name, {})[contest.arm.name] = course.rate_of(course.simulated)
    options = courses[0].contest.options
    found: Row = {"rows": rows, "step": options.step, "target": options.target}
    found[rate_key(found, "sim_rate")] = simulated
    return found | {
        **rates_of(found),
        "arms": {course.contest.name: course.contest.arm.fleet.as_json() for course in courses},
        "commits": sorted({row["plugin_commit"] for row in rows}),
        "tokens_wrong": sum(row["tokens_wrong"] for row in rows),
        "valid": all(row["valid"] for row in rows),
    }


def rate_key(result: Mapping[str, Any], what: str) -> str:
    """``rate_at_90`` for ``rate`` where the target is 0.9."""
    return f"{what}_at_{100 * result['target']:g}"


def rates_of(result: Mapping[str, Any]) -> Row:
    """By workload and arm, from the valid rows.

    ``rate_at_90`` (``rate_key``): the highest rate that was held; ``missed_at_90``: the lowest that was not;
    ``bracketed``: whether the second is one step above the first.
    """
    held_key, missed_key = (rate_key(result, what) for what in ("rate", "missed"))
    rates: Row = {held_key: {}, missed_key: {}, "bracketed": {}}
    for load, arms in result[rate_key(result, "sim_rate")].items():
        for arm in arms:
            rows = [row for row in result["rows"] if row["contest"] == f"{load}/{arm}" and row["valid"]]
            held = max((row["rung"] for row in rows if row["live_attainment"] >= result["target"]), default=None)
            missed = min((row["rung"] for row in rows if row["live_attainment"] < result["target"]), default=None)
            for key, rung in ((held_key, held), (missed_key, missed)):
                rates[key].setdefault(load, {})[arm] = None if rung is None else result["step"] ** rung
            closed = held is not None and missed is not None and missed <= held + 1
            rates["bracketed"].setdefault(load, {})[arm] = closed
    return rates


def figures_again(result: Result, ratios_of: Callable[[Result], Row]) -> Row:
    """Rates and ratios of a kept result, from its rows: those that it has, as older ones do not say what was missed."""
    rates = rates_of(result)
    again = rates | ratios_of({**result, **rates})
    return {key: figure for key, figure in again.items() if key in result}


def table(result: Mapping[str, Any]) -> report.Cells:
    """A row a run, requests/s of device time."""
    header = ["workload and arm", "requests/s", "in target", "simulated", "TTFT p99, s", "TPOT p99, ms"]
    counted = any("flips" in row for row in result["rows"])
    cells = [
        [
            row["contest"],
            report.number(row["rate_rps"]),
            f"{row['live_attainment']:.1%}",
            f"{row['sim_attainment']:.1%}",
            f"{row['live_ttft_p99_s']:.2f}",
            f"{row['live_tpot_p99_s'] * 1e3:.0f}",
            *([report.number(row.get("flips"))] if counted else []),
            f"{row['host_overhead_share']:.0%}",
            report.yes_no(row["valid"]),
        ]
        for row in result["rows"]
    ]
    return [*header, *(["flips"] if counted else []), "host", "valid"], cells


def conditions(result: Result, profile: str) -> str:
    scale = f"{result['instances']} engines, {report.scale_text(result)}"
    return report.emulated_conditions({**result, "arms": {}}, profile, scale, seed="seed")


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Bars by workload: all arms, live, and beside each what the simulator says."""
    live, simulated = (rate_key(result, what) for what in ("rate", "sim_rate"))
    arms = list(dict.fromkeys(arm for of in result[live].values() for arm in of))
    colours = {f"{arm}, simulated": "#cccccc" for arm in arms} | {"stock, live": STOCK_COLOUR}
    colours |= {f"{arm}, live": COLOURS[at % len(COLOURS)] for at, arm in enumerate(arms) if arm != "stock"}
    groups = {
        name: {
            f"{arm}, {kind}": result[key][name][arm] or 0.0
            for arm in of
            for kind, key in (("live", live), ("simulated", simulated))
        }
        for name, of in result[live].items()
    }
    with panels(path, 1, size=(7.0, 4.0)) as (panel,):
        draw_bars(panel, groups, colours=colours)
        panel.set(ylabel=f"requests/s with {result['target']:.0%} in target")


def add_arguments(parser: argparse.ArgumentParser, *, requests: int | None, turns: int) -> None:
    """``requests``: of each run; None: as many as come in ``--span-s``."""
    parser.add_argument("--data", type=Path, help="folder with recorded traces (bench/lab/docs/fleets.md)")
    parser.add_argument("--instances", type=int, default=4, help="engines")
    parser.add_argument("--requests", type=int, default=requests, help="of a run, instead of --span-s")
    parser.add_argument("--span-s", type=float, default=40.0, help="of arrivals, device time")
    parser.add_argument("--race-span-s", type=float, help="the same while stock arms race; default: as a run")
    parser.add_argument("--kv-gbps", type=float, default=400.0, help="of the link into an instance")
    parser.add_argument("--step", type=float, default=1.06, help="from one rate to the next")
    parser.add_argument("--target", type=float, default=TARGET, help="share of the requests that is to be in target")
    parser.add_argument("--turns", type=int, default=turns, help="rates an arm on a workload, at most")
    cli.add_max_overhead(parser, "a run")
    parser.add_argument("--retry-invalid", action="store_true", help="measure runs again that were not valid")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one request")
    cli.add_emulated_device(parser, time_scale=4.0)
    cli.add_output(parser)
    cli.add_budget(parser)
    parser.set_defaults(budget_s=2000.0)
