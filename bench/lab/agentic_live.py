"""Live: recorded agent sessions as closed loops on emulated engines, the best stock arm against ours.

A session sends its next request its think time after the answer before it. Prompts share what the recorded ones share,
and go on with the answers that came (``bench.harness.replay``). Prompts above ``--window-tokens`` are left out, and
counted. Stock is the best of ``STOCK_ARMS`` that this SGLang can be started as, in the simulator on the same sessions.
At each of ``--rates`` the arms take turns with the same sessions. Beside each run stands the simulator's, with closed
loops of its own and what live prefix caches may share: prompts and answers, token by token up to blocks.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import cli, fidelity, report
from bench.harness.arms import has_order
from bench.harness.bench import Result, measuring
from bench.harness.figures import COLOURS, STOCK_COLOUR, draw_bars, panels
from bench.harness.replay import name_prefixes, plan
from bench.harness.steps import NoStepError, Row, Steps
from bench.lab import agent_sessions
from bench.lab.agent_sessions import HIT_ERROR, HIT_RATE, JOB_P50_S, STOCK_ARMS, figures_of, sessions_of
from bench.lab.best_stock import finite
from bench.lab.cells import data_folder
from bench.lab.fleet_arms import INSTANCES, OURS
from bench.lab.highest_rate import SETTINGS, Contest, LiveArm, Options, ratio_of
from bench.lab.named_workloads import Workload
from bench.lab.startable import choose_startable
from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.config import PrefixKnowledge
from pla_sglang.sim.core.engine_knobs import AnswerCaching
from pla_sglang.sim.core.experiment import Experiment, ExperimentResult, run_experiment
from pla_sglang.sim.metrics.goodput import LEAST_SPAN_S, goodput
from pla_sglang.sim.workload import AgenticKnobs, Trace

NAME = "agentic_live"  # of its results
STOCK, OUR = "stock", "ours"
TARGET = 0.95  # as in ``bench agentic``
STEP = 1.05  # rates are rungs of a ladder, as all live ones
BLOCK_TOKENS = 64  # in the simulator; live caches share single tokens
KINDS = ("live", "sim")
WINDOW = ("window_tokens", "think_most_s")


@dataclasses.dataclass(frozen=True)
class SessionContest(Contest):
    """An arm on sessions that are closed loops."""

    def trace_at(self, rung: int) -> Trace:
        """What arrives in ``--live-span-s``; it takes longer, as answers do."""
        return self.load.trace_at(self.ladder.rate_per_s(rung), self.options.span_s)

    def key_of(self, rung: int) -> dict[str, Any]:
        return super().key_of(rung) | {name: getattr(self.options, name) for name in WINDOW}

    def experiment(self) -> Experiment:
        """As engines keep answers, and as a router knows of caches."""
        return dataclasses.replace(
            super().experiment(), answers=AnswerCaching.KEPT, prefix_knowledge=PrefixKnowledge.INDEX
        )

    def simulate(self, rung: int) -> tuple[ExperimentResult, Trace]:
        """With the very prompts that are sent."""
        trace = self.trace_at(rung)
        trace = name_prefixes(trace, plan(trace, seed=self.options.seed), BLOCK_TOKENS)
        return run_experiment(self.experiment(), trace), trace

    def device_s(self, rung: int) -> float:
        return float(np.nanmax(self.simulate(rung)[0].result.served.finish_s))

    def judge(self, row: Row) -> Row:
        """What is shown of a run, with the simulator on the same sessions."""
        run, trace = self.simulate(row["rung"])
        assert trace.session is not None
        session = trace.session[np.array(row["points"]["row"], dtype=np.int64)]
        live = goodput(fidelity.served_of(row["points"], "live"), self.load.slo, session)
        shown = self.show_run(row, {"live": live, "sim": run.figures})
        shown |= {"rate_rps": self.ladder.rate_per_s(row["rung"]), "sessions": len(trace.session_starts())}
        simulated = figures_of(run, trace)
        for kind, of_kind in (("live", live), ("sim", run.figures)):
            shown |= {f"{kind}_ttft_p50_s": of_kind.ttft_p50_s, f"{kind}_{JOB_P50_S}": finite(of_kind.job_p50_s)}
        for figure in (HIT_RATE, HIT_ERROR):
            shown |= {f"live_{figure}": shown.pop(figure, None), f"sim_{figure}": simulated[figure]}
        return shown


def load_sessions(options: Options) -> Workload:
    """With bounds of rates for ``--instances``. Raises ConfigError."""
    knobs = AgenticKnobs(
        window_tokens=options.window_tokens, think_most_s=options.think_most_s, requests_least=options.requests_least
    )
    load = sessions_of(data_folder(options.data), options.seed, knobs)
    share = options.instances / INSTANCES
    return dataclasses.replace(load, low_per_s=load.low_per_s * share, high_per_s=load.high_per_s * share)


def contests_of(load: Workload, options: Options) -> list[SessionContest]:
    arms = [arm for arm in STOCK_ARMS if has_order(arm.order)]
    stock = choose_startable(load, options, arms, contest=SessionContest)
    return [SessionContest(NAME, arm, load, options) for arm in (LiveArm(STOCK, stock), LiveArm(OUR, OURS))]


# -- result ------------------------------------------------------------------------------------------------------------


def sum_up(rows: Sequence[Row], options: Options) -> Row:
    """Raises NoStepError where nothing was measured."""
    if not rows:
        raise NoStepError("no time was left for a single run")
    found: Row = {"sessions": max(row["sessions"] for row in rows)}
    by_side = {
        side: [row for row in rows if row["contest"].endswith(f"/{side}") and row["valid"]] for side in (STOCK, OUR)
    }
    for kind, prefix in zip(KINDS, ("", "sim_"), strict=True):
        attained = f"{kind}_attainment"
        held, missed = (
            {
                side: pick((row["rate_rps"] for row in of if (row[attained] >= TARGET) is holds), default=None)
                for side, of in by_side.items()
            }
            for pick, holds in ((max, True), (min, False))
        )
        closed = options.span_s >= LEAST_SPAN_S and missed[STOCK] is not None
        found |= {
            f"{prefix}rate_at_95": held,
            f"{prefix}vs_best_stock": ratio_of(held[OUR], held[STOCK]) if closed else None,
            f"{prefix}job_time_p50_ratio": job_ratio(by_side, f"{kind}_{JOB_P50_S}"),
        }
        for figure, worst in ((HIT_RATE, min), (HIT_ERROR, max)):
            values = {side: [row[f"{kind}_{figure}"] for row in of] for side, of in by_side.items()}
            found[f"{prefix}{figure}"] = {
                side: worst(of) if of and None not in of else None for side, of in values.items()
            }
    return found | {
        "tokens_wrong": sum(row["tokens_wrong"] for row in rows),
        "valid": all(row["valid"] for row in rows),
        "rows": list(rows),
    }


def job_ratio(by_side: dict[str, list[Row]], figure: str) -> float | None:
    """Ours over stock's at the same rate: the largest. None where one of them has no job time at any."""
    stock, ours = ({row["rate_rps"]: row[figure] for row in by_side[side]} for side in (STOCK, OUR))
    ratios = [ratio for rate in ours if (ratio := ratio_of(ours[rate], stock.get(rate))) is not None]
    return max(ratios, default=None)


