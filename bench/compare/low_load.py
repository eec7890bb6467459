"""Short prompts only, one at a time: what our scheduler costs where it has nothing to win, and what it costs when off.

    python -m bench low_load

Requests never meet each other. ``ours`` should have the median TTFT of stock, and so should ``off``.
"""

from __future__ import annotations

import argparse

from bench.harness.arms import STOCK
from bench.harness.bench import Result
from bench.harness.comparison import Comparison, Measured, add_comparison, prepare_comparison
from bench.harness.fleet import Fleet, final_state, measure_solo, run_request_rounds
from bench.harness.load_client import Request
from bench.harness.report import conditions, spread_text
from bench.harness.workload import HolShape, gapped_arrivals, round_rng, short_requests

# In units of the solo time of a whole request: the smallest gap still lets the previous one end.
GAP_LOW, GAP_HIGH = 2.0, 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_comparison(parser, rounds=5, arms="stock,ours,off", starts=4)
    work = parser.add_argument_group("workload")
    work.add_argument("--requests", type=int, default=20, help="requests per round")
    work.add_argument("--short-tokens", type=int, help="prompt length; default: 400 on a CPU, 2000 on a GPU")
    work.add_argument("--max-new-tokens", type=int, default=4, help="output length of every request")


def run(args: argparse.Namespace) -> int:
    prepare_comparison(args)
    args.short_tokens = args.short_tokens or (400 if args.device == "cpu" else 2000)
    if args.quick:
        args.requests, args.starts = min(args.requests, 10), 1
    chunk_tokens = 2 * args.short_tokens
    shape = HolShape(0, chunk_tokens, args.requests, args.short_tokens, chunk_tokens, args.max_new_tokens)

    async def measure(fleet: Fleet, start: int) -> Measured:
        solo = await measure_solo(fleet, shape, args.vocabulary, seed=args.seed, kinds=("short",))
        service_s = max(outcome.e2e_s for outcome in solo[fleet.members[0].name].outcomes)

        def requests_of_round(index: int) -> list[Request]:
            index += start * args.rounds
            rng = round_rng(args.seed, index, "low")
            gaps = {"gap_low_s": GAP_LOW * service_s, "gap_high_s": GAP_HIGH * service_s}
            arrivals_s = gapped_arrivals(rng, count=args.requests, **gaps)
            return short_requests(shape, args.vocabulary, arrivals_s, seed=args.seed, round_index=index)

        runs = await run_request_rounds(fleet, args.rounds, requests_of_round)
        return Measured(solo, runs, await final_state(fleet))

    comparison = Comparison("low_load", args, chunk_tokens=chunk_tokens, kv_tokens=64 * args.short_tokens)
    measured = Measured.together(comparison.measure_starts(measure))
    workload = {
        "name": "low",
        "requests": args.requests,
        "short_tokens": args.short_tokens,
        "max_new_tokens": args.max_new_tokens,
        "gap_in_solo_times": [GAP_LOW, GAP_HIGH],
        "starts": args.starts,
    }
    result = comparison.make_result(workload, measured)
    by_arm = {arm: of_arm["short_ttft_p50_ratio"] for arm, of_arm in result["ratios"].items()}
    result |= {"short_ttft_p50_ratio_by_arm": by_arm, "off_ratio": by_arm.get("off", {}).get("median")}
    sizes = f"{args.requests} x {args.short_tokens} tokens a round"
    title = f"Shorts alone: {sizes}, {comparison.rounds} rounds, against {STOCK}"
    comparison.show_tables(title, result)
    return comparison.keep(result, measured.runs, title=title)


def page(result: Result) -> str:
    ratios = {arm: spread_text(result["ratios"][arm]["short_ttft_p50_ratio"], "x") for arm in ("ours", "off")}
    solo = ", ".join(f"{arm} {spread_text(of['short_ttft_s']['p50'])}" for arm, of in result["figures"].items())
    starts = result["workload"]["starts"]
    return (
        f"Median TTFT against stock: ours {ratios['ours']}, off {ratios['off']}. In seconds: {solo}.\n\n"
        f"{starts} starts of all servers · {conditions(result)}"
    )


PAGES = {"low_load": page}
