"""Head-of-line blocking: 18 long and 11 short prompts, after SGLang issue #22831, on stock SGLang and on ours.

    python -m bench hol                      scaled to the machine
    python -m bench hol --scale 1            the issue's own lengths, for a GPU
    python -m bench hol --ablation           which part brings what
    python -m bench hol --arms stock,ours    against SGLang's defaults only
    python -m bench hol --peer 'spf9=/path/to/python:--schedule-policy shortest-prefill-first'
    python -m bench hol --device emulated    the issue's own lengths on an emulated H200, every other flag a default

"short" in every figure means the issue's 2K prompts, "long" its 24K prompts, whatever class a boundary gives them.

Arms of stock: its defaults (``stock``), its hrrn (``hrrn``), its shortest-prefill-first with chunks just above the
shorts (``spf``), and that with mixed chunks (``spf-mix``), as far as the installed SGLang has them. ``best_stock`` is
the one with the least p99 of shorts.

``--device emulated``: profile h200-qwen2.5-14b-tp1, all arms at once: stock, ours, shortest-prefill-first with default
chunks (``spf``), with chunks just above the shorts (``spf2560``) and mixed (``spf2560mix``), hrrn likewise (``hrrn``,
``hrrn2560``). An SGLang without these, such as 0.5.17, needs ``--peer-python`` of a newer one for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.compare import hol_emulated
from bench.harness.arms import BEST_STOCK, OURS, RIDE, STOCK
from bench.harness.bench import Result
from bench.harness.comparison import Comparison, Measured, add_comparison, arms_page, prepare_comparison
from bench.harness.figures import panels
from bench.harness.fleet import Fleet, Solo, final_state, measure_last_chunk, measure_solo, run_request_rounds
from bench.harness.latency import spread
from bench.harness.load_client import Request
from bench.harness.report import conditions, inverse, markdown, spread_text, stdout
from bench.harness.stats import Runs, last_token_ratio, per_round
from bench.harness.workload import PATTERNS, HolShape, hol_requests
from pla_sglang.common.legend.colours import CLASS_COLOURS

# On the demo model and one core: a long takes 0.7 to 1.0 s alone, a comparison of two arms under six minutes.
CPU_SCALE = 5.0
QUICK_SCALE = 20.0
GAIN = "times better than stock"  # its time over ours, our tokens/s over its; below 1: worse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_comparison(parser, rounds=5, starts=1, arms=",".join((*BEST_STOCK, OURS)), emulated=True)
    work = parser.add_argument_group("workload")
    scale = f"divides prompt lengths and chunk; default: {CPU_SCALE:g} on a CPU, else 1"
    work.add_argument("--scale", type=float, help=scale)
    pattern = "shorts spread over the longs' work, or all at once"
    work.add_argument("--pattern", choices=PATTERNS, default="stream", help=pattern)
    work.add_argument("--spread-s", type=float, help="window of the shorts; default: what the longs take, measured")
    work.add_argument("--chunk-tokens", type=int, help="--chunked-prefill-size of every arm; default: 8192 / scale")
    work.add_argument("--max-new-tokens", type=int, default=8, help="output length of every request")
    hol_emulated.add_arguments(parser)


def shape_of(args: argparse.Namespace) -> HolShape:
    if args.scale is None:
        args.scale = (QUICK_SCALE if args.quick else CPU_SCALE) if args.device == "cpu" else 1.0
    shape = HolShape.of_issue(args.scale, max_new_tokens=args.max_new_tokens)
    shape = dataclasses.replace(shape, chunk_tokens=args.chunk_tokens or shape.chunk_tokens)
    return dataclasses.replace(shape, long_count=6, short_count=4) if args.quick else shape


def windows_of(args: argparse.Namespace, shape: HolShape, solo: Mapping[str, Solo]) -> dict[str, float]:
    """Over which the longs (``burst_s``) and the shorts of one round arrive.

    What the user gave, else from the time that the longs of one round need one after the other.
    """
    # The fastest lone long of any arm: if the machine is slower later, shorts still meet running longs.
    fastest_s = min(o.ttft_s for of_arm in solo.values() for o in of_arm.outcomes if o.request.kind == "long")
    work_s = shape.long_count * fastest_s
    return {"burst_s": min(1.0, work_s / 10), "spread_s": args.spread_s or work_s}


async def measure(args: argparse.Namespace, shape: HolShape, fleet: Fleet, start: int) -> Measured:
    """All rounds of one start of the servers; each start has requests of its own."""
    solo = await measure_solo(fleet, shape, args.vocabulary, seed=args.seed)
    solo = await measure_last_chunk(fleet, shape, args.vocabulary, solo, seed=args.seed)
    windows = windows_of(args, shape, solo)

    def requests_of_round(index: int) -> list[Request]:
        return hol_requests(
            shape,
            args.vocabulary,
            seed=args.seed,
            round_index=start * args.rounds + index,
            pattern=args.pattern,
            **windows,
        )

    runs = await run_request_rounds(fleet, args.rounds, requests_of_round)
    return Measured(solo, runs, await final_state(fleet))


def bounds(measured: Measured) -> dict[str, dict[str, Any]]:
    """By arm: the p99 of shorts may be five times their solo value plus one chunk of a long, the longest."""
    by_arm = {}
    for arm, runs in measured.runs.items():
        solo, p99s_s = measured.solo[arm], per_round(runs, "short", "p99")
        if not p99s_s:
            continue
        p99_s = spread(p99s_s).median
        bound_s = 5 * solo.ttft_s["short"] + solo.last_chunk_s
        by_arm[arm] = {
            "short_solo_ttft_s": round(solo.ttft_s["short"], 4),
            "long_solo_ttft_s": round(solo.ttft_s["long"], 4),
            "long_chunk_s": round(solo.last_chunk_s, 4),
            "short_ttft_p99_bound_s": round(bound_s, 4),
            "short_ttft_p99_s": round(p99_s, 4),
            "short_ttft_p99_within_bound": p99_s <= bound_s,
        }
    return by_arm


def last_tokens(runs: Runs, best_stock: str = STOCK) -> dict[str, float | None]:
    """Last tokens of shorts, ratios by round: ours over stock and over its best arm, and ``ride`` (where it ran) over
    ours without riding.
    """
    pairs = {"short_last_token_p50_ratio": (STOCK, OURS), "short_last_token_p50_vs_pure": (OURS, RIDE)}
    pairs["short_last_token_p50_vs_best_stock"] = (best_stock, OURS)
    return {key: last_token_ratio(runs.get(base, ()), runs.get(arm, ()), "short") for key, (base, arm) in pairs.items()}


def start_json(measured: Measured) -> dict[str, Any]:
    """The headline figures of one start, by arm: how far starts differ is part of the result."""
    of_arms = bounds(measured)
    return {
        arm: ratios
        | {key: of_arms[arm][key] for key in ("short_ttft_p99_s", "short_ttft_p99_bound_s") if arm in of_arms}
        for arm, ratios in measured.headline_ratios().items()
    }


def print_starts_and_bounds(result: Result) -> None:
    by_start = result["by_start"] if len(result["by_start"]) > 1 else []
    for index, of_start in enumerate(by_start, start=1):
        for arm, figures in of_start.items():
            listed = ", ".join(f"{key} {value:.3g}" for key, value in figures.items())
            stdout.print(f"start {index}, {arm}: {listed}", markup=False)
    for arm, bound in result["solo"].items():
        stdout.print(f"{arm}: {bound_text(bound)}", markup=False)


def bound_text(bound: Mapping[str, Any]) -> str:
    """What lone requests of one arm took, the bound that follows from it, and where the p99 of shorts lies."""
    keys = ("short_solo_ttft_s", "long_solo_ttft_s", "long_chunk_s", "short_ttft_p99_bound_s", "short_ttft_p99_s")
    short, long, chunk, limit, p99 = (f"{bound[key] * 1e3:.0f} ms" for key in keys)
    within = "within" if bound["short_ttft_p99_within_bound"] else "above"
    return (
        f"Lone requests of ours: short {short}, long {long}. Five solo values plus the longest chunk ({chunk}): "
        f"{limit}; p99 of shorts: {p99}, {within}."
    )


def run(args: argparse.Namespace) -> int:
    if args.device == "emulated":
        return hol_emulated.run(args)
    prepare_comparison(args)
    shape = shape_of(args)
    # Room for all of it twice: this bench is about time, not about memory (overload --kv-pressure is).
    kv_tokens = 2 * shape.total_input_tokens + 4096
    sizes = {"chunk_tokens": shape.chunk_tokens, "tuned_chunk_tokens": shape.tuned_chunk_tokens}
    comparison = Comparison("hol", args, kv_tokens=kv_tokens, **sizes)
    starts = comparison.measure_starts(lambda fleet, start: measure(args, shape, fleet, start))
    measured = Measured.together(starts)
    windows = windows_of(args, shape, starts[0].solo)
    workload = {
        "name": "hol",
        "pattern": args.pattern,
        "scale": args.scale,
        "longs": f"{shape.long_count} x {shape.long_tokens} tokens",
        "shorts": f"{shape.short_count} x {shape.short_tokens} tokens",
        "chunk_tokens": shape.chunk_tokens,
        "max_new_tokens": shape.max_new_tokens,
        **{name: round(value_s, 2) for name, value_s in windows.items()},
        "starts": args.starts,
    }
    result = comparison.make_result(workload, measured)
    result |= last_tokens(measured.runs, result.get("best_stock", STOCK)) | {
        "solo": bounds(measured),
        "by_start": [start_json(start) for start in starts],
    }
    title = (
        f"Head-of-line blocking, {args.pattern}: {workload['longs']}, {workload['shorts']}, "
        f"chunk {shape.chunk_tokens}, {comparison.rounds} rounds, {args.model_name}, SGLang {result['sglang']}"
    )
    comparison.show_tables(title, result)
    print_starts_and_bounds(result)
    reference = measured.solo[STOCK if STOCK in measured.solo else next(iter(measured.solo))]
    status = comparison.keep(result, measured.runs, title=title, solo_s=reference.ttft_s)
    titles = {STOCK: "stock SGLang", OURS: "pla_sglang"}
    plot_queue(args.out / "hol.requests.jsonl", args.out / "hol-queue.png", titles)
    return status


def plot_queue(requests: Path, target: Path, arms: Mapping[str, str]) -> None:
    """The prefill queue of one round, arm beside arm: a bar a request, from its arrival to its first token.

    Rows are in order of arrival, the same in every panel. Nothing is drawn where none of the arms has answers.

    Args:
        requests: the file that ``write_requests`` made.
        arms: titles by arm; an arm that the file lacks is left out.
    """
    lines = [json.loads(line) for line in requests.read_text("utf-8").splitlines()]
    first_round = [line for line in lines if line["round"] == 1 and line["ttft_s"] is not None]
    shown = {arm: [line for line in first_round if line["arm"] == arm] for arm in arms}
    shown = {arm: sorted(of_arm, key=lambda line: line["at_s"]) for arm, of_arm in shown.items() if of_arm}
    if not shown:
        return
    ends_s = max(line["at_s"] + line["ttft_s"] for of_arm in shown.values() for line in of_arm)
    with panels(target, len(shown), size=(4.6 * len(shown), 4.0)) as axes:
        for panel, (arm, of_arm) in zip(axes, shown.items(), strict=True):
            for kind in ("long", "short"):
                rows = [(row, line) for row, line in enumerate(of_arm) if line["kind"] == kind]
                places = [row for row, _ in rows]
                waits_s, starts_s = ([line[key] for _, line in rows] for key in ("ttft_s", "at_s"))
                panel.barh(places, waits_s, 0.75, left=starts_s, color=CLASS_COLOURS[kind], label=f"{kind} prompts")
            panel.set(title=arms[arm], xlabel="seconds", xlim=(0, ends_s * 1.02), yticks=[])
            panel.invert_yaxis()
            panel.grid(axis="x", alpha=0.3)
        axes[0].set_ylabel("requests, in order of arrival")


def headline_page(result: Result) -> str:
    """Stock, its best arm for shorts where that is another one, and ours, with ratios to both; where ``ride`` ran, ours
    with riding decodes beside them, as figures without a ratio.
    """
    best = result.get("best_stock", STOCK)
    rivals = [] if best == STOCK else [best]
    arms = [STOCK, *rivals, OURS, *([RIDE] if RIDE in result["figures"] else [])]
    of_arms = [result["figures"][arm] for arm in arms]
    work = result["workload"]
    gains = [gains_of(result["ratios"][OURS], result["short_last_token_p50_ratio"])]
    gains += [gains_of(result["vs_best_stock"], result["short_last_token_p50_vs_best_stock"]) for _ in rivals]
    rows = [
        [what, *(spread_text(of_arm[key][quantile], " s") for of_arm in of_arms), *(of[at] for of in gains)]
        for at, (what, key, quantile) in enumerate(
            (
                ("short prompts, TTFT p99", "short_ttft_s", "p99"),
                ("short prompts, TTFT p50", "short_ttft_s", "p50"),
                ("short prompts, last token p50", "short_e2e_s", "p50"),
                ("long prompts, TTFT p90", "long_ttft_s", "p90"),
            )
        )
    ]
    speeds = [spread_text(of_arm["tokens_per_s"], digits=4) for of_arm in of_arms]
    rows.append(["tokens/s", *speeds, *(of[-1] for of in gains)])
    what = f"longs {work['longs']}, shorts {work['shorts']}, chunk {work['chunk_tokens']}"
    heads = ["stock SGLang", *(f"its `{rival}`" for rival in rivals), "pla_sglang"]
    heads += ["and `--enable-mixed-chunk`"] if RIDE in arms else []
    heads += [f"pla_sglang, {GAIN}" if RIDE in arms else GAIN, *(f"than `{rival}`" for rival in rivals)]
    return f"{markdown([what, *heads], rows)}\n\n{conditions(result)} · command: `{command_of(result)}`"


def gains_of(ratio: Mapping[str, Mapping[str, float]], last_token_ratio: float | None) -> list[str]:
    """In the order of the rows: above 1 is better."""

    def times(name: str) -> str:
        return spread_text(inverse(ratio[name]), "x")

    return [
        spread_text(ratio["short_ttft_p99_gain"], "x"),
        times("short_ttft_p50_ratio"),
        f"{1 / last_token_ratio:.3g}x" if last_token_ratio else "-",
        times("long_ttft_p90_ratio"),
        spread_text(ratio["throughput_ratio"], "x"),
    ]


def command_of(result: Result) -> str:
    """What measured it, with the flags that are not defaults; before there were arms of stock, two arms were."""
    starts, arms = result["workload"].get("starts", 1), list(result["figures"])
    flags = [f"--starts {starts} --rounds {result['rounds'] // starts}"] if starts > 1 else []
    if arms not in ([*BEST_STOCK, OURS], [STOCK, OURS]):
        flags.append(f"--arms {','.join(arms)}")
    return f"make demo ARGS='{' '.join(flags)}'" if flags else "make demo"


def page(result: Result) -> str:
    return f"{arms_page(result)}\n\n{bound_text(result['solo']['ours'])}{starts_text(result)}"


def starts_text(result: Result) -> str:
    """Against the bound start by start, where the servers were started more than once."""
    by_start = [of_start["ours"] for of_start in result.get("by_start", ())]
    limits = [f"{of['short_ttft_p99_s'] * 1e3:.0f} of {of['short_ttft_p99_bound_s'] * 1e3:.0f} ms" for of in by_start]
    return f" Start by start: {', '.join(limits)}." if len(limits) > 1 else ""


PAGES = {
    "hol": page,
    "headline": headline_page,
    "hol-burst": arms_page,
    "hol-ablation": arms_page,
    "hol-peer": arms_page,
    "hol_emulated": hol_emulated.page,
}
