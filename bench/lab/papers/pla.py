"""PLA-Serve's figures and Table 2 (section 4); what they run is in ``pla_sglang/sim/core/prefill_chats``."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping

import numpy as np

from bench.harness.talks import Dataset
from bench.lab.papers.charts import Panel, bars, curves, draw
from bench.lab.papers.context import Context
from bench.lab.papers.finding import Claim, Finding, Point, Row, number, points_of
from bench.lab.papers.prefill_chats import (
    CACHE_AWARE,
    CHUNK_TOKENS,
    COMPARED,
    CURVE_ONLY,
    GRAPH_TOKENS,
    MODES,
    PROFILES,
    ROBIN,
    SLO,
    TTFT_SLO_S,
    chat_prefills,
    conversations,
    deploy,
    engine_of,
    graph_tokens,
    temporal,
)
from bench.lab.world import Steady, World, steady, take_rows
from pla_sglang.policy.baselines.dispatch import CacheAware
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.pla.awd import AwdKnobs
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.core.engine_knobs import AnswerCaching, EngineKnobs
from pla_sglang.sim.metrics.goodput import quantile
from pla_sglang.sim.workload import Arrivals, LengthModel, generated_trace
from pla_sglang.sim.workload.generate import LONG, SHORT, short_and_long_trace
from pla_sglang.sim.workload.lengths import fixed

# -- Figures 1 and 3: longs and shorts in each other's way -----------------------------------------------------------

KINDS = {SHORT: "short", LONG: "long"}
FIG1_WHY = "The paper prints no numbers. Kernels that slow each other down inside a batch only a GPU can show."


def ttft_p90s_s(mode: str, shorts: int, longs: int, *, rows: int, seed: int) -> dict[str, float]:
    """By kind, of a closed loop with so many users of either kind. Where a kind runs out, the count ends."""
    users = {kind: count for kind, count in ((SHORT, shorts), (LONG, longs)) if count}
    # as many passes of either kind as the run is to hold: one round of all users is what a pass can take at most
    trace = short_and_long_trace(rows * max(shorts, 1), rows * max(longs, 1), random.Random(seed))
    assert trace.client is not None, "both kinds are clients"
    trace = trace.take(np.flatnonzero(np.isin(trace.client, list(users))))
    assert trace.client is not None, "a part of it has them too"
    served = deploy(mode, model="32B", instances=1, users=users).run(trace).served
    by_kind = {kind: take_rows(served, trace.client == kind) for kind in users}
    both_s = min(float(of.arrival_s.max()) for of in by_kind.values())
    p90s_s = {}
    for kind, of in by_kind.items():
        ttft_s = of.ttft_s()[of.arrival_s <= both_s]  # while both kinds are there
        p90s_s[KINDS[kind]] = quantile(ttft_s[len(ttft_s) // 10 :], 90)
    return p90s_s


def fig1(context: Context) -> Finding:
    """Figures 1 and 3: P90 TTFT of long and of short prefills by how many of either kind are under way."""
    levels = context.pick([2, 8], [1, 2, 4, 8, 16], [1, 2, 4, 8, 16, 32])
    mixes = [(shorts, longs) for longs in (0, *levels) for shorts in (0, *levels) if shorts or longs]
    cases = [(mode, *mix) for mode in COMPARED for mix in mixes]
    results = context.measure(ttft_p90s_s, cases, rows=context.pick(10, 60, 300), seed=context.seed)
    top = levels[-1]
    both, alone_long = results["SGLang", top, top], results["SGLang", 0, top]["long"]
    alone_short, ours = results["SGLang", top, 0]["short"], results["PLA", top, top]
    slower_long, slower_short = both["long"] / alone_long, both["short"] / alone_short
    against = ours["long"] / both["long"]
    setting, ours_ms = f"{top} + {top} under way", f"{number(1e3 * ours['short'])} ms"
    points: list[Point] = [
        {"mode": mode, "shorts": shorts, "longs": longs, **p90s} for (mode, shorts, longs), p90s in results.items()
    ]
    panels: list[Panel] = []
    for kind, other in (("long", "shorts"), ("short", "longs")):
        fields, label = {f"P90 TTFT of {kind}s, s": kind}, f"{other} under way ({{}})"
        shown = [point for point in points if point[f"{kind}s"]]
        panels += curves(shown, fields, x=other, by=f"{kind}s", label=label, each="mode", log_y=True)
    return Finding(
        "one prefill instance, Qwen2.5-32B, H200 step times, closed loop; short: under 64 tokens, long: 1,025 to 4,096",
        [
            Row(f"{setting}: P90 TTFT of longs, beside shorts / alone", None, slower_long, "", FIG1_WHY),
            Row(f"{setting}: P90 TTFT of shorts, beside longs / alone", None, slower_short, "", FIG1_WHY),
            Row(f"{setting}: the same of shorts under PLA", None, ours["short"] / alone_short, "", FIG1_WHY),
            Row(f"{setting}: the same of longs under PLA", None, ours["long"] / alone_long, "", FIG1_WHY),
        ],
        [
            Claim("longs are at least 10 % slower beside shorts", slower_long >= 1.1, f"{number(slower_long)} times"),
            Claim("longs hurt shorts more than shorts hurt longs", slower_short > slower_long, number(slower_short)),
            Claim("PLA keeps shorts apart from longs", ours["short"] < both["short"], ours_ms),
            Claim(
                "under PLA longs beside shorts are no slower than under SGLang",
                against <= 1,
                f"{number(against)} times",
            ),
        ],
        points,
        draw(panels, "PLA-Serve Fig. 1 and 3: longs and shorts in each other's way; a curve for each number of them"),
    )


# -- Figure 5: the waiting window ------------------------------------------------------------------------------------

FIG5_USERS = 64
PAUSE_S = 0.1  # mean, between an answer and the next request: without it all users wait for the same passes
LONGEST_TOKENS = 255  # "prompt length less than 256": all are short
BY_MODEL, ALL_SHORT = "boundary by the model", "all are short"
BOUNDARIES = {BY_MODEL: None, ALL_SHORT: LONGEST_TOKENS + 1}
ADAPTIVE = -1.0  # as a window: that of Algorithm 1
FIG5_WHY = (
    "The default: the model's boundary, 234 tokens, lies among these prompts. The longest of them wait for all others"
    " and go alone, in memory-bound passes; a window lets them go first"
)


def windowed(window_ms: float, boundary: str, *, requests: int, seed: int) -> Steady:
    """Prompts under 256 tokens, as the paper says; median, shape and pauses are ours. One token out."""
    rng = random.Random(seed)
    lengths = LengthModel((1.0,), (4.1,), (0.8,), least=8, most=LONGEST_TOKENS)
    trace = generated_trace(requests, Arrivals(1.0, rng), lengths, fixed(1))
    awd = None if window_ms == ADAPTIVE else AwdKnobs(wait_min_s=window_ms / 1e3, wait_max_s=max(window_ms / 1e3, 1e-6))
    engine, users = temporal(awd, BOUNDARIES[boundary]), {0: FIG5_USERS}
    instance = deploy("PLA", model="14B", instances=1, users=users, engine=engine)
    pauses_s = [rng.expovariate(1 / PAUSE_S) for _ in range(requests)]
    instance = dataclasses.replace(instance, config={**instance.config, "pauses_s": pauses_s})
    return steady(instance.run(trace).served, FIG5_USERS, SLO, pauses=True)


def fig5(context: Context) -> Finding:
    """Latency and throughput of short prefills by waiting window."""
    windows = context.pick([0.0, 20.0], [0.0, 2.0, 5.0, 10.0, 20.0, 40.0], [0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0])
    cases = itertools.product((ADAPTIVE, *windows), BOUNDARIES)
    results = context.measure(windowed, cases, requests=context.pick(600, 4000, 20_000), seed=context.seed)
    rows, claims = [], []
    for boundary in BOUNDARIES:
        rate = {window: results[window, boundary].requests_per_s for window in windows}
        best, adaptive = max(rate, key=rate.__getitem__), results[ADAPTIVE, boundary].requests_per_s
        why = FIG5_WHY if boundary == BY_MODEL else CURVE_ONLY
        for window, label in ((windows[0], "no window"), (windows[-1], f"{windows[-1]:g} ms"), (ADAPTIVE, "adaptive")):
            run = results[window, boundary]
            rows.append(Row(f"{boundary}, {label}: requests/s", None, run.requests_per_s, "req/s", why))
            rows.append(Row(f"{boundary}, {label}: mean latency", None, 1e3 * run.ttft_mean_s, "ms", why))
        seen = f"{number(adaptive)} of {number(rate[best])} requests/s, at {best:g} ms"
        claims.append(
            Claim(
                f"{boundary}: the adaptive window is within 5 % of the best fixed one",
                adaptive > 0.95 * rate[best],
                seen,
            )
        )
        spread = max(rate.values()) / min(rate.values()) - 1
        claims.append(
            Claim(f"{boundary}: windows change the throughput by 5 % and more", spread >= 0.05, f"{100 * spread:.1f} %")
        )
    points = [point for point in points_of(results, "window_ms", "boundary") if point["window_ms"] != ADAPTIVE]
    fields = {"mean TTFT, s": "ttft_mean_s", "requests/s": "requests_per_s"}
    panels = curves(points, fields, x="window_ms", by="boundary", label="window, ms")
    setting = (
        f"one prefill instance, Qwen2.5-14B, H200 step times, {FIG5_USERS} users who pause {1e3 * PAUSE_S:g} ms on"
        " average, prompts under 256 tokens"
    )
    return Finding(setting, rows, claims, points, draw(panels, "PLA-Serve Fig. 5: the waiting window"))


# -- Figures 6, 7 and 8: chats by concurrency ------------------------------------------------------------------------

FIG6_WHY = (
    "The model knows the launches that a graph saves and the wait behind longs, not what a GPU loses when both share a"
    " batch. At few users, shorts alone leave a pass memory-bound that longs would fill. The paper's baseline has no"
    " prefill graphs; today's SGLang has them (docs/architecture.md)."
)
NAMES = {1: "one instance", 8: "eight instances"}
# Of ``Steady``: the quantity, and what turns ours and theirs into a gain. The paper's figures for one and eight.
METRICS: dict[str, tuple[str, float, dict[int, float]]] = {
    "more requests/s": ("requests_per_s", 1.0, {1: 0.20, 8: 0.33}),
    "lower mean latency": ("ttft_mean_s", -1.0, {1: 0.20, 8: 0.20}),
    "lower P90 latency": ("ttft_p90_s", -1.0, {}),
}


Judged = tuple[list[Row], Claim]


def judge(what: str, paper: float | None, gains: Mapping[str, float], why: str, *, least: float = 1e-9) -> Judged:
    """Of ``gains`` by where they are seen the best, beside the paper's, and the worst, which must reach ``least``."""
    best, worst = (choose(gains, key=gains.__getitem__) for choose in (max, min))
    seen = f"from {100 * gains[worst]:+.1f} % ({worst}) to {100 * gains[best]:+.1f} % ({best})"
    rows = [
        Row(f"{what}: best point ({best})", paper, gains[best], "", why),
        Row(f"{what}: worst point ({worst})", None, gains[worst], "", f"{what.partition(':')[0]}, the worst point"),
    ]
    return rows, Claim(f"{what} at every concurrency", gains[worst] >= least, seen)


