"""A short and a long pool of prefills against stock SGLang and its router.

Emulated GPUs, the same requests for every arm, every token checked. Conversations begin with chat-like short prompts
all the time, and with long ones at a rate that changes in the middle; later turns carry the history. A request violates
its target when its first token comes later than ``--slo-ttft-s`` or it fails. ``--layout pd``: prefill and decode
instances behind a router; ``--layout dp``: the ranks of one server. Arms, see ``bench.compare.spatial_arms``:
``spatial``, ``temporal``, ``dp`` (stock, round robin), and ``router:POLICY``, stock behind SGLang's router, either with
the flags of a preset of stock behind a slash.

More runs of ``spatial``: ``constant`` has the same rates throughout: there no instance may change pools once they have
settled. ``shifting`` asks for the long pool, then for the short one, then for the long one again, and instances have to
follow. All times given and shown are device time. Finished steps are kept in OUT, and ``--budget-s`` ends a run between
two of them; the same command goes on from there. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.compare import spatial_arms as forms
from bench.compare.spatial_arms import BOUNDARY_TOKENS, RANKS, ROUTER, SPATIAL, Setting, Work, running_engines
from bench.harness import report
from bench.harness.bench import Result, measuring
from bench.harness.cli import MAX_OVERHEAD, add_budget, add_dataset, add_emulated_device, dataset_of
from bench.harness.figures import panels
from bench.harness.report import (
    emit,
    emulated_conditions,
    environment,
    keep_columns,
    markdown,
    print_lines,
    say_left_out,
    scale_text,
    show,
    yes_no,
)
from bench.harness.steps import NoStepError, Row, Steps
from pla_sglang.sim.metrics.goodput import quantile

CHANGING, CONSTANT, SHIFTING = ("changing", "constant", "shifting")
START_S, ROUTER_S, STOP_S = 60.0, 20.0, 15.0  # of engines and of a router before them, on two cores
MAX_LAG_SHARE = 0.1  # of the target, by which the client may be late (99th percentile)
SETTLE_SHARE = 0.25  # of a run, in which pools may take the sizes that the load asks for
# The first two are PLA-Serve's, then better at all.
AT_LEAST = {"fewer_than_dp": 0.28, "fewer_than_router": 0.12, "fewer_than_bucket": 0.0}
AT_MOST = {"computed_tokens_ratio": 1.05, "late_vs_minimal_load": 1.0, "flips_constant_load": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", default=forms.PAIRS, help=f"one of: {', '.join(forms.LAYOUTS)}")
    parser.add_argument("--arms", help="with commas between; default: all of the layout")
    parser.add_argument("--prefill", type=int, default=4, help="prefill instances, or data-parallel ranks")
    parser.add_argument("--decode", type=int, default=2, help="decode instances of layout pd")
    parser.add_argument("--duration-s", type=float, default=30.0, help="of arrivals, device time")
    parser.add_argument("--short-rps", type=float, default=20.0, help="conversations that begin with a short prompt")
    parser.add_argument("--long-rps", type=float, nargs=2, default=(12.0, 26.0), metavar=("BEFORE", "AFTER"))
    parser.add_argument("--turns", type=float, default=2.0, help="mean of a conversation; 1: requests are independent")
    parser.add_argument("--slo-ttft-s", type=float, default=0.4)
    add_dataset(parser, with_model=True)
    add_emulated_device(parser, time_scale=8.0)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each arm, each with arrivals of its own")
    parser.add_argument("--changing-only", action="store_true", help="leave out the runs at constant and shifting load")
    add_budget(parser)
    parser.add_argument("--out", type=Path, default=Path("bench_out"))


def setting_of(options: argparse.Namespace) -> Setting:
    shared = ("layout", "profile", "time_scale", "slo_ttft_s", "prefill", "decode")
    return Setting(**{name: getattr(options, name) for name in shared})


def works_of(options: argparse.Namespace) -> dict[str, Work]:
    """By load. Raises ConfigError."""
    changing = Work(options.duration_s, (options.short_rps,), tuple(options.long_rps), options.turns)
    works = {CHANGING: changing, CONSTANT: changing.constant(), SHIFTING: forms.SHIFTING_WORK}
    dataset = dataset_of(options)
    return {load: dataclasses.replace(work, dataset=dataset) for load, work in works.items()}


def keys_of(arms: Sequence[str], works: Mapping[str, Work], setting: Setting, options: argparse.Namespace) -> list[Row]:
    """Steps in the order in which they run: all arms with one seed, then with the next. Other loads have one run."""
    keys = []
    for seed in range(1, options.seeds + 1):
        steps = [(CHANGING, arm) for arm in arms]
        if SPATIAL in arms and seed == 1 and not options.changing_only:
            steps += [(CONSTANT, SPATIAL), (SHIFTING, SPATIAL)]
        for load, arm in steps:
            about = dataclasses.asdict(setting) | works[load].describe()
            keys.append(json.loads(json.dumps(about)) | {"seed": seed, "load": load, "arm": arm})
    return keys


def measure(keys: list[Row], steps: Steps, setting: Setting, works: Mapping[str, Work], out: Path) -> None:
    """Runs what is not finished, as far as the time goes. Raises ServerError, ConfigError."""
    while missing := steps.open(keys):
        if not steps.has_time(START_S + seconds_of(missing[0])):
            return
        arm = missing[0]["arm"]
        with running_engines(arm, setting, out / "spatial", f"{setting.layout}-{len(missing)}") as engines:
            for key in missing:
                if not same_engines(key["arm"], arm, setting):
                    continue
                if not steps.has_time(seconds_of(key)):
                    return
                planned = works[key["load"]].planned(key["seed"], setting.time_scale)
                arm_name = key["arm"].replace(":", "-").replace("/", "-")
                name = f"{setting.layout}-{key['load']}-{key['seed']}-{arm_name}"
                steps.add(key, engines.run_step(name, key["arm"], planned, seed=key["seed"]))


def seconds_of(key: Row) -> float:
    """About the wall time of a step, with what comes before and after it on engines that run."""
    return ROUTER_S + float(key["duration_s"] * key["time_scale"]) + STOP_S


def same_engines(arm: str, other: str, setting: Setting) -> bool:
    return forms.engine_arguments(arm, setting, "") == forms.engine_arguments(other, setting, "")


def arms_table(result: Result) -> report.Cells:
    rows = []
    for arm, own in result["arms"].items():
        shares = [own["violation_rate"], own["short"]["violation_rate"], own["long"]["violation_rate"]]
        by_seed = ", ".join(f"{value:.1%}" for value in own["violation_rate_by_seed"])
        times = [f"{own[name][f'ttft_{at}_s']:.3f}" for name in ("short", "long") for at in ("p50", "p99")]
        moves = str(own["flips"] + own["flips_while_settling"]) if "moves" in own else "-"
        hosts = [own["host_overhead_share"], own["host_overhead_share_decode"]]
        computed = f"{own['computed_tokens'] / own['prompt_tokens']:.0%}" if "prompt_tokens" in own else "-"
        cells = [*("-" if share is None else f"{share:.1%}" for share in shares), by_seed, *times, computed, moves]
        cells.append(", ".join(f"{share:.1%}" for share in hosts if share is not None))
        rows.append([f"`{arm}`", *cells, yes_no(own["valid"])])
    header = ["arm", "late", "of shorts", "of longs", "late by seed", "short TTFT p50, s"]
    header += ["short TTFT p99, s", "long TTFT p50, s", "long TTFT p99, s"]
    host = "host in the way" if result["layout"] == RANKS else "host in the way: prefill, decode"
    return [*header, "computed", "moves", host, "valid"], rows


def outcome(
    rows: Mapping[tuple[str, str], Sequence[Row]], setting: Setting, works: Mapping[str, Work]
) -> dict[str, Any]:
    """The result by the rows of each (load, arm)."""
    of_loads = {
        (load, arm): figures(own, setting.slo_ttft_s, works[load].duration_s) for (load, arm), own in rows.items()
    }
    by_arm = {arm: own for (load, arm), own in of_loads.items() if load == CHANGING}
    result = {"bench": "spatial", **summary(by_arm)}
    if setting.layout == forms.PAIRS and (temporal := result["violation_rate"].get(forms.TEMPORAL)):
        result["late_vs_minimal_load"] = result["violation_rate"].get(SPATIAL, math.nan) / temporal
    if constant := of_loads.get((CONSTANT, SPATIAL)):
        result["flips_constant_load"] = constant["flips"]
        result["flips_constant_load_while_settling"] = constant["flips_while_settling"]
        result[CONSTANT] = constant
    if shifting := of_loads.get((SHIFTING, SPATIAL)):
        result["moves_shifting_load"] = [move["role"] for move in shifting["moves"][0]]
        result[SHIFTING] = shifting | works[SHIFTING].describe()
    result["tokens_verified"] = sum(own["tokens_verified"] for own in of_loads.values())
    result["tokens_wrong"] = sum(own["tokens_wrong"] for own in of_loads.values())
    result["valid"] = all(own["valid"] for (load, _), own in of_loads.items() if load != SHIFTING)  # its moves count
    return result | {"targets_missed": missed(result), "arms": by_arm}


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    setting, works = setting_of(options), works_of(options)
    arms = options.arms.split(",") if options.arms else list(forms.DEFAULT_ARMS[setting.layout])
    for arm in arms:
        forms.check_arm(arm, setting)
    left_out = {arm: lacking for arm in arms if (lacking := forms.find_lacking(arm, setting))}
    for arm, lacking in left_out.items():
        say_left_out(arm, lacking)
    arms = [arm for arm in arms if arm not in left_out]
    keys = keys_of(arms, works, setting, options)
    steps = Steps(options.out / f"spatial-{setting.layout}.steps.jsonl", options.budget_s)
    with measuring():
        measure(keys, steps, setting, works, options.out)
    rows: dict[tuple[str, str], list[Row]] = {}
    for key, row in steps.finished(keys):
        rows.setdefault((key["load"], key["arm"]), []).append(row)
    if not any(load == CHANGING for load, _ in rows):
        raise NoStepError("no arm was measured under a changing load")
    work = works[CHANGING]
    about = dataclasses.asdict(setting) | work.describe() | {"seed": 1, "seeds_asked": options.seeds}
    result = outcome(rows, setting, works) | about
    rates = " then ".join(f"{rate:g}" for rate in work.long_rps)
    title = (
        f"{setting.layout}: {setting.prefill} prefill, conversations of {work.turns:g} turns, {work.short_rps[0]:g}/s "
        f"begin short, {rates}/s long, TTFT target {setting.slo_ttft_s:g} s, "
        f"{setting.profile}, time scale {setting.time_scale:g}"
    )
    show(title, *arms_table(result))
    print_lines("MISSED", result["targets_missed"])
    plot(result, options.out / f"spatial-{setting.layout}.png", title)
    emit({**result, "environment": environment()}, f"spatial-{setting.layout}", options.out)
    return 0 if result["valid"] else 1


# -- figures, from kept rows -------------------------------------------------------------------------------------------


def times(rows: Sequence[Row], *, short: bool | None = None) -> np.ndarray:
    """TTFT of all requests or of one class, over all seeds; nan where there was none."""
    return np.array(
        [
            ttft_s
            for row in rows
            for tokens, _, ttft_s in row["requests"]
            if short is None or (tokens < BOUNDARY_TOKENS) is short
        ],
        dtype=np.float64,
    )


def rate(rows: Sequence[Row], slo_s: float, *, short: bool | None = None) -> float | None:
    """Share of requests without a first token in time, failed ones too; None without any request."""
    late = ~(times(rows, short=short) <= slo_s)
    return float(late.mean()) if len(late) else None


def is_undisturbed(row: Row, slo_s: float) -> bool:
    """Tells whether the client was in time and no prefilling device waited much for its host."""
    share = overhead([row], decode=False)
    return row["client_lag_p99_s"] <= MAX_LAG_SHARE * slo_s and (share is None or share <= MAX_OVERHEAD)


def overhead(rows: Sequence[Row], *, decode: bool) -> float | None:
    """The largest share of an engine; ``decode``: of those that only decode, whose passes are short. None without."""
    shares = [
        share
        for row in rows
        for name, share in row["host_overhead_by_instance"].items()
        if name.startswith("decode") is decode
    ]
    return max(shares, default=None)


def flips(row: Row, duration_s: float) -> tuple[int, int]:
    """Moves between the pools in a run: while they settled, and after that."""
    settled = sum(move["at_s"] > SETTLE_SHARE * duration_s for move in row["pools"]["moves"])
    return len(row["pools"]["moves"]) - settled, settled


def figures(rows: Sequence[Row], slo_s: float, duration_s: float) -> dict[str, Any]:
    """Of one arm over its seeds, in device time. ``valid``: every token right, nothing disturbed."""
    merged: dict[str, Any] = {
        "seeds": len(rows),
        "requests": sum(len(row["requests"]) for row in rows),
        **{name: sum(row[name] for row in rows) for name in ("failed", "prompt_tokens", "computed_tokens")},
        "violation_rate": rate(rows, slo_s),
        "violation_rate_by_seed": [rate([row], slo_s) for row in rows],
        **{name: sum(row[name] for row in rows) for name in ("tokens_verified", "tokens_wrong")},
        "client_lag_p99_s": max(row["client_lag_p99_s"] for row in rows),
        "host_overhead_share": overhead(rows, decode=False),
        "host_overhead_share_decode": overhead(rows, decode=True),
        "sglang": rows[0]["sglang"],
        "hooks": rows[0]["hooks"],
        "commits": sorted({row["plugin_commit"] or "unknown" for row in rows}),
    }
    merged["valid"] = merged["tokens_wrong"] == 0 and all(is_undisturbed(row, slo_s) for row in rows)
    for name, short in (("short", True), ("long", False)):
        ttft_s = times(rows, short=short)
        quantiles = {f"ttft_p{share}_s": quantile(ttft_s, share) for share in (50, 90, 99)}
        merged[name] = {"violation_rate": rate(rows, slo_s, short=short), **quantiles}
    if rows[0]["pools"] is not None:
        pairs = [flips(row, duration_s) for row in rows]
        merged["flips_while_settling"], merged["flips"] = (sum(part) for part in zip(*pairs, strict=True))
        merged |= {name: [row["pools"][name] for row in rows] for name in ("moves", "dispatched", "ticks")}
    return merged


def summary(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Rates by arm and what pools save. The router's is the best of its policies and presets that was run, ``bucket``
    aside; so is that of ``bucket``.
    """
    rates = {arm: float(found["violation_rate"]) for arm, found in arms.items()}
    buckets = [value for arm, value in rates.items() if forms.split_arm(arm)[0] == forms.BUCKET]
    others_of_router = [arm for arm in rates if arm.startswith(ROUTER) and forms.split_arm(arm)[0] != forms.BUCKET]
    routers = [rates[arm] for arm in others_of_router]
    if SPATIAL not in rates:
        return {"violation_rate": rates}
    others = {"dp": rates.get(forms.PLAIN), "temporal": rates.get(forms.TEMPORAL)}
    others |= {"router": min(routers, default=None), "bucket": min(buckets, default=None)}
    own = arms[SPATIAL]
    both = (SPATIAL, forms.CACHE_AWARE)
    computed = [arms[arm]["computed_tokens"] for arm in both if "computed_tokens" in arms.get(arm, {})]
    return {
        "violation_rate": rates,
        **{f"fewer_than_{name}": 1 - rates[SPATIAL] / other if other else None for name, other in others.items()},
        **({"computed_tokens_ratio": computed[0] / computed[1]} if len(computed) == 2 else {}),
        "flips": own["flips_while_settling"] + own["flips"],
    }