def table(result: Result) -> report.Cells:
    """A row a run, device time; pairs are live and simulated."""
    header = ["arm", "requests/s", "in target", "TTFT p50, s", "TTFT p99, s", "median job, s", "hit rate"]
    header += ["predicted hit error", "host", "valid"]
    figures = ("ttft_p50_s", "ttft_p99_s", JOB_P50_S, HIT_RATE, HIT_ERROR)
    rows = [
        [
            row["contest"].rpartition("/")[2],
            report.number(row["rate_rps"]),
            ", ".join(f"{row[f'{kind}_attainment']:.1%}" for kind in KINDS),
            *(", ".join(report.number(row[f"{kind}_{figure}"]) for kind in KINDS) for figure in figures),
            f"{row['host_overhead_share']:.0%}",
            report.yes_no(row["valid"]),
        ]
        for row in result["rows"]
    ]
    return header, rows


def page(result: Result) -> str:
    jobs = [report.number(result[f"{prefix}job_time_p50_ratio"], "x") for prefix in ("", "sim_")]
    requests = max(row["requests"] for row in result["rows"])
    parts = [
        report.markdown(*table(result), right=range(1, 9)),
        "Pairs: live, simulated.",
        f"`{result['best_stock']}` against ours: median job time, ours / stock: {jobs[0]} (simulated {jobs[1]}).",
        f"{result['sessions']} sessions, up to {requests} requests, {result['span_s']:g} s of arrivals.",
    ]
    scale = f"{result['instances']} engines, {report.scale_text(result)}"
    return "\n\n".join([*parts, report.emulated_conditions(result, result["profile"], scale, seed="seed")])


