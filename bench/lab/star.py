"""Do moves of running requests keep caches from running full on real engines, as STAR says, and as the simulator says?

    python -m bench star

STAR's Table 2 (ShareGPT) with the lengths and the KV cache divided by ``--divide``, Poisson arrivals, four emulated
stateless engines behind our router; the answers' limit is 32,768 divided likewise. Layouts: ``split``, one engine
prefills and three decode, by STAR's policies; ``united``, all do both, by ``combined``. Arms: ``none``, nothing moves;
``current``, moves by the load of now; ``survival``, by what the router learns of lengths from answers that end;
``oracle``, by lengths that the requests state (``--arms``). All arms of a layout get the same requests, in turns; every
token is checked.

``split`` runs at 2 requests/s for 4 engines and ``--divide 8``, at which caches run full and moves still help;
``--rate`` sets another one. The rate of ``united``, and of ``split`` with ``--target-oom``, is searched: the lowest at
which the simulated arm ``none`` throws as many requests out of full caches, or else the one at which it throws most, at
most ``--max-rate``: beyond it all caches are full at a time, and no move can help. Engines keep ``--reserve`` of
SGLang's room for answers that grow: STAR's paper ran vLLM, which keeps none.

By layout and arm, device time: ``p99_tpot_ms``, ``requests``, ``oom`` (requests thrown out of a full cache, as the
engines count them), ``moves`` (carried out, as the router counts them), and with ``sim_`` in front what the simulator
says of the same requests.
``oom_ratio`` and ``p99_tpot_reduction``: each arm against ``none`` of its layout. ``valid``: client in time, hosts in
the way for at most ``--max-overhead`` of the time, every token right.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from bench.check.leftovers import sum_series
from bench.harness import cli, report, servers
from bench.harness.bench import Result, measuring
from bench.harness.fidelity import served_of
from bench.harness.figures import draw_bars, panels
from bench.harness.live_fleet import SLOTS, LiveFleet, is_valid, points_of, running_fleet
from bench.harness.replay import Planned, Record, Replay, count_wrong, plan, require_answers
from bench.harness.steps import Row, Steps
from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles.load import load_profile
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.experiment import Experiment, run_experiment
from pla_sglang.sim.core.host import HostKnobs
from pla_sglang.sim.metrics.goodput import Slo, quantile
from pla_sglang.sim.workload import Arrivals, Trace, generated_trace, length_model
from pla_sglang.testing.server import fetch

SETTINGS = (
    "requests",
    "rate",
    "target_oom",
    "max_rate",
    "divide",
    "reserve",
    "instances",
    "profile",
    "time_scale",
    "kv_gbps",
    "seed",
)
LIMIT_TOKENS = 32_768  # of an answer, before it is divided
RESERVED_TOKENS = 512  # SGLang's --num-reserved-decode-tokens
SLO = Slo(1.0, 0.05)  # device time; of STAR's larger cluster
SPLIT, UNITED = "split", "united"
NONE, CURRENT, SURVIVAL, ORACLE = "none", "current", "survival", "oracle"
ARMS = (NONE, CURRENT, SURVIVAL, ORACLE)
LENGTHS = {NONE: "none", CURRENT: "none", SURVIVAL: "survival", ORACLE: "stated"}  # --lengths of the router
SIM_LENGTHS = LENGTHS | {ORACLE: "oracle"}
RATE_STEP = 1.07  # of a ladder from 1 request/s on, times ``scale_of``
# Of 4 engines with lengths and caches divided by 8. Simulated: at 2/s the split throws 17, 8, 12 and 8 of 500 requests
# out without moves and 4, 0, 0 and 0 with them (seeds 0 to 3); at 2.5/s 21 and 14 (seed 0); united 15 and 10 at 3/s.
SPLIT_RPS, MOST_RPS, TARGET_OOM = 2.0, 3.0, 20
START_S, DRAIN_S = 60.0, 60.0  # of real time
Options = argparse.Namespace


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to serve one layout."""

    layout: str
    moves: str

    @property
    def name(self) -> str:
        return f"{self.layout}/{self.moves}"

    @property
    def policy(self) -> str:
        if self.layout == UNITED:
            return "combined"
        return "star-no-prediction" if self.moves in (NONE, CURRENT) else "star"

    def router_flags(self, time_scale: float) -> list[str]:
        targets_ms = {"ttft": 1e3 * SLO.ttft_s * time_scale, "tpot": 1e3 * SLO.tpot_s * time_scale}
        flags = [part for name, value in targets_ms.items() for part in (f"--slo-{name}-ms", f"{value:g}")]
        return [*flags, "--migration", "off" if self.moves == NONE else "on", "--lengths", LENGTHS[self.moves]]