def missed(result: Mapping[str, Any]) -> list[str]:
    """Which of the targets were measured and not reached, in words."""
    short = []
    for bounds, sign, words in ((AT_LEAST, 1, "at least"), (AT_MOST, -1, "at most")):
        for key, bound in bounds.items():
            value = result.get(key)
            if value is not None and sign * value < sign * bound:
                short.append(f"{key} is {value:.3g}, wanted {words} {bound:g}")
    moves = result.get("moves_shifting_load")
    if moves is not None and not ("short" in moves and "long" in moves[moves.index("short") :]):
        short.append("the pools did not follow a shifting load to the short pool and back")
    return short


def plot(result: Mapping[str, Any], path: Path, title: str) -> None:
    """Late requests by arm and class; beside them, where it was measured, the shifting load."""
    shifting = result.get(SHIFTING)
    count = 1 if shifting is None else 2
    with panels(path, count, size=(10 if count == 1 else 13, 4.6), title=title) as (left, *right):
        draw_late(left, result["arms"])
        if shifting is not None:
            draw_shifting(right[0], shifting)


def draw_late(panel: Any, arms: Mapping[str, Mapping[str, Any]]) -> None:
    """A cluster of bars an arm, a dot a seed; figures stand above both."""
    places = np.arange(len(arms))
    for shift, (name, label) in enumerate((("all", "all"), ("short", "shorts"), ("long", "longs"))):
        of_class = [own if name == "all" else own[name] for own in arms.values()]
        heights = [100 * (own["violation_rate"] or 0) for own in of_class]
        panel.bar(places + (shift - 1) * 0.27, heights, 0.25, label=label)
        for place, height, own in zip(places + (shift - 1) * 0.27, heights, of_class, strict=True):
            by_seed = [100 * value for value in own.get("violation_rate_by_seed", ())]
            panel.plot([place] * len(by_seed), by_seed, ".", color="black", ms=4)
            above = {"textcoords": "offset points", "xytext": (0, 3), "ha": "center", "fontsize": 7}
            panel.annotate(f"{height:.1f}", (place, max([height, *by_seed])), **above)
    panel.set_xticks(places, [arm.removeprefix("router:") for arm in arms], rotation=15)
    panel.set_ylabel("TTFT target missed, % of requests (a dot: a seed)")
    panel.margins(y=0.12)