def fig6(context: Context) -> Finding:
    """Throughput, mean and P90 latency by concurrency, one and eight instances, three models."""
    models = context.pick(["14B"], ["14B"], list(PROFILES))
    users = context.pick([4, 16], [1, 4, 16, 64], [1, 2, 4, 8, 16, 32, 64])
    bases = {1: ("SGLang",), 8: ("SGLang", CACHE_AWARE)}
    cases = [
        (model, instances, mode, of)
        for model, instances in itertools.product(models, bases)
        for mode in dict.fromkeys((*bases[instances], *MODES))
        for of in users
    ]
    requests = context.pick(200, 800, 6000)
    results = context.measure(
        chat_prefills, cases, dataset=context.dataset or "sharegpt", requests=requests, seed=context.seed
    )
    judged: list[Judged] = []
    for instances, (what, (field, sign, paper)) in itertools.product(bases, METRICS.items()):
        for base in bases[instances]:
            gains = {
                f"{model}, users {of}": sign
                * (
                    getattr(results[model, instances, "PLA", of], field)
                    / getattr(results[model, instances, base, of], field)
                    - 1
                )
                for model, of in itertools.product(models, users)
            }
            judged.append(judge(f"{NAMES[instances]}: {what} than {base}", paper.get(instances), gains, FIG6_WHY))
    points = [
        {**point, "of": f"{point['model']}, {NAMES[point['instances']]}"}
        for point in points_of(results, "model", "instances", "mode", "users")
    ]
    fields = {"requests/s": "requests_per_s", "mean, s": "ttft_mean_s", "P90, s": "ttft_p90_s"}
    panels = curves(points, fields, x="users", by="mode", label="users an instance ({})", each="of", log_x=True)
    setting = "prefill instances alone, H200 step times (7B: H100), ShareGPT-4 lengths and turns, closed loop"
    rows, claims = [row for rows, _ in judged for row in rows], [claim for _, claim in judged]
    picture = draw(panels, "PLA-Serve Fig. 6", columns=3)
    setting = f"{setting}; concurrency is per instance, requests/s are users over mean latency"
    return Finding(setting, rows, claims, points, picture)


