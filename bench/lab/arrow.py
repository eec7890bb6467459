"""Live: the highest rate at which four stateless engines keep their targets with arrow and combined, against stock.

    python -m bench arrow --data FOLDER
    python -m bench arrow --data FOLDER --late
    python -m bench arrow --turning

Arms: ``minimal-load`` (a static split), ``arrow`` and ``combined`` on stateless engines; ``stock``, the best arm that
this SGLang can be started as, by the simulator on the same requests (``startable.py``); ``pairs``, stock prefill and
decode engines half and half behind our router with minimal load; ``pairs-sglang``, the same behind SGLang's own.
Engines of the first two are as in section 5.4 of Arrow: decodes first, chunks of 2,048 tokens in the same batch.
``--late``: also the first two with decodes placed when their prefill is done. The simulator names the rate to begin
with; a second one is above it where the first is held, below it where it is missed. A ratio is stated where no arm
below the line can bear more than the best of them: each has missed a rate at most one step above that.

``--turning``: requests with long prompts, then with long answers, then both. ``combined`` against every fixed
configuration of stock's, and against engines like its own behind a router that only balances. A stock arm begins above
the best so far: where it misses that, it cannot be the best, and its own rate is not looked for.

Finished runs are kept in ``--out``; ``--budget-s`` ends a run in time, and the next one goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bench.harness import report
from bench.harness.bench import Result, measuring
from bench.harness.cli import DEFAULT_PROFILE
from bench.harness.steps import Row, Steps
from bench.harness.workload import LONG_ANSWERS, LONG_PROMPTS
from bench.lab import highest_rate
from bench.lab.best_stock_live import load_workload
from bench.lab.fleet_arms import ARROW as ARROW_FLEET
from bench.lab.fleet_arms import CHUNKS_TOKENS, OURS, FleetArm
from bench.lab.highest_rate import (
    PAIRS,
    SETTINGS,
    STATELESS,
    Contest,
    Course,
    LiveArm,
    Options,
    rate_key,
    ratio_of,
    table,
)
from bench.lab.named_workloads import Workload
from bench.lab.startable import choose_startable
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.cluster.spec import ROUTER_MODULES
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Trace

PROFILES = {"azure_conv": "h100-llama70b-fp8-dopd"}  # all others: the default one
TURNING = "turning"
TURNING_SLO = Slo(3.0, 0.03)
LEAST_CHUNK_TOKENS = 512  # of arms that cannot turn: each is run live
RATIOS = ("vs_best_stock", "vs_minload", "arrow_vs_minload")
TURNING_RATIOS = ("turning_vs_best_fixed", "turning_vs_fixed_ours")
MINLOAD, ARROW, COMBINED = "minimal-load", "arrow", "combined"
STOCK, SPLIT, SPLIT_SGLANG = "stock", "pairs", "pairs-sglang"
FIXED_OURS = "temporal"
OUR_ARMS = (LiveArm(ARROW, ARROW_FLEET, STATELESS), LiveArm(COMBINED, OURS, STATELESS))
MINLOAD_ARM = LiveArm(MINLOAD, dataclasses.replace(ARROW_FLEET, policy="minimal-load"), STATELESS)
LATE_ARMS = tuple(dataclasses.replace(arm, name=f"{arm.name}-late", late=True) for arm in (MINLOAD_ARM, OUR_ARMS[0]))
PAIR_ARMS = (
    LiveArm(SPLIT, FleetArm("minimal-load"), PAIRS),
    LiveArm(SPLIT_SGLANG, FleetArm("static-pd-round-robin"), PAIRS, "sglang"),
)


def has_router(arm: LiveArm) -> bool:
    """Tells whether its router is installed."""
    return importlib.util.find_spec(ROUTER_MODULES[arm.router].partition(".")[0]) is not None


def make_turning(requests: int, seed: int) -> Workload:
    """A third of the requests has long prompts, a third long answers, a third either; Poisson arrivals."""
    rng = random.Random(seed)
    at_s, columns = 0.0, []
    for row in range(requests):
        phase = 3 * row // requests
        shape = (LONG_PROMPTS, LONG_ANSWERS, rng.choice((LONG_PROMPTS, LONG_ANSWERS)))[phase]
        at_s += rng.expovariate(1.0)
        columns.append((at_s, *(rng.randint(*bounds) for bounds in shape)))
    arrival_s, prompts, answers = np.array(columns).T
    trace = Trace(TURNING, arrival_s, prompts.astype(np.int64), answers.astype(np.int64))
    return Workload(TURNING, TURNING_SLO, low_per_s=1.0, high_per_s=100.0, steady_per_s=1.0, trace=trace)


def fixed_arms(instances: int) -> list[LiveArm]:
    """What cannot turn: stock's unified engines with each size of chunks, and every split of stock pairs."""
    unified = [
        LiveArm(f"unified-{chunk_tokens}", FleetArm("least-tokens", mixed=True, chunk_tokens=chunk_tokens))
        for chunk_tokens in CHUNKS_TOKENS
        if chunk_tokens >= LEAST_CHUNK_TOKENS
    ]
    splits = [
        LiveArm(f"{prefills}+{instances - prefills}", FleetArm("minimal-load", prefills), PAIRS)
        for prefills in range(1, instances)
    ]
    return [*unified, *splits]


