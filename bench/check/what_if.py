"""Does ``simulate --trace RECORDING`` predict what a switch does? It is predicted from one recording, then made live.

    python -m bench what_if --traces azure_conv=FILE

A case is FROM>TO@WORKLOAD@RATE. FROM and TO are LAYOUT/ENGINE/POLICY, or LAYOUT/ENGINE/POLICY/TTFT_MS/TPOT_MS for other
targets than the workload's. Both serve the same requests of a trace live, behind our router, which records them. From
the recording of FROM alone the attainment of TO is predicted, with its interval; the recording of TO says what became
of it. A case is inside where the interval holds that attainment. Percentiles of the latencies are judged beside it, in
``inside_by_figure``. What a recording refuses to answer is not inside. Finished runs are kept in ``--out``; predictions
are made anew in each run.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bench.check.fidelity import DRAIN_S, Options, add_live_arguments, start_engines
from bench.check.find_instances_live import key_of, live_case
from bench.check.live_case import LiveCase
from bench.harness import cli, report
from bench.harness.bench import Result, measuring
from bench.harness.live_fleet import is_valid
from bench.harness.steps import NoStepError, Row, Steps
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.planning.recorded import read_run
from pla_sglang.sim.planning.what_if import FIGURES, experiment_of, figures_of, predict, replay_recorded
from pla_sglang.sim.workload import Trace

ROUND_ROBIN, TOKENS = "unified-3/fcfs/round-robin", "unified-3/fcfs/least-tokens"
TWO, TIGHT = "unified-2/fcfs/least-tokens", "unified-3/fcfs/combined/1000/80"
SPLIT, TURNED, FOUR = (f"{layout}/fcfs/static-pd" for layout in ("2+1", "1+2", "2+2"))
# Three of the policy, one of the targets and the policy, three of the fleet's size, two of the ratio, one of both.
SWITCHES = (
    f"{ROUND_ROBIN}>{TOKENS}@azure_conv@10,{TOKENS}>{ROUND_ROBIN}@azure_conv@10,{TOKENS}>{TIGHT}@azure_conv@10,"
    f"{TIGHT}>{ROUND_ROBIN}@azure_conv@10,{TOKENS}>{TWO}@azure_conv@10,{TWO}>{TOKENS}@azure_conv@10,"
    f"{SPLIT}>{TURNED}@azure_conv@7,{TURNED}>{SPLIT}@azure_conv@7,{SPLIT}>{FOUR}@azure_conv@7,"
    f"{FOUR}>{TURNED}@azure_conv@7"
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One fleet behind one policy. ``slo``: its targets."""

    text: str
    cluster: LiveCase
    slo: Slo

    @classmethod
    def parse(cls, text: str, workload: str) -> Setting:
        """Raises ConfigError."""
        fleet, targets = text.split("/")[:3], text.split("/")[3:]
        slo = cli.slo_of(workload)
        try:
            if targets:
                slo = Slo(*(float(target_ms) / 1e3 for target_ms in targets))
            layout, engine, policy = fleet
            return cls(text, live_case(layout, engine, policy, workload), slo)
        except (TypeError, ValueError):
            raise ConfigError(f"--cases: {text!r} is not LAYOUT/ENGINE/POLICY or that with /TTFT_MS/TPOT_MS") from None


@dataclasses.dataclass(frozen=True)
class Switch:
    """A case: what is recorded, what is predicted from it, and the requests that both serve."""

    text: str
    before: Setting
    after: Setting
    workload: str
    trace: Trace

    def key(self, setting: Setting, options: Options) -> dict[str, Any]:
        rate = round(self.trace.rate_per_s, 6)
        return key_of(options) | {"setting": setting.text, "workload": self.workload, "rate_per_s": rate}


def parse_case(text: str, traces: Mapping[str, Trace], options: Options) -> Switch:
    """Raises ConfigError."""
    settings, _, rest = text.partition("@")
    workload, _, rate_text = rest.partition("@")
    before, arrow, after = settings.partition(">")
    try:
        rate_per_s = float(rate_text)
    except ValueError:
        rate_per_s = 0.0
    if not arrow or not rate_per_s > 0:
        raise ConfigError(f"--cases {text!r} is not FROM>TO@WORKLOAD@RATE")
    if workload not in traces:
        raise ConfigError(f"--cases {text!r} needs --traces {workload}=FILE; given: {', '.join(traces)}")
    count = max(2, round(rate_per_s * options.duration_s))
    trace = cli.part(traces[workload], options.first, count).at_rate(rate_per_s)
    return Switch(text, Setting.parse(before, workload), Setting.parse(after, workload), workload, trace)