FIG7_MODEL = "32B"
FIG7_PAPER = {(1, "SGLang"): 0.10, (8, ROBIN): 0.30}
WHY_NONE = "The concurrency at which PLA has fewest violations; the paper does not name its own."
FIG7_WHY = (
    "The printed figures are of one concurrency each that is not named, and that over round robin of one instance,"
    " where a router has nothing to choose. The model lacks the interference inside a batch that only a GPU shows."
)


def fig7(context: Context) -> Finding:
    """Share of requests over a TTFT target of 0.4 s by concurrency, one and eight instances."""
    users = context.pick([4, 16], [2, 4, 8, 16, 32], [1, 2, 4, 8, 12, 16, 24, 32, 64])
    requests = context.pick(200, 1000, 6000)
    bases = {1: ("SGLang",), 8: ("SGLang", ROBIN, CACHE_AWARE)}
    cases = [
        (FIG7_MODEL, instances, mode, of)
        for instances, base in bases.items()
        for mode in (*base, "PLA")
        for of in users
    ]
    runs = context.measure(
        chat_prefills, cases, dataset=context.dataset or "lmsys", requests=requests, seed=context.seed
    )
    results = {case[1:]: run.violations for case, run in runs.items()}
    judged: list[Judged] = []
    for instances, base in ((count, base) for count in bases for base in bases[count]):
        fewer = {f"users {of}": results[instances, base, of] - results[instances, "PLA", of] for of in users}
        what = f"{NAMES[instances]}: violations, no more than {base}"
        judged.append(judge(what, FIG7_PAPER.get((instances, base)), fewer, FIG7_WHY, least=0.0))
    at = min(users, key=lambda each: results[8, "PLA", each])
    left = results[8, CACHE_AWARE, at]
    points = points_of(results, "instances", "system", "users", value="violations")
    fields, label = {"violations": "violations"}, "users an instance ({} instances)"
    panels = curves(points, fields, x="users", by="system", label=label, each="instances")
    return Finding(
        f"prefill instances alone, Qwen2.5-{FIG7_MODEL}, H200 step times, LMSYS-like lengths, two turns on average,"
        f" TTFT target {TTFT_SLO_S} s, closed loop; concurrency is per instance",
        [
            *(row for rows, _ in judged for row in rows),
            Row(f"eight instances, {at} users each: violations of the router", 0.047, left, "", WHY_NONE),
            Row(f"eight instances, {at} users each: violations of PLA", 0.0, results[8, "PLA", at], "", WHY_NONE),
        ],
        [claim for _, claim in judged],
        points,
        draw(panels, "PLA-Serve Fig. 7: requests over 0.4 s to their first token"),
    )


