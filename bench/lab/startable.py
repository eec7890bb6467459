"""The best stock arm that the installed SGLang can be started as, for the very requests that live engines get.

The frontier's winners (``best_stock``) were found for eight instances of one profile. So all unified arms behind the
two routers that win everywhere in the sweep, with each order of prefills that this SGLang has, race in the simulator
over the same requests, engines and targets, rate by rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.harness import report
from bench.harness.arms import ORDER, has_order
from bench.lab.fleet_arms import CHUNKS_TOKENS, ORDERS, FleetArm
from bench.lab.halving import race_arms
from bench.lab.highest_rate import Contest, LiveArm, Options
from bench.lab.named_workloads import Workload
from pla_sglang.sim.core.experiment import run_experiment

ROUTERS = ("least-tokens", "cache-aware")
KEEP, RACE_STEP = 4, 1.25  # arms that are left after a race over shorter runs, and from one rate of it to the next
PILOTS = [FleetArm(ROUTERS[0], mixed=True, chunk_tokens=chunk_tokens) for chunk_tokens in (256, 1024, 4096)]


def startable_arms() -> list[FleetArm]:
    """Orders of prefills that are not there are left out, and said."""
    missing = [order for order in ORDERS if not has_order(order)]
    for order in missing:
        report.say_left_out(order, [f"{ORDER} {order}"])
    return [
        FleetArm(router, mixed=mixed, chunk_tokens=chunk_tokens, order=order)
        for order in ORDERS
        if order not in missing
        for router in ROUTERS
        for mixed in (True, False)
        for chunk_tokens in CHUNKS_TOKENS
    ]


def choose_startable(
    load: Workload, options: Options, arms: Sequence[FleetArm] | None = None, *, contest: type[Contest] = Contest
) -> FleetArm:
    """Of ``arms``, or of all that this SGLang can be started as, the one that bears the highest rate; of those that
    stop at one rate the one with the most requests in target.

    ``contest``: of what kind their runs are. With ``--race-span-s`` all of them race over so many seconds of arrivals,
    and the best ``KEEP`` over a whole run.
    """
    arms = startable_arms() if arms is None else arms
    left = list(arms)
    if options.race_span_s is not None:
        shorter = {"span_s": options.race_span_s, "requests": None, "step": max(options.step, RACE_STEP)}
        short = argparse.Namespace(**vars(options) | shorter)
        left = race(load, short, left, keep=KEEP, contest=contest)[:KEEP]
    best = race(load, options, left, keep=1, contest=contest)[0]
    report.say(f"{load.name}: of {len(arms)} stock arms that can be started the best one simulated is {best.name}")
    return best


def race(
    load: Workload, options: Options, arms: Sequence[FleetArm], *, keep: int, contest: type[Contest]
) -> list[FleetArm]:
    """Best first, from the rate that the best of the ``PILOTS`` bears, or where there is none the first arm."""

    def contest_of(arm: FleetArm) -> Contest:
        return contest("startable", LiveArm(arm.name, arm), load, options)

    def measure(pairs: Sequence[tuple[FleetArm, int]]) -> dict[tuple[FleetArm, int], float]:
        traces = {rung: contest_of(arm).trace_at(rung) for arm, rung in pairs}
        return {
            (arm, rung): run_experiment(contest_of(arm).experiment(), traces[rung]).figures.attainment
            for arm, rung in pairs
        }

    pilots = [contest_of(arm) for arm in arms if arm in PILOTS] or [contest_of(arms[0])]
    held = [rung for pilot in pilots if (rung := pilot.search_simulated()) is not None]
    start = max(held, default=pilots[0].ladder.rung_of(load.low_per_s))
    return [place.arm for place in race_arms(arms, measure, start_rung=start, target=options.target, keep=keep)]