# -- live --------------------------------------------------------------------------------------------------------------


def name_recording(setting: Setting, switch: Switch) -> str:
    words = f"{setting.text}-{switch.workload}-{switch.trace.rate_per_s:g}"
    return f"what_if-{words.replace('/', '-')}.jsonl.gz"


def run_alike(switches: Sequence[Switch], steps: Steps, options: Options) -> None:
    """What is open of settings that can share engines, as far as the time goes. Raises ServerError, ConfigError."""
    open_runs: dict[str, tuple[Switch, Setting]] = {}
    for switch in switches:
        for setting in (switch.before, switch.after):
            if steps.get(switch.key(setting, options)) is None:
                open_runs[name_recording(setting, switch)] = switch, setting
    needed_s = options.duration_s * options.time_scale + DRAIN_S
    if not open_runs or not steps.has_time(options.start_s + needed_s):
        return
    clusters = [setting.cluster for _, setting in open_runs.values()]
    most = {name: max(getattr(one, name) for one in clusters) for name in ("prefill", "decode")}
    with start_engines(dataclasses.replace(clusters[0], **most), options, "what_if") as fleet:
        for name, (switch, setting) in open_runs.items():
            if not steps.has_time(needed_s):
                return
            engines = fleet.choose_engines(setting.cluster.counts)
            wall_ms = 1e3 * options.time_scale
            targets = (
                f"--slo-ttft-ms={wall_ms * setting.slo.ttft_s:g}",
                f"--slo-tpot-ms={wall_ms * setting.slo.tpot_s:g}",
            )
            record = f"--record={options.out / name}"
            row = engines.measure_trace(name, setting.cluster.policy, switch.trace, (*targets, record))
            steps.add(switch.key(setting, options), row | {"recording": name})


# -- predicted ---------------------------------------------------------------------------------------------------------


def judge(switch: Switch, rows: tuple[Row, Row], options: Options) -> Row:
    """What was predicted from the first recording, and what the second one says."""
    before, after = (read_run(options.out / row["recording"]) for row in rows)
    cluster, slo = switch.after.cluster, switch.after.slo
    base = experiment_of(before)
    other = dataclasses.replace(
        base,
        policy=cluster.policy,
        instances=cluster.prefill + cluster.decode,
        prefills=cluster.prefill if cluster.decode else None,
        slo=slo,
    )
    known = replay_recorded(before, base)
    live = figures_of(after.served, slo)
    told = {"requests": len(after.trace), "recorded": known.recorded, "replayed": known.replayed, "live": live}
    told |= {"spans": len(known.spans), "confidence": known.confidence}
    told |= {"valid": all(is_valid(row, options.max_overhead) for row in rows)}
    told |= {"host_overhead_share": max(row["host_overhead_share"] for row in rows)}
    told |= {"tokens_wrong": sum(row["tokens_wrong"] for row in rows), "plugin_commit": rows[1]["plugin_commit"]}
    try:
        answer = predict(known, other)
    except ConfigError as error:
        return told | {"refused": str(error), "predicted": None, "inside": dict.fromkeys(FIGURES, False)}
    predicted = {name: dataclasses.asdict(answer[name]) for name in FIGURES}
    return told | {
        "refused": None,
        "predicted": predicted,
        "inside": {name: answer[name].holds(live[name]) for name in FIGURES},
    }


def sum_up(by_case: Mapping[str, Row]) -> dict[str, Any]:
    """No case is left out: one that is invalid, or refused, counts."""
    inside = {name: sum(row["inside"][name] for row in by_case.values()) for name in FIGURES}
    return {
        "cases": len(by_case),
        "inside": inside["attainment"],
        "inside_by_figure": inside,
        "refused": sum(row["refused"] is not None for row in by_case.values()),
        "cases_invalid": sum(not row["valid"] for row in by_case.values()),
    }