ARMS = ("P/D", "mixed", "mixed, as many GPUs")


def chats(arm: str, instances: int, users: int, *, dataset: str | Dataset, requests: int, seed: int) -> Steady:
    """Whole requests under PLA: ``instances`` that prefill and as many that decode, or that do both in mixed passes."""
    profile, users = PROFILES[FIG7_MODEL], users * instances
    fleet = [InstanceSpec(profile, count=instances * (2 if arm == ARMS[2] else 1))]
    if arm == "P/D":
        fleet = [InstanceSpec(profile, count=instances, role=role) for role in (Role.PREFILL, Role.DECODE)]
    answers = AnswerCaching.RETURNED if arm == "P/D" else AnswerCaching.KEPT
    knobs = EngineKnobs(chunk_tokens=CHUNK_TOKENS, mixed=arm != "P/D", answers=answers)
    config = {"users": {0: users}, "prefill_graph_tokens": GRAPH_TOKENS}
    world = World(fleet, CacheAware(), engine=temporal(), knobs=knobs, config=config)
    counted = steady(world.run(conversations(requests, users, seed, dataset)).served, users, SLO)
    return dataclasses.replace(counted, requests_per_s=users / counted.e2e_mean_s)


def fig8(context: Context) -> Finding:
    """Requests per second of PLA with decodes elsewhere and in its own passes, one and two instances."""
    users = context.pick([4, 16], [4, 16, 64], [1, 4, 16, 64, 128])
    cases = itertools.product(ARMS, (1, 2), users)
    requests, dataset = context.pick(200, 800, 6000), context.dataset or "sharegpt"
    results = context.measure(chats, cases, requests=requests, dataset=dataset, seed=context.seed)
    judged: list[Judged] = []
    for instances, arm in itertools.product((1, 2), ARMS[1:]):
        lost = {
            f"users {of}": 1 - results[arm, instances, of].requests_per_s / results["P/D", instances, of].requests_per_s
            for of in users
        }
        what = f"{instances} prefill instance{'s' * (instances > 1)}: fewer requests/s {arm}"
        judged.append(judge(what, None, lost, CURVE_ONLY))
    points = points_of(results, "arm", "instances", "users")
    label, fields = "users an instance ({} instances)", {"requests/s": "requests_per_s"}
    panels = curves(points, fields, x="users", by="arm", label=label, each="instances", log_x=True)
    return Finding(
        f"PLA, Qwen2.5-{FIG7_MODEL}, H200 step times, ShareGPT-4 lengths and turns, closed loop of whole requests,"
        " cache-aware routing; P/D: as many decode as prefill instances, mixed: decodes ride in prefill passes",
        [row for rows, _ in judged for row in rows],
        [claim for _, claim in judged],
        points,
        draw(panels, "PLA-Serve Fig. 8: decodes elsewhere, or mixed into prefills"),
    )


