"""What happens to longs under a permanent overload of shorts, and to both when the KV pool is full.

    python -m bench.overload                    two streams of different length; a long must not wait for their end
    python -m bench.overload --kv-pressure      the head-of-line workload on a pool of about two longs

Overload: a Poisson stream of shorts above what stock can serve, with a few longs in it. Under a scheduler that only
prefers shorts, a long ends when the stream ends, so its TTFT grows with the stream. Ours states a bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from bench.lib import report
from bench.lib.cli import BenchError, arms_of, check_common, make_fleet, make_parser, run_bench, vocabulary_of
from bench.lib.client import Run
from bench.lib.compare import Solo, final_state, measure_solo, run_request_rounds
from bench.lib.fleet import Fleet
from bench.lib.overload_report import duration_key, kv_pressure_result, overload_result, print_kv, print_overload
from bench.lib.results import comparison_result, headline, keep
from bench.lib.server import ServerError
from bench.lib.stats import Runs
from bench.lib.workload import HolShape, Request, hol_requests, overload_requests, short_requests

LONG_AT_SHARES = (0.2, 0.5)  # when the longs arrive, as shares of the stream
_CAPACITY_SHORTS = 60
KV_POOL_LONGS = 2.1


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = make_parser("overload", (__doc__ or "").partition("\n")[0], rounds=1)
    work = parser.add_argument_group("workload")
    work.add_argument("--scale", type=float, help="divides prompt lengths and chunk; default: 5 on a CPU, 1 on a GPU")
    work.add_argument("--durations-s", default="10,20", help="lengths of the streams, comma-separated")
    work.add_argument("--load", type=float, default=1.2, help="arrival rate over stock's measured capacity for shorts")
    work.add_argument("--rate", type=float, help="shorts per second instead of --load")
    work.add_argument("--long-max-age-s", type=float, default=3.0, help="--pla-long-max-age-ms of our arms, in seconds")
    work.add_argument("--chunk-tokens", type=int, help="--chunked-prefill-size of every arm; default: 8192 / scale")
    pressure = parser.add_argument_group("KV pressure")
    pressure.add_argument("--kv-pressure", action="store_true", help="run this workload instead")
    pressure.add_argument("--kv-max-new-tokens", type=int, default=64, help="output length: what fills the pool")
    args = parser.parse_args(argv)
    check_common(args, parser)
    args.scale = args.scale or (5.0 if args.device == "cpu" else 1.0)
    try:
        args.durations = [float(part) for part in args.durations_s.split(",")]
    except ValueError:
        parser.error(f"--durations-s {args.durations_s!r} is not a list of numbers")
    if min(args.durations) <= 0 or args.load <= 0:
        parser.error("--durations-s and --load have to be above 0")
    if args.quick:
        args.durations, args.scale = [1.0, 2.0], max(args.scale, 20.0)
    if not args.kv_pressure:
        args.our_flags += f" --pla-long-max-age-ms {args.long_max_age_s * 1e3:g}"
    return args


async def measure_capacity(fleet: Fleet, shape: HolShape, args: argparse.Namespace) -> float:
    """Shorts per second that the first arm serves when it always has enough of them.

    Raises:
        BenchError: a request of the calibration failed.
    """
    requests = short_requests(shape, vocabulary_of(args), [0.0] * _CAPACITY_SHORTS, seed=args.seed, round_index=-1)
    async with fleet.awake(fleet.members[0]) as client:
        run = await client.run(requests)
    if run.failed:
        raise BenchError(f"the capacity run failed: {run.failed[0].error}")
    capacity = _CAPACITY_SHORTS / run.makespan_s
    report.say(f"{fleet.members[0].name} serves {capacity:.1f} shorts per second")
    return capacity


async def run_streams(
    fleet: Fleet, shape: HolShape, args: argparse.Namespace, rate_per_s: float
) -> dict[float, dict[str, list[Run]]]:
    vocabulary = vocabulary_of(args)
    runs: dict[float, dict[str, list[Run]]] = {}
    for duration_s in args.durations:
        report.say(f"stream of {duration_s:g} s at {rate_per_s:.1f} shorts per second")

        def requests_of_round(index: int, duration_s: float = duration_s) -> list[Request]:
            return overload_requests(
                shape,
                vocabulary,
                seed=args.seed,
                round_index=index,
                rate_per_s=rate_per_s,
                duration_s=duration_s,
                long_at_shares=LONG_AT_SHARES,
            )

        runs[duration_s] = await run_request_rounds(fleet, args.rounds, requests_of_round)
    return runs


def joined(runs: Mapping[float, Mapping[str, list[Run]]]) -> dict[str, list[Run]]:
    arms = next(iter(runs.values()))
    return {arm: [run for of_duration in runs.values() for run in of_duration[arm]] for arm in arms}


async def overload(args: argparse.Namespace) -> int:
    shape = HolShape.of_issue(args.scale, max_new_tokens=4)
    chunk_tokens = args.chunk_tokens or shape.chunk_tokens
    kv_tokens = 4 * shape.total_input_tokens  # so that memory is no part of the question
    async with make_fleet(
        args, arms_of(args), chunk_tokens=chunk_tokens, kv_tokens=kv_tokens, bench="overload"
    ) as fleet:
        solo = await measure_solo(fleet, shape, vocabulary_of(args), seed=args.seed)
        rate_per_s = args.rate or args.load * await measure_capacity(fleet, shape, args)
        by_duration = await run_streams(fleet, shape, args, rate_per_s)
        state = await final_state(fleet)
    runs = joined(by_duration)
    workload: dict[str, Any] = {
        "name": "overload",
        "scale": args.scale,
        "durations_s": args.durations,
        "shorts_per_s": round(rate_per_s, 2),
        "load": args.load if args.rate is None else None,
        "short_tokens": shape.short_tokens,
        "long_tokens": shape.long_tokens,
        "longs_at": LONG_AT_SHARES,
        "chunk_tokens": chunk_tokens,
    }
    result = comparison_result("overload", args, workload, runs, state, solo=solo)
    slowest_long_s = max(of_arm.ttft_s["long"] for of_arm in solo.values())
    result |= overload_result(by_duration, bound_s=args.long_max_age_s + slowest_long_s)
    print_overload(result)
    headline(result, runs)
    longest = duration_key(max(args.durations))
    title = f"Shorts at {args.load:g}x capacity for {longest} s, {len(LONG_AT_SHARES)} longs"
    return keep("overload", result, by_duration[max(args.durations)], args.out, title=title)


async def kv_pressure(args: argparse.Namespace) -> int:
    shape = HolShape.of_issue(args.scale, max_new_tokens=args.kv_max_new_tokens)
    chunk_tokens = args.chunk_tokens or shape.chunk_tokens
    kv_tokens = round(KV_POOL_LONGS * (shape.long_tokens + shape.max_new_tokens))
    args.kv_tokens = args.kv_tokens or kv_tokens  # on a GPU too: a small pool is the point
    died: str | None = None
    runs: Runs = {}
    solo: dict[str, Solo] = {}
    async with make_fleet(
        args, arms_of(args), chunk_tokens=chunk_tokens, kv_tokens=kv_tokens, bench="overload"
    ) as fleet:
        vocabulary = vocabulary_of(args)

        def requests_of_round(index: int) -> list[Request]:
            return hol_requests(shape, vocabulary, seed=args.seed, round_index=index, pattern="burst", burst_s=1.0)

        try:
            solo = await measure_solo(fleet, shape, vocabulary, seed=args.seed)
            runs = await run_request_rounds(fleet, args.rounds, requests_of_round)
            state = await final_state(fleet)
        except ServerError as error:
            died = str(error)
            report.say(f"[bold red]{died}[/bold red]")
    if died is not None:
        crash = {"bench": "kv_pressure", "crashed": True, "valid": False, "problems": [died[:500]]}
        report.emit(crash, args.out, "kv_pressure")
        return 1
    workload = {"name": "kv_pressure", "pattern": "burst", "scale": args.scale, "pool_tokens": args.kv_tokens}
    workload |= {"long_tokens": shape.long_tokens, "short_tokens": shape.short_tokens}
    workload |= {"chunk_tokens": chunk_tokens, "max_new_tokens": shape.max_new_tokens}
    result = comparison_result("kv_pressure", args, workload, runs, state, solo=solo) | kv_pressure_result(runs)
    print_kv(result, runs)
    headline(result, runs)
    title = f"KV pool of {args.kv_tokens} tokens, longs of {shape.long_tokens}"
    return keep("kv_pressure", result, runs, args.out, title=title)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    return run_bench(lambda: kv_pressure(args) if args.kv_pressure else overload(args))


if __name__ == "__main__":
    sys.exit(main())