def table(by_case: Mapping[str, Row]) -> report.Cells:
    cells = []
    for case, row in by_case.items():
        predicted, live = row["predicted"], row["live"]
        line = [case, str(row["requests"]), f"{row['recorded']['attainment']:.3f}"]
        if predicted is None:
            line += ["refused", f"{live['attainment']:.3f}", *["-"] * 4]
        else:
            line += [_range(predicted["attainment"], 1, "{:.3f}"), f"{live['attainment']:.3f}"]
            for name in ("ttft_p90_s", "tpot_p90_s"):
                line += [_range(predicted[name], 1e3, "{:.0f}"), f"{1e3 * live[name]:.0f}"]
        marks = [
            report.yes_no(row["inside"]["attainment"]),
            f"{row['host_overhead_share']:.0%}",
            report.yes_no(row["valid"]),
        ]
        cells.append([*line, *marks])
    latencies = ["TTFT p90, ms, predicted", "live", "TPOT p90, ms, predicted", "live"]
    header = ["case", "requests", "recorded", "attainment, predicted", "live", *latencies, "inside", "host", "valid"]
    return header, cells


def _range(interval: Mapping[str, float], times: float, form: str) -> str:
    value, low, high = (form.format(times * interval[name]) for name in ("predicted", "low", "high"))
    return f"{value} ({low} to {high})"


def summarise(switches: Sequence[Switch], steps: Steps, options: Options) -> int:
    """Shows and keeps everything. The exit status is 1 where a case is invalid; one not inside is a finding.

    Raises NoStepError where no case has both of its runs.
    """
    by_case: dict[str, Row] = {}
    for switch in switches:
        rows = [steps.get(switch.key(setting, options)) for setting in (switch.before, switch.after)]
        if rows[0] is not None and rows[1] is not None:
            by_case[switch.text] = judge(switch, (rows[0], rows[1]), options)
    if not by_case:
        raise NoStepError("no time was left for both runs of a case")
    result = {"bench": "what_if", **sum_up(by_case), "cases_open": len(switches) - len(by_case)}
    result |= {"valid": not result["cases_invalid"]} | key_of(options)
    result |= {"by_case": by_case, "commits": sorted({row["plugin_commit"] for row in by_case.values()})}
    result |= {"environment": report.environment()}
    report.show("A switch, predicted from a recording, and live", *table(by_case))
    report.emit(result, "what_if", options.out)
    return 0 if result["valid"] else 1


def page(result: Result) -> str:
    counts = f"{result['inside']} of {result['cases']} cases inside, {result['refused']} refused"
    by_figure = ", ".join(f"{name} {count}" for name, count in result["inside_by_figure"].items())
    where = report.emulated_conditions(result, result["profile"], report.scale_text(result), seed="seed")
    header, rows = table(result["by_case"])
    attainment = [0, 3, 4]  # what was predicted of latencies is counted in ``by_figure``
    outside = [row for row in rows if row[-3] != "yes" or row[-1] != "yes"]
    shown = [[row[at] for at in attainment] for row in (header, *outside)]
    parts = [f"{counts}. Inside by figure: {by_figure}."]
    parts += ["Not inside:", report.markdown(shown[0], shown[1:], right=True)] if outside else []
    return "\n\n".join([*parts, where])


PAGES = {"what_if": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_live_arguments(parser, layouts=None, duration_s=22.0)
    parser.add_argument("--cases", default=SWITCHES, help="with commas between")
    parser.add_argument("--first", type=int, default=0, help="row of the traces to begin with")


def run(options: Options) -> int:
    """Raises ConfigError, RecordError, ServerError, NoStepError."""
    traces = cli.read_traces(options.traces, max_input_tokens=options.max_input_tokens)
    switches = [parse_case(text, traces, options) for text in options.cases.split(",")]
    steps = Steps(options.out / "what_if.steps.jsonl", options.budget_s)
    alike: dict[tuple[str, bool], list[Switch]] = {}
    for switch in switches:
        alike.setdefault((switch.before.cluster.engine, bool(switch.before.cluster.decode)), []).append(switch)
    with measuring():
        for group in alike.values():
            run_alike(group, steps, options)
    return summarise(switches, steps, options)