# -- Table 2: the time to work off a data set ------------------------------------------------------------------------

TABLE2_MODEL, PREFILLS, DECODES = "32B", 4, 4
ANSWER_TOKENS = 1024  # "a decoding length of 1K tokens"
TABLE2_USERS = 512  # under way at once: an offline task keeps the instances full
TABLE2 = {"lmsys": (18_963, 17_572, 0.073), "sharegpt": (25_132, 23_041, 0.083)}  # s of SGLang, of PLA; improvement
WHY_SECONDS = "The paper's data sets are larger by a factor that is not printed; only the improvement can be compared."
WHY_GAIN = (
    "With answers of 1K tokens four decode instances take nearly all of the time in our model, so a faster prefill"
    " hardly shows; the share of prefill in the paper's time is not printed."
)


def offline_s(mode: str, dataset: str, *, recorded: Dataset | None, requests: int, seed: int) -> float:
    """What so many requests take at the rate that the users have, all of them over the mean time from end to end."""
    trace = conversations(requests, TABLE2_USERS, seed, recorded or dataset)
    trace = dataclasses.replace(trace, output_tokens=np.full(len(trace), ANSWER_TOKENS))
    counts = {Role.PREFILL: PREFILLS, Role.DECODE: DECODES}
    fleet = World(
        [InstanceSpec(PROFILES[TABLE2_MODEL], count=count, role=role) for role, count in counts.items()],
        CacheAware(),
        engine=engine_of(mode),
        knobs=EngineKnobs(chunk_tokens=CHUNK_TOKENS, answers=AnswerCaching.RETURNED),
        config={"users": {0: TABLE2_USERS}, "prefill_graph_tokens": graph_tokens(mode)},
    )
    return requests * steady(fleet.run(trace).served, TABLE2_USERS, SLO).e2e_mean_s / TABLE2_USERS


def table2(context: Context) -> Finding:
    """The time to work off a data set without deadlines, four prefill and four decode instances."""
    requests = context.pick(200, 4000, 20_000)
    cases = [(mode, dataset) for dataset in TABLE2 for mode in COMPARED]
    results = context.measure(offline_s, cases, recorded=context.dataset, requests=requests, seed=context.seed)
    rows, claims = [], []
    for dataset, (stock_s, ours_s, improvement) in TABLE2.items():
        gain = 1 - results["PLA", dataset] / results["SGLang", dataset]
        rows += [
            Row(f"{dataset}: SGLang", stock_s, results["SGLang", dataset], "s", WHY_SECONDS),
            Row(f"{dataset}: PLA", ours_s, results["PLA", dataset], "s", WHY_SECONDS),
            Row(f"{dataset}: improvement", improvement, gain, "", WHY_GAIN),
        ]
        claims.append(Claim(f"{dataset}: PLA takes less time than SGLang", gain > 0, f"{number(100 * gain)} %"))
    groups = {dataset: {mode: results[mode, dataset] for mode in COMPARED} for dataset in TABLE2}
    setting = (
        f"{PREFILLS} P + {DECODES} D, Qwen2.5-{TABLE2_MODEL} (the paper names none), H200 step times,"
        f" cache-aware routing, {requests} prompts of conversations, answers of {ANSWER_TOKENS} tokens, {TABLE2_USERS}"
        " under way"
    )
    picture = draw([bars(groups, y="s")], "PLA-Serve Table 2: time to work off a data set")
    return Finding(setting, rows, claims, points_of(results, "mode", "dataset", value="seconds"), picture)
