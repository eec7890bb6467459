"""Where it pays to know what is left of answers: simulated fleets that know nothing, a survival curve, a guess, or all.

    python -m bench length_gains

Requests of STAR's Table 2 (ShareGPT) on 4 instances, with lengths, limits and KV caches divided by ``--divide`` so that
a run is short. Three uses of a length, each over what it may depend on:

* ``moves``: STAR's rescheduler, 1 prefill and 3 decode instances; by occupancy, price of a move, tail of the lengths.
* ``placement``: decodes start where the loads now and to come are least, not the present ones; nothing moves.
* ``both``: moves and placement.
* ``reserve``: admission takes what is predicted of an answer for its limit; 4 engines that do both, nothing moves; by
  the limits that clients send, by occupancy and by tail.

Arms: ``none``; ``survival``, the curve that the router learns while it serves; ``learned``, with a simulated error of
``LEARNED`` times that of the curve on the same lengths; ``exact``. All get the same requests, and are compared seed by
seed: share in target, P99 TPOT, requests that lost their KV cache.

``rates``, with ``--workloads``: what that makes of the rate at which 90 % of a named workload are in target, of our
form of a fleet (``fleet_arms.OURS``) on ``INSTANCES`` instances, by the limits that clients send and by the reserve.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from bench.harness.bench import Result, measuring
from bench.harness.figures import draw_bars, panels
from bench.harness.report import Cells, emit, environment, markdown, progress_bar, show
from bench.lab.cells import data_folder
from bench.lab.fleet_arms import OURS
from bench.lab.halving import Ladder, RungSearch
from bench.lab.lengths import Answers, figures_of
from bench.lab.load_to_come import LeastLoadToCome
from bench.lab.named_workloads import Workload, workload
from bench.lab.papers.seeds import measure_change, student_t
from bench.lab.world import World
from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.client_gain import ClientGain, ClientGainKnobs
from pla_sglang.policy.common.dispatch import least_tokens, split_roles
from pla_sglang.policy.star.horizon import Horizon, HorizonKnobs
from pla_sglang.policy.star.policy import StarKnobs, StarRescheduler
from pla_sglang.profiles import load_profile
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.experiment import length_predictor, run_experiment
from pla_sglang.sim.core.simulation import RunResult
from pla_sglang.sim.metrics.goodput import Slo, goodput, quantile
from pla_sglang.sim.workload import Trace, length_model

PROFILE, INSTANCES, SLO = "h100-qwen2.5-14b-tp1", 4, Slo(1.0, 0.05)
LIMIT_TOKENS = 32_768  # of an answer
CLIP_TOKENS = EngineKnobs.limit_clip_tokens
NONE, SURVIVAL, GUESSED, EXACT = ARMS = ("none", "survival", "learned", "exact")
LEARNED = 0.85  # what an MLP is to have of the curve's error
MOVES, PLACEMENT, BOTH, RESERVE = USES = ("moves", "placement", "both", "reserve")
LITTLE_RESERVE = 0.02  # of SGLang's: STAR's paper ran vLLM, which keeps none
STAR, EVEN, EXPONENTIAL = TAILS = ("Table 2", "even", "exponential")
GENEROUS, CLIPPED, STATED = LIMITS = ("32K, no clip", "clip of 4,096", "exact, no clip")
SHARE = 0.9  # in target, of a rate that is searched
LADDER = Ladder(1.05)
Run = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a use of lengths is measured.

    Attributes:
        rate_per_s: of requests whose lengths are divided by 8.
        link_gb_s: into an instance.
        limits: that clients send, and what admission counts of them.
        full_reserve: admission keeps SGLang's share of limits for moves and placement too; else ``LITTLE_RESERVE`` of
            that.
    """

    use: str
    rate_per_s: float
    tail: str = STAR
    link_gb_s: float = 50.0
    limits: str = CLIPPED
    full_reserve: bool = False

    @property
    def name(self) -> str:
        parts = [self.use, f"{self.rate_per_s:g}/s"]
        parts += [] if self.tail == STAR else [f"{self.tail} lengths"]
        parts += [self.limits] if self.use == RESERVE else []
        parts += ["SGLang's reserve"] if self.full_reserve else []
        parts += [] if self.link_gb_s == Setting.link_gb_s else [f"{self.link_gb_s:g} GB/s"]
        return ", ".join(parts)