def make_trace(options: Options, rate_per_s: float, seed: int) -> Trace:
    """Table 2's lengths, divided; the same requests at every rate."""
    lengths = (length_model(f"star_sharegpt_{part}") for part in ("input", "output"))
    trace = generated_trace(options.requests, Arrivals(1.0, random.Random(seed)), *lengths, name="star-sharegpt")
    prompts, answers = (np.maximum(1, column // options.divide) for column in (trace.input_tokens, trace.output_tokens))
    return dataclasses.replace(trace, input_tokens=prompts, output_tokens=answers).at_rate(rate_per_s)


def limit_of(options: Options) -> int:
    """``max_new_tokens``: one token more than the longest answer, so that each ends because the model says so."""
    return LIMIT_TOKENS // options.divide + 1


def capacity_of(options: Options) -> int:
    return load_profile(options.profile).kv_capacity_tokens // options.divide


# -- simulated ---------------------------------------------------------------------------------------------------------


def simulate(arm: Arm, trace: Trace, options: Options) -> Row:
    """The figures of the same fleet in the simulator."""
    least_tokens = arm.layout == SPLIT and arm.moves == NONE  # how STAR's policies place decodes
    experiment = Experiment(
        "least-tokens" if least_tokens else arm.policy,
        SLO,
        profile=options.profile,
        instances=options.instances,
        prefills=1 if arm.layout == SPLIT else None,
        lengths=SIM_LENGTHS[arm.moves],
        move_gain=1.0,
        slots=SLOTS,
        kv_capacity_tokens=capacity_of(options),
        bandwidth_bytes_per_s=options.kv_gbps * 1e9 / 8,
        output_limit_tokens=limit_of(options),
        migrates=arm.moves != NONE,
        host=HostKnobs(overlap=True, room_first=arm.layout == SPLIT),  # else room is awaited after the first token
        limits=EngineKnobs(
            growth_start=min(1.0, options.reserve * EngineKnobs.growth_start),
            growth_least=min(1.0, options.reserve * EngineKnobs.growth_least),
        ),
        report_interval_s=0.02,  # live engines report each change
    )
    result = run_experiment(experiment, trace).result
    counts = {"oom": int(result.counts["retractions"]), "moves": int(result.counts.get("migrations", 0))}
    return {"p99_tpot_ms": 1e3 * quantile(result.served.tpot_s(), 99), **counts}


def scale_of(options: Options) -> float:
    """How much more than 4 engines with lengths divided by 8 a fleet bears: a request's work goes with its lengths."""
    return float(options.instances / 4 * options.divide / 8)


def choose_rate(layout: str, options: Options) -> float:
    """Requests/s; see the module."""
    if options.rate is not None:
        return float(options.rate)
    if layout == SPLIT and options.target_oom is None:
        return SPLIT_RPS * scale_of(options)
    target, most_rps = options.target_oom or TARGET_OOM, options.max_rate * scale_of(options)
    tried: dict[float, int] = {}
    rate = min(scale_of(options), most_rps)
    while rate <= most_rps:
        tried[rate] = simulate(Arm(layout, NONE), make_trace(options, rate, options.seed), options)["oom"]
        if tried[rate] >= target:
            break
        rate *= RATE_STEP
    best = max(tried, key=lambda rate: (min(tried[rate], target), -rate))
    report.say(f"{layout}: {best:.2f} requests/s, at which the simulated {NONE} throws {tried[best]} out")
    return best


# -- live --------------------------------------------------------------------------------------------------------------


class StatedReplay(Replay):
    """Requests that may be as long as any, and say in a header how long they will be, which some arms read."""

    async def send_body(self, record: Record, body: bytes, start_s: float) -> None:
        stated = {"Content-Type": "application/json", "x-answer-tokens": str(record.planned.output_tokens)}
        await self.stream(record, body, start_s, headers=stated)


def replay_stated(url: str, planned: list[Planned], *, timeout_s: float, limit: int) -> list[Record]:
    """``limit``: of each answer, in tokens."""

    def encode(request: Planned, prompt_ids: list[int]) -> bytes:
        sampling = {"temperature": 0, "max_new_tokens": limit}
        return msgspec.json.encode({"input_ids": prompt_ids, "sampling_params": sampling, "stream": True})

    return asyncio.run(StatedReplay(url, timeout_s=timeout_s, body=encode).run(planned))


def set_roles(router_url: str, prefills: int) -> None:
    """The first ``prefills`` engines prefill, all others decode. Raises ServerError."""
    for place, row in enumerate(fetch(f"{router_url}/workers")["workers"]):
        role = "prefill" if place < prefills else "decode"
        fetch(f"{router_url}/workers/{row['number']}/role", {"role": role})


def count_series(page: str, name: str) -> int:
    """The sum over all labels; 0 where the series is not there yet."""
    return round(sum_series(page, name))


def count_oom(fleet: LiveFleet) -> int:
    """Requests that the engines have thrown out of full caches so far."""
    pages = [fetch(f"{engine['url']}/metrics") for engine in fleet.described["instances"]]
    return sum(count_series(page, "sglang:num_retracted_requests_total") for page in pages)


def measure_arm(fleet: LiveFleet, arm: Arm, trace: Trace, options: Options) -> Row:
    """Raises ServerError; KeyboardInterrupt where it was cut short."""
    planned = plan(trace, seed=fleet.seed, time_scale=fleet.time_scale)
    report.say(f"{arm.name}: {len(planned)} requests at {trace.rate_per_s:.2f}/s, {planned[-1].at_s:.0f} s")
    for engine in fleet.described["instances"]:
        servers.flush_cache(engine["url"])
    before, oom = servers.read_devices(fleet.described), count_oom(fleet)
    with fleet.running_router(arm.policy, arm.router_flags(fleet.time_scale)) as url:
        if arm.layout == SPLIT:
            set_roles(url, prefills=1)
        records = replay_stated(url, planned, timeout_s=fleet.timeout_s, limit=limit_of(options))
        require_answers(records)
        page = fetch(f"{url}/metrics")
    row = {"points": points_of(records, fleet.time_scale), "rate_rps": trace.rate_per_s, "requests": len(records)}
    row |= fleet.describe_hosts(before, servers.read_devices(fleet.described), records)
    counts = {"oom": count_oom(fleet) - oom, "moves": count_series(page, "pla_router_migrations_total")}
    counts |= {"moves_failed": count_series(page, "pla_router_migration_failures_total")}
    return row | counts | {"tokens_wrong": sum(map(count_wrong, records))}


def engine_flags(options: Options) -> list[str]:
    """Of ``launch_cluster``."""
    reserved = max(1, round(options.reserve * RESERVED_TOKENS))
    return [
        *("--stateless", str(options.instances), "--enable-metrics"),
        *("--max-total-tokens", str(capacity_of(options))),
        *("--pla-emulate-kv-gbps", f"{options.kv_gbps:g}"),
        *("--schedule-conservativeness", f"{options.reserve:g}", "--num-reserved-decode-tokens", str(reserved)),
    ]


def key_of(options: Options, arm: Arm, number: int) -> Row:
    return {name: getattr(options, name) for name in SETTINGS} | {"arm": arm.name, "round": number}


def arms_of(options: Options) -> list[Arm]:
    """Raises ConfigError."""
    chosen = {"layouts": (options.layouts.split(","), (SPLIT, UNITED)), "arms": (options.arms.split(","), ARMS)}
    for flag, (names, allowed) in chosen.items():
        for name in names:
            if name not in allowed:
                raise ConfigError(f"--{flag} {name!r} is not known; allowed: {', '.join(allowed)}")
    return [Arm(layout, moves) for layout in chosen["layouts"][0] for moves in chosen["arms"][0]]


def run_arms(arms: Sequence[Arm], rates: Mapping[str, float], steps: Steps, options: Options) -> None:
    """What is open, as far as the time goes; each second round in reverse. Raises ServerError."""
    order = [(arm, number) for number in range(options.rounds) for arm in (arms if number % 2 == 0 else arms[::-1])]
    missing = [(arm, number) for arm, number in order if steps.get(key_of(options, arm, number)) is None]
    needed_s = {layout: options.requests / rate * options.time_scale + DRAIN_S for layout, rate in rates.items()}
    if not missing or not steps.has_time(START_S + needed_s[missing[0][0].layout]):
        return
    with running_fleet("star", engine_flags(options), options) as fleet:
        for arm, number in missing:
            if steps.has_time(needed_s[arm.layout]):
                trace = make_trace(options, rates[arm.layout], options.seed + number)
                row = measure_arm(fleet, arm, trace, options)
                simulated = {f"sim_{name}": value for name, value in simulate(arm, trace, options).items()}
                steps.add(key_of(options, arm, number), row | simulated)


# -- result ------------------------------------------------------------------------------------------------------------


def sum_up_arm(rows: Sequence[Row], max_overhead: float) -> Row:
    """The rounds of one arm together; of P99 TPOT their mean."""
    tpots_ms = [1e3 * quantile(served_of(row["points"], "live").tpot_s(), 99) for row in rows]
    summed = ("requests", "oom", "moves", "moves_failed", "tokens_wrong", "sim_oom", "sim_moves")
    return {
        "p99_tpot_ms": float(np.mean(tpots_ms)),
        "sim_p99_tpot_ms": float(np.mean([row["sim_p99_tpot_ms"] for row in rows])),
        **{name: sum(row[name] for row in rows) for name in summed},
        "rounds": len(rows),
        "rate_rps": rows[0]["rate_rps"],
        "host_overhead_share": max(row["host_overhead_share"] for row in rows),
        "client_lag_p99_ms": max(row["client_lag_p99_ms"] for row in rows),
        "commits": sorted({row["plugin_commit"] for row in rows}),
        "valid": all(is_valid(row, max_overhead) for row in rows),
    }


def compare_arms(arms: Mapping[str, Row]) -> Row:
    """By arm, against ``none`` of its layout, live and simulated; None where that has none thrown out."""
    ratios: Row = {f"{prefix}{figure}": {} for prefix in ("", "sim_") for figure in ("oom_ratio", "p99_tpot_reduction")}
    for name, arm in arms.items():
        layout, _, moves = name.partition("/")
        none = arms.get(f"{layout}/{NONE}")
        if none is None or moves == NONE:
            continue
        for prefix in ("", "sim_"):
            oom, tpot = f"{prefix}oom", f"{prefix}p99_tpot_ms"
            ratios[f"{prefix}oom_ratio"][name] = arm[oom] / none[oom] if none[oom] else None
            ratios[f"{prefix}p99_tpot_reduction"][name] = 1 - arm[tpot] / none[tpot]
    return ratios


def table(result: Result) -> report.Cells:
    """A row an arm; times are device time."""
    header = [
        "layout and arm",
        "requests/s",
        "requests",
        "P99 TPOT, ms",
        "simulated",
        "out of a full cache",
        "simulated",
        "moves",
        "simulated",
    ]
    cells = [
        [
            name,
            f"{arm['rate_rps']:.2f}",
            f"{arm['requests']:,}",
            *(report.number(arm[f"{prefix}p99_tpot_ms"]) for prefix in ("", "sim_")),
            *(f"{arm[f'{prefix}{figure}']:,}" for figure in ("oom", "moves") for prefix in ("", "sim_")),
            f"{arm['host_overhead_share']:.0%}",
            report.yes_no(arm["valid"]),
        ]
        for name, arm in result["arms"].items()
    ]
    return [*header, "host", "valid"], cells


def page(result: Result) -> str:
    parts = [report.markdown(*table(result), right=range(1, 11))]
    for name, ratio in result["oom_ratio"].items():
        shown = [report.number(value) for value in (ratio, result["sim_oom_ratio"][name])]
        less = [f"{result[f'{prefix}p99_tpot_reduction'][name]:.0%}" for prefix in ("", "sim_")]
        text = f"`{name}` against `{NONE}`: {shown[0]} of the requests thrown out (simulated {shown[1]}), "
        parts.append(f"{text}P99 TPOT lower by {less[0]} (simulated {less[1]}).")
    where = f"{result['profile']}, lengths and KV cache divided by {result['divide']}, {report.scale_text(result)}"
    return "\n\n".join([*parts, report.emulated_conditions(result, where, seed="seed")])


PAGES = {"star": page}


def plot(result: Result, path: Path) -> None:
    kinds = {"live": "", "simulated": "sim_"}
    labels = {"p99_tpot_ms": "P99 TPOT, ms", "oom": "thrown out of full caches"}
    with panels(path, len(labels), size=(9.0, 3.6)) as axes:
        for panel, (figure, label) in zip(axes, labels.items(), strict=True):
            groups = {
                name: {kind: float(arm[f"{prefix}{figure}"]) for kind, prefix in kinds.items()}
                for name, arm in result["arms"].items()
            }
            draw_bars(panel, groups, rotation=20)
            panel.set(ylabel=label)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=500, help="of a run")
    parser.add_argument("--rounds", type=int, default=1, help="of all arms, each with a seed of its own")
    parser.add_argument("--layouts", default=f"{SPLIT},{UNITED}", help="names with commas between")
    parser.add_argument("--arms", default=f"{NONE},{CURRENT}", help=f"of {', '.join(ARMS)}")
    parser.add_argument(
        "--rate",
        type=float,
        help=f"requests/s, device time; default: {SPLIT} {SPLIT_RPS:g}, {UNITED} as the simulator says",
    )
    parser.add_argument(
        "--target-oom",
        type=int,
        help=f"requests that the simulated arm none is to throw out; default: {TARGET_OOM}, of {UNITED} alone",
    )
    parser.add_argument(
        "--max-rate",
        type=float,
        default=MOST_RPS,
        help="requests/s up to which is searched, for 4 engines and --divide 8",
    )
    parser.add_argument("--divide", type=int, default=8, help="lengths and KV cache by this")
    parser.add_argument("--reserve", type=float, default=0.02, help="share of SGLang's room for answers that grow")
    parser.add_argument("--instances", type=int, default=4, help="engines, at least 3")
    parser.add_argument("--kv-gbps", type=float, default=400.0, help="of the link into an instance")
    cli.add_max_overhead(parser, "a run")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for one request")
    cli.add_quick(parser)
    cli.add_emulated_device(parser, time_scale=2.0)
    cli.add_output(parser)
    cli.add_budget(parser)
    parser.set_defaults(budget_s=2000.0, profile="h100-qwen2.5-14b-tp1")


def check_options(options: Options) -> None:
    """Raises ConfigError."""
    require("--requests", options.requests, 2)
    require("--rounds", options.rounds, 1)
    require("--instances", options.instances, 3)
    require("--divide", options.divide, 1, 1024)
    require("--reserve", options.reserve, 0, 1)
    require("--rate", options.rate, 0, above=True)
    require("--target-oom", options.target_oom, 1)
    require("--max-rate", options.max_rate, 0, above=True)


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, NoStepError. The exit status is 1 where a run cannot be trusted."""
    if options.quick:
        options.requests, options.rate, options.divide, options.layouts = 24, 6.0, 64, SPLIT
    check_options(options)
    arms, steps = arms_of(options), Steps(options.out / "star.steps.jsonl", options.budget_s)
    rates = {layout: choose_rate(layout, options) for layout in dict.fromkeys(arm.layout for arm in arms)}
    with measuring():
        run_arms(arms, rates, steps, options)
    keys = {arm.name: [key_of(options, arm, number) for number in range(options.rounds)] for arm in arms}
    steps.finished([key for of_arm in keys.values() for key in of_arm])
    rows = {name: [row for key in of_arm if (row := steps.get(key)) is not None] for name, of_arm in keys.items()}
    by_arm = {name: sum_up_arm(of_arm, options.max_overhead) for name, of_arm in rows.items() if of_arm}
    result: Row = {"bench": "star", "arms": by_arm, **compare_arms(by_arm)}
    result |= {name: getattr(options, name) for name in SETTINGS} | {"rates": rates}
    result |= {"tokens_wrong": sum(arm["tokens_wrong"] for arm in by_arm.values())}
    result |= {"runs_open": sum(map(len, keys.values())) - sum(map(len, rows.values()))}
    result |= {"valid": all(arm["valid"] for arm in by_arm.values()), "environment": report.environment()}
    report.show("Running requests that move, against full caches", *table(result))
    plot(result, options.out / "star.png")
    report.emit(result, "star", options.out)
    return 0 if result["valid"] else 1
