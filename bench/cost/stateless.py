"""What do stateless engines cost where no role moves: latency, throughput, start, memory, against stock engines?

    python -m bench stateless

Emulated engines, the same requests to both arms of a comparison, every token checked, ratios within a round, the arms
in turns. Whole: half of ``--engines`` as stateless and half as unified ones, both running all the time, each half
behind round robin of our router, which spreads the requests over both alike. Pairs: ``--engines`` stateless ones behind
minimal load, which leaves half of them the label prefill and half decode, against as many stock prefill and decode ones
behind the same policy; here each arm is started anew in each round.

``ttft_ratio``, ``tpot_ratio``, ``pd_ttft_ratio``, ``pd_tpot_ratio``: stateless over stock, of means, at ``--rate``;
below 1 is better. ``throughput_ratio``: prompt and answer tokens per second at ``--full-rate``, which is more than the
engines can do, stateless over unified; above 1 is better. Medians over rounds; ``spreads`` has the ranges. ``ready_s``:
from the command that starts ``--engines`` stateless engines until they, a router that is started after them, and the
connections of all to all are ready; ``pss_gib``: memory of the engines then. ``valid``: client in time, hosts in the
way for at most ``--max-overhead`` of the time, every token right.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from bench.harness import cli, report
from bench.harness.bench import Result, measuring
from bench.harness.fidelity import served_of
from bench.harness.latency import paired_ratio, spread
from bench.harness.live_fleet import LiveFleet, is_valid, running_fleet
from bench.harness.steps import Row, Steps
from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.cluster.memory import tree_pss_bytes
from pla_sglang.sim.workload import Trace

SETTINGS = ("engines", "requests", "rate", "full_rate", "profile", "time_scale", "seed", "kv_gbps")
PROMPT_TOKENS, ANSWER_TOKENS = (200, 4000), (16, 128)
START_S, DRAIN_S = 60.0, 30.0  # of real time
GIB = float(1 << 30)
STATELESS, UNIFIED, LABELS, PAIRS = "stateless", "unified", "labels", "pairs"
WHOLE_POLICY, SPLIT_POLICY = "round-robin", "minimal-load"
# ratio -> arms above and below the line, load, figure
RATIOS = {
    "ttft_ratio": (STATELESS, UNIFIED, "paced", "ttft_s"),
    "tpot_ratio": (STATELESS, UNIFIED, "paced", "tpot_s"),
    "throughput_ratio": (STATELESS, UNIFIED, "full", "tokens_per_s"),
    "pd_ttft_ratio": (LABELS, PAIRS, "paced", "ttft_s"),
    "pd_tpot_ratio": (LABELS, PAIRS, "paced", "tpot_s"),
}
Options = argparse.Namespace


def counts_of(arm: str, engines: int) -> dict[str, int]:
    """Engines by kind."""
    half = engines // 2
    whole = {STATELESS: {"stateless": half}, UNIFIED: {"unified": half}}
    return (whole | {LABELS: {"stateless": engines}, PAIRS: {"prefill": half, "decode": half}})[arm]


def make_trace(requests: int, rate_per_s: float, seed: int) -> Trace:
    """Prompts and answers of evenly distributed lengths, Poisson arrivals."""
    rng = random.Random(seed)
    prompts, answers = ([rng.randint(*bounds) for _ in range(requests)] for bounds in (PROMPT_TOKENS, ANSWER_TOKENS))
    arrival_s = np.cumsum([rng.expovariate(1.0) for _ in range(requests)])
    return Trace("even", arrival_s, np.array(prompts), np.array(answers)).at_rate(rate_per_s)


def key_of(options: Options, **what: Any) -> Row:
    return what | {name: getattr(options, name) for name in SETTINGS}


# -- live --------------------------------------------------------------------------------------------------------------


def start_engines(name: str, counts: Mapping[str, int], options: Options) -> AbstractContextManager[LiveFleet]:
    """Entering it raises ServerError."""
    flags = [part for kind, count in counts.items() for part in (f"--{kind}", str(count))]
    flags += ["--pla-emulate-kv-gbps", f"{options.kv_gbps:g}"]
    return running_fleet(f"stateless-{name}", flags, options)


def measure_run(fleet: LiveFleet, name: str, policy: str, trace: Trace) -> Row:
    """Raises ServerError."""
    row = fleet.measure_trace(name, policy, trace)
    points = row.pop("points")
    served = served_of(points, "live")
    tokens = sum(points["input_tokens"]) + sum(points["output_tokens"])
    span_s = max(points["live_finish_s"]) - min(points["sent_s"])
    means = {"ttft_s": float(served.ttft_s().mean()), "tpot_s": float(np.nanmean(served.tpot_s()))}
    return row | means | {"tokens_per_s": tokens / span_s, "requests": len(trace)}


def measure_start(fleet: LiveFleet, started_s: float) -> Row:
    """``started_s``: by ``time.monotonic``. Raises ServerError."""
    with fleet.running_router(SPLIT_POLICY):
        ready_s = time.monotonic() - started_s
        return {"ready_s": ready_s, "pss_gib": tree_pss_bytes(fleet.described["pid"]) / GIB}


def in_turns(arms: Sequence[str], number: int) -> Sequence[str]:
    return arms if number % 2 == 0 else arms[::-1]


def run_whole(steps: Steps, options: Options) -> None:
    """Both arms run side by side; only one of them has work at a time. Raises ServerError."""
    loads = {"paced": options.rate, "full": options.full_rate}
    keys = [
        key_of(options, arm=arm, load=load, round=number)
        for number in range(options.rounds)
        for arm in in_turns((STATELESS, UNIFIED), number)
        for load in loads
    ]
    missing = steps.open(keys)
    if not missing or not steps.has_time(START_S + needed_s(options)):
        return
    counts = counts_of(STATELESS, options.engines) | counts_of(UNIFIED, options.engines)
    with start_engines("whole", counts, options) as fleet:
        for key in missing:
            if steps.has_time(needed_s(options)):
                engines = fleet.choose_engines(counts_of(key["arm"], options.engines))
                trace = make_trace(options.requests, loads[key["load"]], options.seed + key["round"])
                steps.add(key, measure_run(engines, f"{key['arm']}, {key['load']}", WHOLE_POLICY, trace))


def run_pairs(steps: Steps, options: Options) -> None:
    """One arm after the other, each on engines of its own. Raises ServerError."""
    for number in range(options.rounds):
        for arm in in_turns((LABELS, PAIRS), number):
            key = key_of(options, arm=arm, load="paced", round=number)
            if steps.get(key) is None and steps.has_time(START_S + needed_s(options)):
                started_s = time.monotonic()
                with start_engines(arm, counts_of(arm, options.engines), options) as fleet:
                    start = measure_start(fleet, started_s) if arm == LABELS else {}
                    trace = make_trace(options.requests, options.rate, options.seed + number)
                    steps.add(key, measure_run(fleet, arm, SPLIT_POLICY, trace) | start)


def run_eight(steps: Steps, options: Options) -> None:
    """Raises ServerError."""
    key = key_of(options, start=8)
    if steps.get(key) is None and steps.has_time(2 * START_S):
        started_s = time.monotonic()
        with start_engines("eight", {"stateless": 8}, options) as fleet:
            steps.add(key, measure_start(fleet, started_s))


def needed_s(options: Options) -> float:
    """Of real time, for a run."""
    return options.requests / options.rate * options.time_scale + DRAIN_S


# -- result ------------------------------------------------------------------------------------------------------------


def compare_rounds(rows: Sequence[Row]) -> Row:
    """The ratios: medians, and ``spreads`` over the rounds that both arms have had. None where there is no such one."""
    known = {(row["arm"], row["load"], row["round"]): row for row in rows}
    spreads = {}
    for name, (above, below, load, figure) in RATIOS.items():
        rounds = [at for arm, of, at in known if (arm, of) == (above, load) and (below, load, at) in known]
        values = [[known[arm, load, at][figure] for at in rounds] for arm in (above, below)]
        if rounds:
            spreads[name] = dataclasses.asdict(paired_ratio(*values))
    medians = {name: spreads[name]["median"] if name in spreads else None for name in RATIOS}
    return {**medians, "spreads": spreads}


def sum_up(steps: Steps, options: Options) -> Row:
    """Raises NoStepError."""
    arms = [(arm, "paced") for arm in (STATELESS, UNIFIED, LABELS, PAIRS)] + [(STATELESS, "full"), (UNIFIED, "full")]
    keys = [key_of(options, arm=arm, load=load, round=at) for arm, load in arms for at in range(options.rounds)]
    rows = [
        {name: key[name] for name in ("arm", "load", "round")} | row | {"valid": is_valid(row, options.max_overhead)}
        for key, row in steps.finished(keys)
    ]
    starts, eight = [row for row in rows if "ready_s" in row], steps.get(key_of(options, start=8)) or {}
    result = compare_rounds(rows)
    for name in ("ready_s", "pss_gib"):
        result[name] = spread([row[name] for row in starts]).median if starts else None
        result[f"{name}_of_8"] = eight.get(name)
    return result | {
        "rows": rows,
        "runs_open": len(keys) - len(rows),
        "tokens_wrong": sum(row["tokens_wrong"] for row in rows),
        "valid": all(row["valid"] for row in rows),
    }


def table(result: Result) -> report.Cells:
    """A row a run, device time."""
    header = ["arm", "load", "round", "requests", "TTFT mean, s", "TPOT mean, ms", "tokens/s", "host", "valid"]
    cells = [
        [
            *(f"{row[name]}" for name in ("arm", "load", "round", "requests")),
            f"{row['ttft_s']:.3f}",
            f"{row['tpot_s'] * 1e3:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['host_overhead_share']:.0%}",
            report.yes_no(row["valid"]),
        ]
        for row in result["rows"]
    ]
    return header, cells


def page(result: Result) -> str:
    shown = [f"`{name}` {report.spread_text(result['spreads'].get(name), 'x')}" for name in RATIOS]
    start = f"{result['engines']} engines: ready with all connections after {report.number(result['ready_s'], 's')}, "
    start += f"{report.number(result['pss_gib'], 'GiB')}."
    if result["ready_s_of_8"] is not None:
        start += f" 8 engines: {report.number(result['ready_s_of_8'], 's')}, "
        start += f"{report.number(result['pss_gib_of_8'], 'GiB')}."
    ratios = f"Stateless over stock, median (lowest .. highest) of {report.describe_rounds(result['rounds'])}: "
    ratios += f"{', '.join(shown)}. Of throughput above 1 is better, of the others below 1."
    return "\n\n".join([ratios, start, report.device_conditions(result)])


PAGES = {"stateless": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", type=int, default=4, help="that run at once; an even number")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=160, help="of a run")
    parser.add_argument("--rate", type=float, default=16.0, help="requests/s of device time that the engines can serve")
    parser.add_argument("--full-rate", type=float, default=120.0, help="requests/s that they cannot serve")
    parser.add_argument("--eight", action="store_true", help="start time and memory of 8 stateless engines too")
    parser.add_argument("--kv-gbps", type=float, default=400.0, help="of the link into an instance")
    cli.add_max_overhead(parser, "a run")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one request")
    cli.add_emulated_device(parser, time_scale=6.0)
    cli.add_output(parser)
    cli.add_budget(parser)
    parser.set_defaults(budget_s=2000.0)


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, NoStepError. The exit status is 1 where a run cannot be trusted."""
    if options.engines < 2 or options.engines % 2:
        raise ConfigError(f"--engines {options.engines} is not allowed; allowed: even numbers from 2 on")
    require("--rounds", options.rounds, 1)
    require("--requests", options.requests, 2)
    require("--rate", options.rate, 0, options.full_rate, above=True)
    steps = Steps(options.out / "stateless.steps.jsonl", options.budget_s)
    with measuring():
        run_whole(steps, options)
        run_pairs(steps, options)
        if options.eight:
            run_eight(steps, options)
    result: Row = {"bench": "stateless", **sum_up(steps, options), "rounds": options.rounds}
    result |= {name: getattr(options, name) for name in SETTINGS} | {"environment": report.environment()}
    report.show("Stateless engines where no role moves", *table(result))
    report.emit(result, "stateless", options.out)
    return 0 if result["valid"] else 1