SETTINGS = (
    *(Setting(MOVES, rate) for rate in (2.0, 2.5, 3.0)),
    *(Setting(MOVES, 2.5, link_gb_s=link) for link in (5.0, 1.0)),
    *(Setting(MOVES, 2.5, tail) for tail in (EVEN, EXPONENTIAL)),
    Setting(MOVES, 2.5, full_reserve=True),
    *(Setting(PLACEMENT, rate) for rate in (2.0, 2.5)),
    *(Setting(PLACEMENT, 2.5, tail) for tail in (EVEN, EXPONENTIAL)),
    Setting(PLACEMENT, 2.5, full_reserve=True),
    *(Setting(BOTH, rate) for rate in (2.0, 2.5, 3.0)),
    Setting(BOTH, 2.5, full_reserve=True),
    *(Setting(RESERVE, rate, limits=limits) for rate in (3.5, 4.5) for limits in LIMITS),
    *(Setting(RESERVE, 4.5, tail, limits=GENEROUS) for tail in (EVEN, EXPONENTIAL)),
)


# -- requests ----------------------------------------------------------------------------------------------------------


def draw_answers(tail: str, count: int, rng: np.random.Generator, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Undivided, at least 1 and at most ``LIMIT_TOKENS``; all tails have about the mean of Table 2's."""
    mean = 7600.0
    if tail == EVEN:
        drawn = rng.uniform(0.5 * mean, 1.5 * mean, count)
    elif tail == EXPONENTIAL:
        drawn = rng.exponential(mean, count)
    else:
        model, source = length_model("star_sharegpt_output"), random.Random(seed)
        drawn = np.array([model.draw(source) for _ in range(count)], dtype=np.float64)
    return np.clip(drawn, 1, LIMIT_TOKENS).astype(np.int64)


def make_trace(setting: Setting, requests: int, divide: int, seed: int) -> Trace:
    """Poisson arrivals; the same requests for all arms."""
    rng, source = np.random.default_rng(seed), random.Random(seed)
    inputs = length_model("star_sharegpt_input")
    prompts = np.array([inputs.draw(source) for _ in range(requests)], dtype=np.int64)
    answers = draw_answers(setting.tail, requests, rng, seed)
    arrivals_s = np.cumsum(rng.exponential(1.0, requests))
    prompts, answers = (np.maximum(1, column // divide) for column in (prompts, answers))
    return Trace(setting.tail, arrivals_s, prompts, answers).at_rate(setting.rate_per_s * divide / 8)


@functools.cache
def guessed_error(tail: str, divide: int) -> float:
    """``LEARNED`` times the mean absolute error of the survival curve on such lengths."""
    answers = np.maximum(1, draw_answers(tail, 3000, np.random.default_rng(0), 0) // divide)
    told = Answers(np.ones(len(answers), dtype=np.int64), answers, LIMIT_TOKENS / divide)
    return LEARNED * float(figures_of(told, 2000, 20)["mae_survival"])


def lengths_of(arm: str, setting: Setting, divide: int) -> str:
    """As ``Experiment.lengths`` has it."""
    names = {NONE: "none", SURVIVAL: "survival", EXACT: "oracle"}
    return names[arm] if arm in names else f"noisy:{guessed_error(setting.tail, divide):g}"


# -- runs --------------------------------------------------------------------------------------------------------------


def simulate(setting: Setting, arm: str, trace: Trace, divide: int) -> RunResult:
    profile, reserves = load_profile(PROFILE), setting.use == RESERVE
    ahead = setting.use in (PLACEMENT, BOTH) and arm != NONE
    share = 1.0 if reserves or setting.full_reserve else LITTLE_RESERVE
    world = World(
        [
            InstanceSpec(profile, role=role, kv_capacity_tokens=profile.kv_capacity_tokens // divide)
            for role in split_roles(INSTANCES, 0 if reserves else 1)
        ],
        LeastLoadToCome(Horizon(HorizonKnobs())) if ahead else least_tokens(),
        [StarRescheduler(StarKnobs(), ClientGain(ClientGainKnobs(), profile))] if setting.use in (MOVES, BOTH) else [],
        knobs=EngineKnobs(
            growth_start=share * EngineKnobs.growth_start,
            growth_least=share * EngineKnobs.growth_least,
            limit_clip_tokens=CLIP_TOKENS // divide if setting.limits == CLIPPED else LIMIT_TOKENS,
            reserve_by_lengths=reserves,
        ),
        bandwidth_bytes_per_s=setting.link_gb_s * 1e9,
        lengths=length_predictor(lengths_of(arm, setting, divide), 1),
        config={
            "output_limit_tokens": None if setting.limits == STATED else LIMIT_TOKENS // divide + 1,
            "ttft_slo_s": SLO.ttft_s,
            "tpot_slo_s": SLO.tpot_s,
        },
    )
    return world.run(trace)


def measure(setting: Setting, arm: str, seed: int, options: argparse.Namespace) -> Run:
    trace = make_trace(setting, options.requests, options.divide, seed)
    result = simulate(setting, arm, trace, options.divide)
    samples, capacity = result.samples, load_profile(PROFILE).kv_capacity_tokens // options.divide
    loaded = (samples.at_s > trace.arrival_s[-1] / 4) & (samples.at_s <= trace.arrival_s[-1])
    decoding = INSTANCES - (setting.use != RESERVE)
    return {
        "in_target": goodput(result.served, SLO).attainment,
        "p99_tpot_ms": 1e3 * quantile(result.served.tpot_s(), 99),
        "oom": float(result.counts["retractions"]),
        "moves": float(result.counts.get("migrations", 0)),
        "occupancy": float(samples.context_tokens[loaded].sum(axis=1).mean() / (decoding * capacity)),
    }


# -- rates of named workloads ------------------------------------------------------------------------------------------


def arms_of_rates() -> dict[str, tuple[str, str]]:
    """Limits and lengths by name. Exact lengths are left out: they are as good as exact limits."""
    return {f"{limits}, {NONE}": (limits, NONE) for limits in LIMITS} | {
        f"{limits}, {SURVIVAL}": (limits, SURVIVAL) for limits in (GENEROUS, CLIPPED)
    }


def rate_of(load: Workload, limits: str, arm: str, options: argparse.Namespace) -> float | None:
    """The highest rung of ``LADDER`` with ``SHARE`` in target."""
    experiment = dataclasses.replace(
        OURS.experiment(load.slo, load.profile, limit_tokens=None if limits == STATED else LIMIT_TOKENS),
        instances=INSTANCES,
        lengths=arm,
        limits=EngineKnobs(
            limit_clip_tokens=CLIP_TOKENS if limits == CLIPPED else LIMIT_TOKENS, reserve_by_lengths=arm != NONE
        ),
    )
    low, high = (LADDER.rung_of(rate * INSTANCES / 8) for rate in (load.low_per_s, load.high_per_s))
    search = RungSearch(LADDER.rung_of(options.start[load.name]), low, high)
    while search.wanted is not None:
        trace = load.trace_at(LADDER.rate_per_s(search.wanted), options.span_s * load.span_times)
        search.note(run_experiment(experiment, trace).figures.attainment >= SHARE)
    return None if search.held is None else LADDER.rate_per_s(search.held)


# -- figures -----------------------------------------------------------------------------------------------------------


def compare(runs: Mapping[str, Sequence[Run]], arm: str) -> dict[str, Any]:
    """``arm`` against ``none``, seed by seed: points in target and times P99 TPOT, with 95 % intervals."""
    pairs = list(zip(runs[arm], runs[NONE], strict=True))
    points = [100 * (one["in_target"] - none["in_target"]) for one, none in pairs]
    half = student_t(len(points) - 1) * stdev(points) / math.sqrt(len(points)) if len(points) > 1 else math.inf
    tpot = measure_change(*([run["p99_tpot_ms"] for run in runs[name]] for name in (arm, NONE)))
    return {
        "points": fmean(points),
        "half": half,
        "tpot": 1 + tpot.share,
        "tpot_low": 1 + tpot.low,
        "tpot_high": 1 + tpot.high,
    }


def sum_up(setting: Setting, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    means = {arm: {name: fmean(run[name] for run in of_arm) for name in of_arm[0]} for arm, of_arm in runs.items()}
    return {
        **dataclasses.asdict(setting),
        "name": setting.name,
        "arms": means,
        "against_none": {arm: compare(runs, arm) for arm in ARMS[1:]},
    }


def table(result: Mapping[str, Any]) -> Cells:
    """A row a setting: what ``none`` has, and what each arm changes of it."""
    header = ["use, requests/s", "occupied", "in target", *(f"points: {arm}" for arm in ARMS[1:])]
    header += [f"P99 TPOT: {arm}" for arm in ARMS[1:]]
    rows = []
    for one in result["settings"]:
        none, against = one["arms"][NONE], one["against_none"]
        row = [one["name"], f"{none['occupancy']:.0%}", f"{none['in_target']:.3f}"]
        row += [f"{against[arm]['points']:+.1f} ± {against[arm]['half']:.1f}" for arm in ARMS[1:]]
        row += [
            f"{change['tpot']:.2f} ({change['tpot_low']:.2f} to {change['tpot_high']:.2f})"
            for change in (against[arm] for arm in ARMS[1:])
        ]
        rows.append([*row, "/".join(f"{one['arms'][arm]['oom']:.0f}" for arm in ARMS)])
    return [*header, "out of full caches: " + "/".join(ARMS)], rows


def rates_table(result: Mapping[str, Any]) -> Cells:
    """A row a workload: the rate of each arm."""
    names = list(arms_of_rates())
    rows = [
        [name, *("never" if (rate := rates.get(arm)) is None else f"{rate:.2f}" for arm in names)]
        for name, rates in result["rates"].items()
    ]
    return ["requests/s at 90 %", *names], rows


def page(result: Result) -> str:
    """Both tables, those of one use under another."""
    foot = f"Seeds: {result['seeds']}, {result['requests']} requests each, lengths and caches divided by "
    foot += f"{result['divide']}. Commit {result['environment']['plugin_commit']}."
    parts = [markdown(*table(result), right=range(1, 20))]
    if result["rates"]:
        parts.append(markdown(*rates_table(result), right=range(1, 20)))
    return "\n\n".join([*parts, foot])


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Two panels a use: points in target gained, and below them how many requests lose their KV cache."""
    by_use = {use: [one for one in result["settings"] if one["use"] == use] for use in USES}
    by_use = {use: settings for use, settings in by_use.items() if settings}
    columns = len(by_use)
    with panels(path, 2 * columns, size=(4.6 * columns, 8.4), columns=columns) as axes:
        for place, (use, settings) in enumerate(by_use.items()):
            named = {one["name"].removeprefix(f"{use}, "): one for one in settings}
            gained = {
                name: {arm: one["against_none"][arm]["points"] for arm in ARMS[1:]} for name, one in named.items()
            }
            lost = {name: {arm: one["arms"][arm]["oom"] for arm in ARMS} for name, one in named.items()}
            draw_bars(axes[place], gained, rotation=25)
            draw_bars(axes[columns + place], lost, rotation=25)
            axes[place].set(title=use, ylabel="points in target, against none")
            axes[columns + place].set(ylabel="requests that lost their KV cache")


# -- the bench ---------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1000, help="of a run")
    parser.add_argument("--seeds", type=int, default=4, help="from 1")
    parser.add_argument("--divide", type=int, default=8, help="lengths and KV cache by this")
    parser.add_argument("--uses", default=",".join(USES), help="names with commas between")
    parser.add_argument("--workloads", default="", help="whose rates are searched, as NAME:START with commas between")
    parser.add_argument("--span-s", type=float, default=60.0, help="of arrivals, times what its workload needs")
    parser.add_argument("--data", type=Path, help="folder of recorded traces; default: PLA_BENCH_DATA")
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the result")


def check_options(options: argparse.Namespace) -> list[Setting]:
    """The settings of the uses that are wanted. Raises ConfigError."""
    require("--requests", options.requests, 2)
    require("--seeds", options.seeds, 1)
    require("--divide", options.divide, 1, 1024)
    require("--span-s", options.span_s, 0, above=True)
    uses = options.uses.split(",") if options.uses else []
    if other := [use for use in uses if use not in USES]:
        raise ConfigError(f"--uses {other[0]!r} is not known; allowed: {', '.join(USES)}")
    options.start = {}
    for text in options.workloads.split(",") if options.workloads else []:
        name, _, start = text.partition(":")
        try:
            options.start[name] = float(start)
        except ValueError:
            raise ConfigError(f"--workloads {text!r} is not known; allowed: NAME:REQUESTS_PER_S") from None
        require(f"--workloads {name}", options.start[name], 0, above=True)
    return [setting for setting in SETTINGS if setting.use in uses]


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError."""
    settings, about, folder = check_options(options), environment(), data_folder(options.data)
    loads = [workload(name, folder) for name in options.start]
    names = arms_of_rates()
    count = len(settings) * len(ARMS) * options.seeds + len(loads) * len(names)
    found: list[dict[str, Any]] = []
    rates: dict[str, dict[str, float | None]] = {}
    with measuring(), progress_bar("length gains", count) as advance:
        for setting in settings:
            runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
            for seed in range(1, 1 + options.seeds):
                for arm in ARMS:
                    runs[arm].append(measure(setting, arm, seed, options))
                    advance()
            found.append(sum_up(setting, runs))
        for load in loads:
            rates[load.name] = {}
            for name, (limits, arm) in names.items():
                rates[load.name][name] = rate_of(load, limits, arm, options)
                advance()
    result: dict[str, Any] = {"bench": "length_gains", "settings": found, "rates": rates, "learned": LEARNED}
    result |= {name: getattr(options, name) for name in ("seeds", "requests", "divide", "span_s")}
    result |= {"environment": about}
    show("gain of lengths over none", *table(result))
    if rates:
        show("rates of named workloads", *rates_table(result))
    plot(result, options.out / "length_gains.png")
    emit(result, "length_gains", options.out)
    return 0


PAGES = {"length_gains": page}