def contests_of(options: Options) -> list[Contest]:
    """Raises ConfigError."""
    if options.turning:
        load = make_turning(options.requests, options.seed)
        of_turning = with_profile(options, TURNING)
        fixed_ours = LiveArm(FIXED_OURS, dataclasses.replace(OURS, policy="least-tokens"))
        arms = [*fixed_arms(options.instances), fixed_ours, OUR_ARMS[1]]
        return [Contest("arrow", arm, load, of_turning) for arm in arms]
    contests = []
    for name in options.workloads.split(","):
        load, of_load = load_workload(name, options), with_profile(options, name)
        stock = LiveArm(STOCK, choose_startable(load, of_load))
        arms = [MINLOAD_ARM, *OUR_ARMS, *(LATE_ARMS if options.late else ())]
        arms += [stock, *(arm for arm in PAIR_ARMS if has_router(arm))]
        contests += [Contest("arrow", arm, load, of_load) for arm in arms]
    return contests


def with_profile(options: Options, workload: str) -> Options:
    profile = options.profile or PROFILES.get(workload, DEFAULT_PROFILE)
    return Options(**{**vars(options), "profile": profile})


def is_stock_fixed(course: Course) -> bool:
    return course.contest.load.name == TURNING and course.contest.arm.name not in (FIXED_OURS, COMBINED)


def may_bear_more(course: Course, courses: Sequence[Course]) -> bool:
    """Tells whether a further run can change a ratio. A fixed arm has to hold more than the best of them so far."""
    search = course.search
    held = [other.search.held for other in courses if is_stock_fixed(other) and other.search.held is not None]
    if not is_stock_fixed(course) or not held:
        return search.wanted is not None
    above_best = max(held) + 1
    if search.wanted is not None and search.wanted < above_best:
        search.ask(above_best)
    return search.failed > above_best


# -- result ------------------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """Rates by arm of one workload, as ``highest_rate.rates_of`` has them."""

    held: Mapping[str, float | None]
    missed: Mapping[str, float | None]
    step: float

    def best_of(self, *arms: str) -> float | None:
        """The highest rate that any of these held; None where one may bear more: it has not missed the next one."""
        known = [arm for arm in arms if arm in self.held]
        best = max((rate for arm in known if (rate := self.held[arm]) is not None), default=None)
        if best is None:
            return None
        limit = best * self.step**1.5  # rates are rungs: the next one is below this, the one after it above
        return best if all((missed := self.missed[arm]) is not None and missed < limit for arm in known) else None


