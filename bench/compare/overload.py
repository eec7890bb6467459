"""What happens to longs under a permanent overload of shorts, and to both when the KV pool is full.

    python -m bench overload                    two streams of different length; a long must not wait for their end
    python -m bench overload --kv-pressure      the head-of-line workload on a pool of about two longs

Overload: a Poisson stream of shorts above what stock can serve, with a few longs in it. Under a scheduler that only
prefers shorts, a long ends when the stream ends, so its TTFT grows with the stream. Ours states a bound.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.harness.arms import BEST_STOCK, OURS, STOCK
from bench.harness.bench import BenchError, Result, is_complete
from bench.harness.comparison import Comparison, Measured, add_comparison, prepare_comparison
from bench.harness.fleet import Fleet, Solo, final_state, measure_solo, run_request_rounds
from bench.harness.load_client import Request, Run
from bench.harness.report import Cells, conditions, emit, markdown, say, show, spread_text, stdout
from bench.harness.stats import Runs, ttfts_s
from bench.harness.workload import HolShape, hol_requests, overload_requests, short_requests
from pla_sglang.common.errors import ConfigError
from pla_sglang.testing.server import ServerError

LONG_AT_SHARES = (0.2, 0.5)  # when the longs arrive, as shares of the stream
_CAPACITY_SHORTS = 60
KV_POOL_LONGS = 2.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_comparison(parser, rounds=1, arms=",".join((*BEST_STOCK, OURS)))
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


def prepare(args: argparse.Namespace) -> HolShape:
    prepare_comparison(args)
    if args.scale is None:
        args.scale = 5.0 if args.device == "cpu" else 1.0
    try:
        args.durations = [float(part) for part in args.durations_s.split(",")]
    except ValueError:
        raise ConfigError(f"--durations-s {args.durations_s!r} is not a list of numbers") from None
    if min(args.durations) <= 0 or args.load <= 0:
        raise ConfigError("--durations-s and --load have to be above 0")
    if args.quick:
        args.durations, args.scale = [1.0, 2.0], max(args.scale, 20.0)
    if not args.kv_pressure:
        args.our_flags += f" --pla-long-max-age-ms {args.long_max_age_s * 1e3:g}"
    shape = HolShape.of_issue(args.scale, max_new_tokens=args.kv_max_new_tokens if args.kv_pressure else 4)
    return replace(shape, chunk_tokens=args.chunk_tokens or shape.chunk_tokens)


async def measure_capacity(fleet: Fleet, shape: HolShape, args: argparse.Namespace) -> float:
    """Shorts per second that the first arm serves when it always has enough of them.

    Raises BenchError: a request of the calibration failed.
    """
    requests = short_requests(shape, args.vocabulary, [0.0] * _CAPACITY_SHORTS, seed=args.seed, round_index=-1)
    async with fleet.awake(fleet.members[0]) as client:
        run = await client.run(requests)
    if run.failed:
        raise BenchError(f"the capacity run failed: {run.failed[0].error}")
    capacity = _CAPACITY_SHORTS / run.makespan_s
    say(f"{fleet.members[0].name} serves {capacity:.1f} shorts per second")
    return capacity


# -- a stream of shorts above capacity ---------------------------------------------------------------------------------


async def run_streams(
    fleet: Fleet, shape: HolShape, args: argparse.Namespace, rate_per_s: float
) -> dict[str, dict[str, list[Run]]]:
    runs: dict[str, dict[str, list[Run]]] = {}
    for duration_s in args.durations:
        say(f"stream of {duration_s:g} s at {rate_per_s:.1f} shorts per second")

        def requests_of_round(index: int, duration_s: float = duration_s) -> list[Request]:
            return overload_requests(
                shape,
                args.vocabulary,
                seed=args.seed,
                round_index=index,
                rate_per_s=rate_per_s,
                duration_s=duration_s,
                long_at_shares=LONG_AT_SHARES,
            )

        runs[f"{duration_s:g}"] = await run_request_rounds(fleet, args.rounds, requests_of_round)
        if not is_complete():
            break
    return runs


def overload(args: argparse.Namespace, shape: HolShape) -> int:
    kv_tokens = 4 * shape.total_input_tokens  # so that memory is no part of the question
    sizes = {"chunk_tokens": shape.chunk_tokens, "tuned_chunk_tokens": shape.tuned_chunk_tokens}
    comparison = Comparison("overload", args, kv_tokens=kv_tokens, **sizes)

    async def measure(fleet: Fleet, _: int) -> tuple[float, dict[str, Solo], Mapping[str, Runs], dict[str, Any]]:
        solo = await measure_solo(fleet, shape, args.vocabulary, seed=args.seed)
        rate_per_s = args.rate or args.load * await measure_capacity(fleet, shape, args)
        by_stream = await run_streams(fleet, shape, args, rate_per_s)
        return rate_per_s, solo, by_stream, await final_state(fleet)

    ((rate_per_s, solo, by_stream, state),) = comparison.measure_starts(measure)
    measured = Measured.together([Measured(solo, runs, state) for runs in by_stream.values()])
    workload = {
        "name": "overload",
        "scale": args.scale,
        "durations_s": args.durations,
        "shorts_per_s": round(rate_per_s, 2),
        "load": args.load if args.rate is None else None,
        "short_tokens": shape.short_tokens,
        "long_tokens": shape.long_tokens,
        "longs_at": LONG_AT_SHARES,
        "chunk_tokens": shape.chunk_tokens,
    }
    result = comparison.make_result(workload, measured)
    slowest_long_s = max(of_arm.ttft_s["long"] for of_arm in solo.values())
    result |= overload_result(result["figures_of"], by_stream, bound_s=args.long_max_age_s + slowest_long_s)
    show("shorts above capacity, by length of the stream", *overload_table(result))
    stdout.print(bound_text(result))
    longest = max(by_stream, key=float)
    title = f"Shorts at {args.load:g}x capacity for {longest} s, {len(LONG_AT_SHARES)} longs"
    return comparison.keep(result, by_stream[longest], title=title)


def worst_s(runs: Runs) -> dict[str, float | None]:
    """Of the longs by arm; None where none got a first token: worse than any number."""
    ttft_s = {arm: ttfts_s(of_arm, "long") for arm, of_arm in runs.items()}
    return {arm: round(max(values), 4) if values else None for arm, values in ttft_s.items()}


def overload_result(headline: str | None, by_stream: Mapping[str, Runs], *, bound_s: float) -> dict[str, Any]:
    """``bound_s``: the age at which a long comes first, plus what a long takes alone.

    ``long_ttft_s``: the worst long per stream length. One that grows with the stream waits for its end.
    """
    arms = list(next(iter(by_stream.values())))
    worst = {key: worst_s(runs) for key, runs in by_stream.items()}
    longs = {arm: {key: of_stream[arm] for key, of_stream in worst.items()} for arm in arms}
    shorts = {
        arm: {key: round(statistics.fmean(ttfts_s(runs[arm], "short")), 4) for key, runs in by_stream.items()}
        for arm in arms
    }
    ratios = {}
    if STOCK in arms:  # whose default policy is first come, first served
        ratios = {arm: {key: round(shorts[arm][key] / shorts[STOCK][key], 4) for key in shorts[arm]} for arm in arms}
    chosen = headline or arms[0]
    return {
        "long_ttft_s": longs[chosen],
        "bound_s": round(bound_s, 3),
        "long_within_bound": all(value is not None and value <= bound_s for value in longs[chosen].values()),
        "short_ttft_mean_ratio_to_fcfs": ratios.get(chosen),
        "long_ttft_s_by_arm": longs,
        "short_ttft_mean_s_by_arm": shorts,
        "short_ttft_mean_ratio_to_fcfs_by_arm": ratios,
    }


def seconds_text(value: float | None) -> str:
    return "no answer" if value is None else f"{value:.2f} s"


def bound_text(result: Result) -> str:
    within = "within" if result["long_within_bound"] else "above"
    return f"Stated bound of ours for a long: {result['bound_s']:.2f} s; {within}."


def overload_table(result: Result) -> Cells:
    keys = list(result["long_ttft_s"])
    header = ["arm", *(f"worst long, {key} s" for key in keys), *(f"mean short, {key} s" for key in keys)]
    rows = []
    for arm, longs in result["long_ttft_s_by_arm"].items():
        shorts = result["short_ttft_mean_s_by_arm"][arm]
        ratio = result["short_ttft_mean_ratio_to_fcfs_by_arm"].get(arm, {})
        cells = [seconds_text(longs[key]) for key in keys] + [f"{shorts[key]:.2f} s" for key in keys]
        rows.append([arm, *cells, ", ".join(f"{ratio[key]:.2f}x" for key in keys if key in ratio)])
    return [*header, "mean short over that of stock, below 1: better"], rows


def overload_page(result: Result) -> str:
    e2e = ", ".join(f"{arm} {spread_text(of['short_e2e_s']['p50'], ' s')}" for arm, of in result["figures"].items())
    return (
        f"TTFT by length of the stream. {bound_text(result)} Shorts to their last token, median: {e2e}.\n\n"
        f"{markdown(*overload_table(result))}\n\n{conditions(result)}"
    )


# -- a pool of about two longs -----------------------------------------------------------------------------------------


class ServerDiedError(BenchError):
    """A server ended in the middle of the rounds, which is a result of this workload."""


def kv_pressure(args: argparse.Namespace, shape: HolShape) -> int:
    kv_tokens = round(KV_POOL_LONGS * (shape.long_tokens + shape.max_new_tokens))
    args.kv_tokens = args.kv_tokens or kv_tokens  # on a GPU too: a small pool is the point
    sizes = {"chunk_tokens": shape.chunk_tokens, "tuned_chunk_tokens": shape.tuned_chunk_tokens}
    comparison = Comparison("kv_pressure", args, kv_tokens=kv_tokens, **sizes)

    def requests_of_round(index: int) -> list[Request]:
        return hol_requests(shape, args.vocabulary, seed=args.seed, round_index=index, pattern="burst", burst_s=1.0)

    async def measure(fleet: Fleet, _: int) -> Measured:
        try:
            solo = await measure_solo(fleet, shape, args.vocabulary, seed=args.seed)
            runs = await run_request_rounds(fleet, args.rounds, requests_of_round)
            return Measured(solo, runs, await final_state(fleet))
        except ServerError as error:
            raise ServerDiedError(str(error)) from None

    try:
        (measured,) = comparison.measure_starts(measure)
    except ServerDiedError as error:
        say(f"[bold red]{error}[/bold red]")
        crash = {"bench": "kv_pressure", "crashed": True, "valid": False, "problems": [str(error)[:500]]}
        emit(crash, "kv_pressure", args.out)
        return 1
    workload = {"name": "kv_pressure", "pattern": "burst", "scale": args.scale, "pool_tokens": args.kv_tokens}
    workload |= {"long_tokens": shape.long_tokens, "short_tokens": shape.short_tokens}
    workload |= {"chunk_tokens": shape.chunk_tokens, "max_new_tokens": shape.max_new_tokens}
    result = comparison.make_result(workload, measured)
    ttft_s = {arm: of_arm.get("short_ttft_s") for arm, of_arm in result["figures"].items()}
    result |= {
        "worst_short_ttft_s": {arm: of_arm and of_arm["max"]["high"] for arm, of_arm in ttft_s.items()},
        "retractions": {arm: of_arm["retractions"] for arm, of_arm in result["figures"].items()},
        "crashed": False,
    }
    show("a KV pool of about two longs", *kv_pressure_table(result))
    title = f"KV pool of {args.kv_tokens} tokens, longs of {shape.long_tokens}"
    return comparison.keep(result, measured.runs, title=title)


def kv_pressure_table(result: Result) -> Cells:
    rows = []
    for arm, of_arm in result["figures"].items():
        short, long = (of_arm.get(f"{kind}_ttft_s") for kind in ("short", "long"))
        seconds = [short and short["max"]["high"], short and short["mean"]["median"], long and long["mean"]["median"]]
        rows.append([arm, *map(seconds_text, seconds), str(of_arm["retractions"]), str(of_arm["failed"])])
    return ["arm", "worst short TTFT", "mean short", "mean long", "retractions", "failed"], rows


def kv_pressure_page(result: Result) -> str:
    work = result["workload"]
    pool = f"Pool of {work['pool_tokens']:,} tokens, longs of {work['long_tokens']:,}, "
    pool += f"{work['max_new_tokens']} output tokens."
    return f"{pool}\n\n{markdown(*kv_pressure_table(result))}\n\n{conditions(result)}"


def run(args: argparse.Namespace) -> int:
    shape = prepare(args)
    return kv_pressure(args, shape) if args.kv_pressure else overload(args, shape)


PAGES = {"overload": overload_page, "kv-pressure": kv_pressure_page}
