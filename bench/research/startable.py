"""The best stock arm that SGLang 0.5.17 can be started as, for the very requests that live engines get.

The frontier's winners (``best_stock``) mostly have an order of prefills that 0.5.17 lacks, and were found for eight
instances of one profile. So all unified arms that are first come first served, behind the two routers that win
everywhere in the sweep, race in the simulator over the same requests, engines and targets, rate by rate.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness import report
from bench.research.highest_rate import TARGET, Contest, LiveArm, Options
from pla_sglang.sim.experiment import run_experiment
from pla_sglang.sim.fleet_arms import CHUNKS_TOKENS, FleetArm
from pla_sglang.sim.halving import race_arms
from pla_sglang.sim.named_workloads import Workload

ROUTERS = ("least-tokens", "cache-aware")
STARTABLE = tuple(
    FleetArm(router, mixed=mixed, chunk_tokens=chunk_tokens)
    for router in ROUTERS
    for mixed in (True, False)
    for chunk_tokens in CHUNKS_TOKENS
)


def choose_startable(load: Workload, options: Options, arms: Sequence[FleetArm] = STARTABLE) -> FleetArm:
    """The arm that bears the highest rate; of those that stop at one rate the one with the most requests in target."""

    def contest_of(arm: FleetArm) -> Contest:
        return Contest("startable", LiveArm(arm.name, arm), load, options)

    def measure(pairs: Sequence[tuple[FleetArm, int]]) -> dict[tuple[FleetArm, int], float]:
        attainments = {}
        for arm, rung in pairs:
            contest = contest_of(arm)
            attainments[arm, rung] = run_experiment(contest.experiment(), contest.trace_at(rung)).figures.attainment
        return attainments

    first = contest_of(arms[0])
    held = first.search_simulated()
    start = first.ladder.rung_of(load.low_per_s) if held is None else held
    best = race_arms(arms, measure, start_rung=start, target=TARGET, keep=1)[0]
    report.say(f"{load.name}: of {len(arms)} stock arms that can be started the best one simulated is {best.arm.name}")
    return best.arm