def plot(result: Result, path: Path) -> None:
    """Share in target and median job time, by rate."""
    colours = {f"{STOCK}, live": STOCK_COLOUR, f"{OUR}, live": COLOURS[0]}
    colours |= {f"{side}, simulated": "#cccccc" for side in (STOCK, OUR)}
    panels_of = (("attainment", "share in target"), (JOB_P50_S, "median job time, s"))
    with panels(path, len(panels_of), size=(10.0, 4.0), title="recorded agent sessions, live") as axes:
        for panel, (figure, label) in zip(axes, panels_of, strict=True):
            groups: dict[str, dict[str, float]] = {}
            for row in result["rows"]:
                of = groups.setdefault(f"{report.number(row['rate_rps'])}/s", {})
                side = row["contest"].rpartition("/")[2]
                of |= {
                    f"{side}, {name}": row[f"{kind}_{figure}"] or 0.0
                    for kind, name in zip(KINDS, ("live", "simulated"), strict=True)
                }
            draw_bars(panel, groups, colours=colours)
            panel.set(ylabel=label)


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Of the group of flags in ``bench agentic``, which has ``--data`` and ``--out``."""
    parser.add_argument("--rates", default="1.4", help="requests/s, device time, with commas between")
    parser.add_argument("--live-span-s", type=float, default=120.0, help="of arrivals, device time")
    parser.add_argument("--instances", type=int, default=4, help="engines")
    parser.add_argument("--window-tokens", type=int, default=120_000, help="longer prompts are left out")
    parser.add_argument("--think-most-s", type=float, default=34.0, help="longer think times are cut to this")
    parser.add_argument("--requests-least", type=int, default=5, help="sessions of fewer are left out")
    cli.add_emulated_device(parser, time_scale=2.0)
    parser.add_argument("--seed", type=int, default=1, help="of the starts of sessions, and of tokens")
    cli.add_max_overhead(parser, "a run")
    parser.add_argument("--retry-invalid", action="store_true", help="measure runs again that were not valid")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for one request")
    parser.add_argument("--quick", action="store_true", help="short prompts and thoughts, that only show that it works")
    cli.add_budget(parser)


def read_options(options: Options) -> Options:
    """What a ``Contest`` reads. Raises ConfigError."""
    live = argparse.Namespace(**vars(options))
    live.span_s, live.requests, live.race_span_s = options.live_span_s, None, None
    live.step, live.target, live.kv_gbps = STEP, TARGET, 400.0
    if options.quick:
        live.span_s, live.window_tokens, live.think_most_s, live.requests_least = 10.0, 24_000, 1.0, 2
    require("--live-span-s", live.span_s, 0, above=True)
    require("--instances", live.instances, 1)
    require("--time-scale", live.time_scale, 0, above=True)
    try:
        live.rates = [float(text) for text in options.rates.split(",")]
    except ValueError:
        raise ConfigError(f"--rates {options.rates} are not numbers; allowed: such as 0.5,0.7") from None
    for rate_per_s in live.rates:
        require("--rates", rate_per_s, 0, above=True)
    return live


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, NoStepError. The exit status is 1 where a run cannot be trusted."""
    live = read_options(options)
    about, kept = report.environment(), live.out / f"{NAME}.steps.jsonl"
    if live.fresh:
        kept.unlink(missing_ok=True)
    steps = Steps(kept, live.budget_s)
    load, rows = load_sessions(live), list[Row]()
    contests: list[SessionContest] = []
    with measuring():
        contests += contests_of(load, live)
        for turn, rate_per_s in enumerate(live.rates):
            for contest in contests if turn % 2 == 0 else reversed(contests):
                row = contest.measure(contest.ladder.rung_of(rate_per_s), steps)
                rows += [] if row is None else [row]
    summed = sum_up(rows, live)
    result: Row = {"bench": agent_sessions.NAME, **summed, "best_stock": contests[0].arm.fleet.name}
    result |= {name: getattr(live, name) for name in (*SETTINGS, *WINDOW)} | {"target": TARGET}
    result |= {"prompts_above_window": count_too_long(load.trace), "environment": about}
    report.show("recorded agent sessions, live and simulated", *table(result))
    plot(result, live.out / f"{NAME}.png")
    report.emit(result, NAME, live.out)
    return 0 if result["valid"] else 1


def count_too_long(trace: Trace) -> int:
    """Prompts above the window, of all sessions."""
    return sum(row.reason.startswith("a prompt of more than") for row in trace.skipped)
