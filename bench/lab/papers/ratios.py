"""What a fixed ratio of prefill to decode instances costs (DOPD, Figure 3), on step times of its Table I.

The paper names one of its compositions, 2 P (TP 1) and 2 D (TP 2), and no lengths. Ours are those of eight GPUs, with
the lengths of its section VI-B3.
"""

from __future__ import annotations

import itertools

import numpy as np

from bench.lab.papers.charts import curves, draw
from bench.lab.papers.context import Context
from bench.lab.papers.dopd import ALL_LENGTHS
from bench.lab.papers.dopd_testbed import SLO, decode_spec, make_predictor, prefill_spec
from bench.lab.papers.finding import Claim, Finding, Row, listed, points_of
from bench.lab.world import Steady, World, steady
from pla_sglang.policy.baselines.dispatch import MinimalLoad
from pla_sglang.sim.workload import Trace

COMPOSITIONS = {"6P/1D": (6, 1), "4P/2D": (4, 2), "2P/3D": (2, 3)}  # one GPU a P, two a D: eight GPUs
WHY = "The paper prints neither the compositions it compares nor their lengths; a worse worst one makes any ratio."


def chosen_ratio(lengths: str, composition: str, users: int, *, requests: int) -> Steady:
    """A closed loop on a fixed composition."""
    of, (prefills, decodes) = ALL_LENGTHS[lengths], COMPOSITIONS[composition]
    trace = Trace(lengths, np.zeros(requests), np.full(requests, of.input_tokens), np.full(requests, of.output_tokens))
    world = World(
        [prefill_spec(prefills), decode_spec(decodes)], MinimalLoad(make_predictor()), config={"users": {0: users}}
    )
    return steady(world.run(trace).served, users, SLO)


def run(context: Context) -> Finding:
    users = context.pick([20], [25, 50, 100, 200], [25, 50, 75, 100, 150, 200, 250])
    cases = itertools.product(ALL_LENGTHS, COMPOSITIONS, users)
    results = context.measure(chosen_ratio, cases, requests=context.pick(60, 1200, 6000))
    rows, claims = [], []
    for lengths, of in ALL_LENGTHS.items():
        rate = {name: results[lengths, name, users[-1]].requests_per_s for name in COMPOSITIONS}
        best, worst = (choose(rate, key=rate.__getitem__) for choose in (max, min))
        good, poor = results[lengths, best, users[-1]], results[lengths, worst, users[-1]]
        at = f"{lengths}, {users[-1]} users: {best} and {worst}"
        rows += [
            Row(f"{at}, throughput, times", 3.2, rate[best] / rate[worst], "", WHY),
            Row(f"{at}, TTFT, times shorter", 15.32, poor.ttft_mean_s / good.ttft_mean_s, "", WHY),
            Row(f"{at}, end to end, times shorter", 1.04, poor.e2e_mean_s / good.e2e_mean_s, "", WHY),
        ]
        nearest = min(
            COMPOSITIONS, key=lambda name: abs(np.log(COMPOSITIONS[name][0] / COMPOSITIONS[name][1] / of.ratio))
        )
        text = f"{lengths}: the composition nearest to the paper's best ratio, {of.ratio}, serves most requests/s"
        claims.append(Claim(text, nearest == best, f"{nearest}; {listed(rate)}"))
    points = points_of(results, "lengths", "composition", "users")
    fields = {"requests/s": "requests_per_s", "mean TTFT, s": "ttft_mean_s", "mean E2E, s": "e2e_mean_s"}
    panels = curves(points, fields, x="users", by="composition", label="users, {}", each="lengths")
    picture = draw(panels, "DOPD Fig. 3: three compositions of eight GPUs", columns=3)
    return Finding("step times of DOPD's Table I, closed loop, eight GPUs", rows, claims, points, picture)
