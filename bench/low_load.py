"""Short prompts only, one at a time: what our scheduler costs where it has nothing to win, and what it costs when off.

    python -m bench.low_load

Requests never meet each other. ``ours`` should have the median TTFT of stock, and so should ``off``.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from bench.lib import report
from bench.lib.arms import STOCK
from bench.lib.cli import arms_of, check_common, make_fleet, make_parser, run_bench, vocabulary_of
from bench.lib.compare import Solo, final_state, measure_solo, run_request_rounds
from bench.lib.results import comparison_result, headline, keep, ratios_to_stock
from bench.lib.stats import Runs, as_json
from bench.lib.workload import HolShape, Request, gapped_arrivals, round_rng, short_requests

# In units of the solo time of a whole request: the smallest gap still lets the previous one end.
GAP_LOW, GAP_HIGH = 2.0, 5.0


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = make_parser("low_load", (__doc__ or "").partition("\n")[0], rounds=5, arms="stock,ours,off")
    work = parser.add_argument_group("workload")
    work.add_argument("--requests", type=int, default=20, help="requests per round")
    work.add_argument("--starts", type=int, default=4, help="starts of all servers, each with --rounds of its own")
    work.add_argument("--short-tokens", type=int, help="prompt length; default: 400 on a CPU, 2000 on a GPU")
    work.add_argument("--max-new-tokens", type=int, default=4, help="output length of every request")
    args = parser.parse_args(argv)
    check_common(args, parser)
    args.short_tokens = args.short_tokens or (400 if args.device == "cpu" else 2000)
    if args.quick:
        args.rounds, args.requests, args.starts = min(args.rounds, 2), min(args.requests, 10), 1
    if args.starts < 1:
        parser.error(f"--starts must be at least 1, got {args.starts}")
    return args


async def measure(args: argparse.Namespace, start: int) -> tuple[Runs, dict[str, Solo], dict[str, Any]]:
    """Start all servers and run ``--rounds``. Returns runs, solo values and the state of the measured servers.

    Two processes of the same program differ by a few per cent in speed, as their memory lies differently. So the
    servers are started several times.
    """
    chunk_tokens = 2 * args.short_tokens
    shape = HolShape(0, chunk_tokens, args.requests, args.short_tokens, chunk_tokens, args.max_new_tokens)
    vocabulary = vocabulary_of(args)
    kv_tokens = 64 * args.short_tokens
    async with make_fleet(
        args, arms_of(args), chunk_tokens=chunk_tokens, kv_tokens=kv_tokens, bench="low_load"
    ) as fleet:
        solo = await measure_solo(fleet, shape, vocabulary, seed=args.seed, kinds=("short",))
        service_s = max(outcome.e2e_s for outcome in solo[fleet.members[0].name].outcomes)

        def requests_of_round(index: int) -> list[Request]:
            index += start * args.rounds
            rng = round_rng(args.seed, index, "low")
            gaps = {"gap_low_s": GAP_LOW * service_s, "gap_high_s": GAP_HIGH * service_s}
            arrivals_s = gapped_arrivals(rng, count=args.requests, **gaps)
            return short_requests(shape, vocabulary, arrivals_s, seed=args.seed, round_index=index)

        runs = await run_request_rounds(fleet, args.rounds, requests_of_round)
        return runs, solo, await final_state(fleet)


async def bench(args: argparse.Namespace) -> int:
    runs: Runs = {}
    solo: dict[str, Solo] = {}
    for start in range(args.starts):
        report.say(f"start {start + 1} of {args.starts}")
        of_start, solo, state = await measure(args, start)
        runs = {arm: [*runs.get(arm, []), *found] for arm, found in of_start.items()}
    args.rounds *= args.starts
    workload: dict[str, Any] = {
        "name": "low",
        "requests": args.requests,
        "short_tokens": args.short_tokens,
        "max_new_tokens": args.max_new_tokens,
        "gap_in_solo_times": [GAP_LOW, GAP_HIGH],
        "starts": args.starts,
    }
    against = ratios_to_stock(runs)
    per_arm = {arm: as_json(found["short_ttft_p50_ratio"]) for arm, found in against.items()}
    result = comparison_result("low_load", args, workload, runs, state, solo=solo)
    result["short_ttft_p50_ratio_by_arm"] = per_arm
    result["off_ratio"] = per_arm.get("off", {}).get("median")
    title = f"Shorts alone: {args.requests} x {args.short_tokens} tokens a round, {args.rounds} rounds, against {STOCK}"
    report.print_latency_table(title, runs)
    report.print_arm_table(runs, against)
    headline(result, runs)
    return keep("low_load", result, runs, args.out, title=title)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    return run_bench(lambda: bench(args))


if __name__ == "__main__":
    sys.exit(main())
