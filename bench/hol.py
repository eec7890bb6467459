"""Head-of-line blocking: 18 long and 11 short prompts, after SGLang issue #22831, on stock SGLang and on ours.

    python -m bench.hol                      scaled to the machine
    python -m bench.hol --scale 1            the issue's own lengths, for a GPU
    python -m bench.hol --ablation           which part brings what
    python -m bench.hol --peer 'spf=/path/to/python:--schedule-policy shortest-prefill-first'

"short" in every figure means the issue's 2K prompts, "long" its 24K prompts, whatever class a boundary gives them.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.lib import report
from bench.lib.arms import STOCK
from bench.lib.cli import arms_of, check_common, make_fleet, make_parser, run_bench, vocabulary_of
from bench.lib.compare import Solo, final_state, measure_last_chunk, measure_solo, run_request_rounds
from bench.lib.fleet import Fleet
from bench.lib.results import HEADLINE, comparison_result, headline, keep, ratios_to_stock
from bench.lib.stats import Runs, per_round
from bench.lib.workload import PATTERNS, HolShape, Request, hol_requests
from pla_sglang.metrics.latency import spread

# On the demo model and one core: a long takes 0.7 to 1.0 s alone, a comparison of two arms under six minutes.
CPU_SCALE = 5.0
QUICK_SCALE = 20.0


class Windows(NamedTuple):
    """Over which the longs and the shorts of one round arrive."""

    burst_s: float
    spread_s: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one start of all servers, or of several together.

    Attributes:
        solo: lone requests by arm.
        chunk_s: seconds of the longest chunk by arm.
        runs: rounds by arm.
        windows: when requests arrived.
        state: of the measured servers at the end.
    """

    solo: Mapping[str, Solo]
    chunk_s: Mapping[str, float]
    runs: Runs
    windows: Windows
    state: Mapping[str, Any]

    @classmethod
    def together(cls, starts: Sequence[Measured]) -> Measured:
        """All rounds; medians over the starts of what was measured once a start."""
        arms = list(starts[0].runs)
        return cls(
            solo={arm: Solo.together([start.solo[arm] for start in starts]) for arm in arms},
            chunk_s={arm: statistics.median(start.chunk_s[arm] for start in starts) for arm in arms},
            runs={arm: [run for start in starts for run in start.runs[arm]] for arm in arms},
            windows=starts[0].windows,
            state=starts[-1].state,
        )


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = make_parser("hol", (__doc__ or "").partition("\n")[0], rounds=5)
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--scale", type=float, help=f"divides prompt lengths and chunk; default: {CPU_SCALE:g} on a CPU, 1 on a GPU"
    )
    work.add_argument(
        "--pattern", choices=PATTERNS, default="stream", help="shorts spread over the longs' work, or all at once"
    )
    work.add_argument(
        "--burst-s",
        type=float,
        help="window in which the longs (or all) arrive; default: work / 10, at most 1",
    )
    work.add_argument("--spread-s", type=float, help="window of the shorts; default: what the longs take, measured")
    work.add_argument("--chunk-tokens", type=int, help="--chunked-prefill-size of every arm; default: 8192 / scale")
    work.add_argument("--max-new-tokens", type=int, default=8, help="output length of every request")
    work.add_argument("--starts", type=int, default=1, help="starts of all servers, each with --rounds of its own")
    args = parser.parse_args(argv)
    check_common(args, parser)
    if args.scale is None:
        args.scale = (QUICK_SCALE if args.quick else CPU_SCALE) if args.device == "cpu" else 1.0
    if args.scale <= 0:
        parser.error(f"--scale {args.scale:g} is out of range; allowed: above 0")
    if args.starts < 1:
        parser.error(f"--starts {args.starts} is out of range; allowed: at least 1")
    if args.quick:
        args.rounds = min(args.rounds, 2)
    return args


def shape_of(args: argparse.Namespace) -> HolShape:
    shape = HolShape.of_issue(args.scale, max_new_tokens=args.max_new_tokens)
    return shape.with_counts(6, 4) if args.quick else shape


def workload_json(args: argparse.Namespace, shape: HolShape, windows: Windows) -> dict[str, Any]:
    return {
        "name": "hol",
        "pattern": args.pattern,
        "scale": args.scale,
        "longs": f"{shape.long_count} x {shape.long_tokens} tokens",
        "shorts": f"{shape.short_count} x {shape.short_tokens} tokens",
        "chunk_tokens": args.chunk_tokens or shape.chunk_tokens,
        "max_new_tokens": shape.max_new_tokens,
        "burst_s": round(windows.burst_s, 2),
        "spread_s": round(windows.spread_s, 2),
        "starts": args.starts,
    }


def windows_of(args: argparse.Namespace, long_work_s: float) -> Windows:
    """What the user gave, else from the time that the longs of one round need one after the other."""
    return Windows(
        burst_s=args.burst_s if args.burst_s is not None else min(1.0, long_work_s / 10),
        spread_s=args.spread_s if args.spread_s is not None else long_work_s,
    )