def draw_shifting(panel: Any, shifting: Mapping[str, Any]) -> None:
    """Conversations that begin, and each move of an instance or rank to the other pool."""
    for name in ("short", "long"):
        rates = shifting[f"{name}_rps"]
        panel.stairs(rates, np.linspace(0.0, shifting["duration_s"], len(rates) + 1), label=f"begin {name}")
    for move in shifting["moves"][0]:
        panel.axvline(move["at_s"], color="black", ls=":", lw=1)
        panel.text(move["at_s"], 100.0, f" to {move['role']}", rotation=90, fontsize=8)
    panel.set(xlabel="s of device time; dotted: an instance or rank changes pools", ylabel="conversations per s")


PAGE_COLUMNS = (
    "arm",
    "late",
    "of shorts",
    "of longs",
    "late by seed",
    "short TTFT p99, s",
    "long TTFT p99, s",
    "computed",
    "moves",
)


def page(result: Result) -> str:
    shown = keep_columns(arms_table(result), PAGE_COLUMNS)
    to_router = result.get("computed_tokens_ratio")
    computed = f"Tokens computed, over those behind SGLang's `cache_aware`: {to_router:.2f}." if to_router else ""
    lines = [markdown(*shown), "", computed]
    if "flips_constant_load" in result:
        settling, after = result["flips_constant_load_while_settling"], result["flips_constant_load"]
        lines[-1] += f" At constant load {settling} moves while the pools settle, {after} after."
    if SHIFTING in result:
        moves = ", ".join(f"{move['role']} at {move['at_s']:g} s" for move in result[SHIFTING]["moves"][0])
        lines[-1] += f" Moves under the shifting load: {moves or 'none'}."
    misses = "; ".join(result["targets_missed"])
    lines[-1] += f" Targets missed: {misses}." if misses else " All measured targets are met."
    rates = " then ".join(f"{rate:g}" for rate in result["long_rps"])
    work = f"{np.max(result['short_rps']):g} begin short and {rates} long per s for {result['duration_s']:g} s"
    work = f"conversations of {result.get('turns', 1):g} turns on average: {work}"
    checked = f"{result['tokens_verified']:,} tokens checked, {result['tokens_wrong']} wrong"
    lines[-1] = lines[-1].strip()
    return "\n".join([*lines, "", emulated_conditions(result, work, checked, result["profile"], scale_text(result))])


PAGES = {"spatial-pd": page, "spatial-sessions": page, "spatial-dp": page}
