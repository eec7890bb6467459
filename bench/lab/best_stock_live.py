"""Live: the highest rate at which emulated engines keep their targets, best stock arm against ours, all else equal.

    python -m bench best_stock_live --data FOLDER

Stock: the best arm that this SGLang can be started as, by the simulator on the same requests (``startable.py``):
unified, with each order of prefills that it has; and the same arm with ``--prefill-decode-interval``, where it has
that, as there is a TPOT target (an arm of its own: it does not race in the simulator). Ours: policy
``combined`` before temporal engines whose decodes ride and whose deadlines decide. The simulator names a rung of a
ladder of rates for each arm; the arms take turns, up to ``--turns`` rungs each: up from one that is held, down from one
that is missed. Every token is checked. Finished runs are kept in ``--out``.

``--claim X`` asks less, and takes one run an arm: stock begins at the lowest rate that it misses in the simulator, ours
at X times that. If stock misses and ours holds, ours bears at least X times as much (``vs_best_stock_at_least``).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence

from bench.harness import report
from bench.harness.arms import INTERVAL, find_lacking
from bench.harness.bench import Result, measuring
from bench.harness.steps import Row, Steps
from bench.lab import highest_rate
from bench.lab.cells import data_folder
from bench.lab.fleet_arms import INSTANCES, OURS, read_arm
from bench.lab.highest_rate import SETTINGS, Contest, Course, LiveArm, Options, rate_key, ratio_of, table
from bench.lab.named_workloads import Workload, workload
from bench.lab.startable import choose_startable
from pla_sglang.common.checks import require

ANSWER_TOKENS = {"hol": 100}  # of workloads whose own answers are too short to have decodes beside prefills
STOCK, OUR = "stock", "ours"
PAUSED = "stock-interval"  # stock's arm, with decode steps after each prefill pass


def load_workload(name: str, options: Options) -> Workload:
    """With the answers that are sent, and bounds of rates for ``--instances``. Raises ConfigError."""
    load = workload(name, data_folder(options.data))
    if name in ANSWER_TOKENS:
        trace = dataclasses.replace(load.trace, output_tokens=load.trace.output_tokens * 0 + ANSWER_TOKENS[name])
        load = dataclasses.replace(load, trace=trace)
    share = options.instances / INSTANCES
    return dataclasses.replace(load, low_per_s=load.low_per_s * share, high_per_s=load.high_per_s * share)


def contests_of(options: Options) -> list[Contest]:
    """The arms of each workload. Raises ConfigError."""
    contests: list[Contest] = []
    lacking = find_lacking(INTERVAL)
    if lacking and not options.without_interval:
        report.say_left_out(PAUSED, lacking)
    for name in options.workloads.split(","):
        load = load_workload(name, options)
        stock = choose_startable(load, options)
        sides = [LiveArm(STOCK, stock), LiveArm(OUR, OURS)]
        sides += [] if lacking or options.without_interval else [LiveArm(PAUSED, stock, flags=INTERVAL)]
        contests += [Contest("best_stock_live", side, load, options) for side in sides]
    return contests


def ask_for_claim(courses: Sequence[Course], claim: float) -> None:
    """Each arm of stock begins at the lowest rate that it misses in the simulator, ours at ``claim`` times that."""
    for name in dict.fromkeys(course.contest.load.name for course in courses):
        alike = [course for course in courses if course.contest.load.name == name]
        stock = [course for course in alike if course.contest.arm.name != OUR]
        known = [course.simulated for course in stock if course.simulated is not None]
        if not known:
            continue  # each begins where it would without a claim
        missed = max(known) + 1
        above = math.ceil(math.log(claim) / math.log(alike[0].contest.options.step) - 1e-9)
        for course in alike:
            course.search.ask(missed if course in stock else missed + above)


def ratios_of(result: Result) -> Row:
    """From the rates; stock's is that of its better arm. A ratio is stated where for each arm of stock a rate above its
    own was measured and missed; ours may bear more.

    ``vs_best_stock_at_least``: over what stock missed, held or not what is below it.
    """
    held, missed, simulated = (result[rate_key(result, what)] for what in ("rate", "missed", "sim_rate"))
    closed = result["bracketed"]
    rivals = {name: [side for side in of if side != OUR] for name, of in held.items()}
    stock = {name: max(of[side] or 0.0 for side in rivals[name]) or None for name, of in held.items()}
    known = {name: all(closed[name][side] for side in sides) for name, sides in rivals.items()}
    most = {
        name: None if any(missed[name][side] is None for side in sides) else max(missed[name][side] for side in sides)
        for name, sides in rivals.items()
    }
    return {
        "vs_best_stock_at_least": {name: ratio_of(of[OUR], most[name]) for name, of in held.items()},
        "vs_best_stock": {n: ratio_of(of[OUR], stock[n]) if known[n] else None for n, of in held.items()},
        "sim_vs_best_stock": {name: ratio_of(of[OUR], of[STOCK]) for name, of in simulated.items()},
    }


def sum_up(courses: Sequence[Course]) -> Row:
    """By workload and arm."""
    result = highest_rate.sum_up(courses)
    return result | ratios_of(result)


def page(result: Result) -> str:
    parts = [report.markdown(*table(result), right=range(1, 8))]
    for name, rates in result[rate_key(result, "rate")].items():
        ratios = [report.number(result[key][name], "x") for key in ("vs_best_stock", "sim_vs_best_stock")]
        if result["vs_best_stock"][name] is None and (least := result.get("vs_best_stock_at_least", {}).get(name)):
            ratios[0] = f"at least {report.number(least, 'x')}"
        stock, ours = (report.number(rates[side]) for side in (STOCK, OUR))
        if PAUSED in rates:
            stock += f"/s, with `{' '.join(INTERVAL)}` {report.number(rates[PAUSED])}"
        arm = read_arm(result["arms"][f"{name}/{STOCK}"]).name
        parts.append(f"{name}: `{arm}` {stock}/s, ours {ours}/s: {ratios[0]}; simulated {ratios[1]}.")
    return "\n\n".join([*parts, highest_rate.conditions(result, result["profile"])])


PAGES = {"best_stock_live": page, "best_stock_live_99": page, "best_stock_live_tight": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    highest_rate.add_arguments(parser, requests=None, turns=3)
    parser.add_argument("--workloads", default="azure_code,hol", help="names with commas between")
    parser.add_argument("--without-interval", action="store_true", help=f"leave out {PAUSED}")
    parser.add_argument("--claim", type=float, metavar="X", help="begin where a run of each arm may show X times")


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, NoStepError. The exit status is 1 where a run cannot be trusted."""
    require("--claim", options.claim, 1)
    about, steps = report.environment(), Steps(options.out / "best_stock_live.steps.jsonl", options.budget_s)
    courses: list[Course] = []
    with measuring():
        highest_rate.start_courses(contests_of(options), courses)
        if options.claim is not None:
            ask_for_claim(courses, options.claim)
        highest_rate.take_turns(courses, steps, options.turns)
    result: Row = {"bench": "best_stock_live", **sum_up(courses), "environment": about}
    result |= {name: getattr(options, name) for name in SETTINGS}
    report.show(f"requests/s with {options.target:.0%} in target", *table(result))
    highest_rate.plot(result, options.out / "best_stock_live.png")
    report.emit(result, "best_stock_live", options.out)
    return 0 if result["valid"] else 1