async def measure(args: argparse.Namespace, fleet: Fleet, shape: HolShape, chunk_tokens: int, start: int) -> Measured:
    """All rounds of one start of the servers. Two processes of the same program differ: memory, and what they learn."""
    vocabulary = vocabulary_of(args)
    solo = await measure_solo(fleet, shape, vocabulary, seed=args.seed)
    chunk_s = await measure_last_chunk(fleet, shape, vocabulary, solo, chunk_tokens=chunk_tokens, seed=args.seed)
    # The fastest lone long of any arm: if the machine is slower later, shorts still meet running longs.
    fastest_s = min(o.ttft_s for one in solo.values() for o in one.outcomes if o.request.kind == "long")
    windows = windows_of(args, shape.long_count * fastest_s)

    def requests_of_round(index: int) -> list[Request]:
        return hol_requests(
            shape,
            vocabulary,
            seed=args.seed,
            round_index=start * args.rounds + index,
            pattern=args.pattern,
            burst_s=windows.burst_s,
            spread_s=windows.spread_s,
        )

    runs = await run_request_rounds(fleet, args.rounds, requests_of_round)
    return Measured(solo, chunk_s, runs, windows, await final_state(fleet))


def solo_bound(solo: Solo, chunk_s: float, p99_s: float) -> dict[str, Any]:
    """The p99 of shorts may be five times their solo value plus one chunk of a long, the longest."""
    bound_s = 5 * solo.ttft_s["short"] + chunk_s
    return {
        "short_solo_ttft_s": round(solo.ttft_s["short"], 4),
        "long_solo_ttft_s": round(solo.ttft_s["long"], 4),
        "long_chunk_s": round(chunk_s, 4),
        "short_ttft_p99_bound_s": round(bound_s, 4),
        "short_ttft_p99_s": round(p99_s, 4),
        "short_ttft_p99_within_bound": p99_s <= bound_s,
    }


def bounds(solo: Mapping[str, Solo], chunk_s: Mapping[str, float], runs: Runs) -> dict[str, Any]:
    return {
        arm: solo_bound(solo[arm], chunk_s[arm], spread(per_round(of_arm, "short", "p99")).median)
        for arm, of_arm in runs.items()
        if per_round(of_arm, "short", "p99")
    }


def print_bounds(found: Mapping[str, Mapping[str, Any]]) -> None:
    for arm, bound in found.items():
        verdict = "within" if bound["short_ttft_p99_within_bound"] else "above"
        report.stdout.print(
            f"{arm}: short p99 {bound['short_ttft_p99_s'] * 1e3:,.0f} ms; "
            f"5 x solo ({bound['short_solo_ttft_s'] * 1e3:,.0f} ms)"
            f" + the longest chunk ({bound['long_chunk_s'] * 1e3:,.0f} ms)"
            f" = {bound['short_ttft_p99_bound_s'] * 1e3:,.0f} ms: {verdict}"
        )


def start_json(measured: Measured) -> dict[str, Any]:
    """The headline figures of one start, by arm: how far starts differ is part of the result."""
    against = ratios_to_stock(measured.runs)
    found = bounds(measured.solo, measured.chunk_s, measured.runs)
    return {
        arm: {key: round(against[arm][key].median, 4) for key in HEADLINE if key in against[arm]}
        | {key: found[arm][key] for key in ("short_ttft_p99_s", "short_ttft_p99_bound_s") if arm in found}
        for arm in against
    }


def print_starts(by_start: Sequence[Mapping[str, Mapping[str, float]]]) -> None:
    if len(by_start) < 2:
        return
    for index, of_start in enumerate(by_start, start=1):
        for arm, figures in of_start.items():
            listed = ", ".join(f"{key} {value:.3g}" for key, value in figures.items())
            report.stdout.print(f"start {index}, {arm}: {listed}", markup=False)


async def measure_starts(args: argparse.Namespace, shape: HolShape, chunk_tokens: int) -> list[Measured]:
    # Room for all of it twice: this bench is about time, not about memory (bench.overload --kv-pressure is).
    kv_tokens = 2 * shape.total_input_tokens + 4096
    starts = []
    for start in range(args.starts):
        if args.starts > 1:
            report.say(f"start {start + 1} of {args.starts}")
        async with make_fleet(
            args, arms_of(args), chunk_tokens=chunk_tokens, kv_tokens=kv_tokens, bench="hol"
        ) as fleet:
            starts.append(await measure(args, fleet, shape, chunk_tokens, start))
    return starts


async def bench(args: argparse.Namespace) -> int:
    shape = shape_of(args)
    chunk_tokens = args.chunk_tokens or shape.chunk_tokens
    starts = await measure_starts(args, shape, chunk_tokens)
    args.rounds *= args.starts
    whole = Measured.together(starts)
    runs, solo = whole.runs, whole.solo
    workload = workload_json(args, shape, whole.windows)
    found_bounds = bounds(solo, whole.chunk_s, runs)
    result = comparison_result("hol", args, workload, runs, whole.state, solo=solo)
    result |= {"solo": found_bounds, "by_start": [start_json(start) for start in starts]}
    title = (
        f"Head-of-line blocking, {args.pattern}: {workload['longs']}, {workload['shorts']}, chunk {chunk_tokens}, "
        f"{args.rounds} rounds, {args.model_name}, SGLang {whole.state['sglang_version']}"
    )
    report.print_latency_table(title, runs)
    report.print_arm_table(runs, ratios_to_stock(runs))
    print_starts(result["by_start"])
    print_bounds(found_bounds)
    headline(result, runs)
    reference = solo[STOCK if STOCK in solo else next(iter(solo))].ttft_s
    return keep("hol", result, runs, args.out, title=title, solo_s=dict(reference))


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    return run_bench(lambda: bench(args))


if __name__ == "__main__":
    sys.exit(main())