def ratios_of(result: Result) -> Row:
    """By trace, from the rates; ``sim_RATIO``: the same of the rates in the simulator."""
    ratios: Row = {}
    for prefix in ("", "sim_"):
        by_trace: dict[str, Row] = {}
        ratios |= dict.fromkeys(f"{prefix}{key}" for key in TURNING_RATIOS)
        for name, held in result[rate_key(result, f"{prefix}rate")].items():
            missed = dict.fromkeys(held, 0.0) if prefix else result[rate_key(result, "missed")][name]
            known = Known(held, missed, result["step"])
            if name == TURNING:
                stock = [arm for arm in held if arm not in (FIXED_OURS, COMBINED)]
                below = (known.best_of(*stock), known.best_of(FIXED_OURS))
                ratios |= {
                    f"{prefix}{key}": ratio_of(held[COMBINED], of)
                    for key, of in zip(TURNING_RATIOS, below, strict=True)
                }
            else:
                minload, stock_best = known.best_of(MINLOAD), known.best_of(STOCK, SPLIT, SPLIT_SGLANG)
                above_below = ((COMBINED, stock_best), (COMBINED, minload), (ARROW, minload))
                by_trace[name] = {
                    key: ratio_of(held[arm], of) for key, (arm, of) in zip(RATIOS, above_below, strict=True)
                }
        ratios |= {f"{prefix}{key}": {name: of[key] for name, of in by_trace.items()} for key in RATIOS}
    return ratios


def rate_text(held: float | None, missed: float | None) -> str:
    """Such as ``94.2/s``, or ``below 49.6/s`` of an arm that held no rate that it was asked for."""
    return f"below {report.number(missed)}/s" if held is None and missed is not None else f"{report.number(held)}/s"


def page(result: Result) -> str:
    parts = [report.markdown(*table(result), right=range(1, 8))]
    for name, rates in result[rate_key(result, "rate")].items():
        missed = result[rate_key(result, "missed")][name]
        shown = ", ".join(f"`{arm}` {rate_text(rate, missed[arm])}" for arm, rate in rates.items())
        keys = TURNING_RATIOS if name == TURNING else RATIOS
        ratios = []
        for key in keys:
            live, sim = (result[of] if name == TURNING else result[of][name] for of in (key, f"sim_{key}"))
            ratios.append(f"{key} {report.number(live, 'x')} (simulated {report.number(sim, 'x')})")
        parts.append(f"{name}, {result['profiles'][name]}: {shown}; {', '.join(ratios)}; above 1 is better.")
    return "\n\n".join([*parts, highest_rate.conditions(result, f"{result['requests']} requests a run")])


PAGES = {"arrow": page, "arrow_turning": page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    highest_rate.add_arguments(parser, requests=1000, turns=2)
    parser.add_argument("--workloads", default="azure_code,azure_conv", help="names with commas between")
    parser.add_argument("--turning", action="store_true", help="the workload whose mix turns, instead of these")
    parser.add_argument("--late", action="store_true", help="minimal-load and arrow with late placement too")
    parser.set_defaults(profile=None, time_scale=2.0)


def run(options: Options) -> int:
    """Raises ConfigError, ServerError, NoStepError. The exit status is 1 where a run cannot be trusted."""
    if options.requests < 3:
        raise ConfigError(f"--requests {options.requests} is out of range; allowed: at least 3")
    about, steps = report.environment(), Steps(options.out / "arrow.steps.jsonl", options.budget_s)
    contests, courses = contests_of(options), list[Course]()
    with measuring():
        highest_rate.start_courses(contests, courses)
        may_bear = functools.partial(may_bear_more, courses=courses)
        highest_rate.take_turns(courses, steps, options.turns, has_turn=may_bear)
    summed = highest_rate.sum_up(courses)
    result: Row = {"bench": "arrow", **summed, **ratios_of(summed), "environment": about}
    result |= {name: getattr(options, name) for name in SETTINGS if name not in ("profile", "span_s")}
    result["profiles"] = {contest.load.name: contest.options.profile for contest in contests}
    result["arms_open"] = sum(map(may_bear, courses))
    result["arms_left_out"] = [arm.name for arm in PAIR_ARMS if not has_router(arm)]
    report.show(f"requests/s with {options.target:.0%} in target", *table(result))
    name = "arrow_turning" if options.turning else "arrow"
    highest_rate.plot(result, options.out / f"{name}.png")
    report.emit(result, name, options.out)
    return 0 if result["valid"] else 1
