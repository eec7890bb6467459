"""Time that our seams add to one scheduling pass, with many requests waiting.

Builds a real SGLang scheduler in this process (no event loop), fills its queue, and times passes: each pass is SGLang's
own ``_get_new_batch_prefill_raw`` with our hooks around it, and is undone afterwards, so every pass sees the same
queue. All that can decide does: requests have both targets, deadlines decide, and ``--riders`` requests run, whose
decodes may join (the host's own joining is left out, as it cannot be undone). The added time is that in our wrappers
less that in SGLang's function inside them, plus our step within it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

from bench.harness.bench import BenchError, Result, is_complete, measuring
from bench.harness.latency import percentile
from bench.harness.report import emit
from pla_sglang.common.errors import ConfigError

SHORT_TOKENS = (16, 128)
LONG_TOKENS = (1024, 4096)
SLO_TPOT_MS = 100.0
WARM_UP_PASSES = 20


def clocked(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """``function``, which adds what each of its calls took to ``seconds``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        started_s = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - started_s)
        return result

    return call


def build_full_scheduler(args: argparse.Namespace) -> Any:
    """A scheduler with ``--waiting`` requests in its queue."""
    from pla_sglang.plugin.config import PlaConfig
    from pla_sglang.plugin.demo import demo_model_path
    from pla_sglang.testing.scheduler import build_scheduler, make_request

    rng = random.Random(args.seed)
    flags = ["--model-path", str(demo_model_path()), "--device", "cpu", "--log-level", "error"]
    flags += ["--chunked-prefill-size", "2048", "--enable-mixed-chunk"]
    targets = {"slo_ttft_ms": args.slo_ttft_ms, "slo_tpot_ms": SLO_TPOT_MS}
    config = PlaConfig(prefill_disagg="temporal", deadlines="decide", **targets)
    scheduler = build_scheduler(flags, config)
    scheduler.pla.now_s = time.perf_counter()
    vocabulary = range(3, scheduler.model_config.vocab_size)
    for index in range(args.waiting):
        low, high = LONG_TOKENS if rng.random() < args.long_share else SHORT_TOKENS
        prompt = rng.choices(vocabulary, k=rng.randint(low, high))
        scheduler._add_request_to_queue(make_request(scheduler, f"r{index}", prompt, 16))
    return scheduler


def make_riders(scheduler: Any, count: int) -> list[Any]:
    """Requests that decode. From here on the host joins none to a pass."""
    from pla_sglang.testing.scheduler import keep_decodes_out, make_request

    riders = [make_request(scheduler, f"rider-{index}", range(3, 203), 64) for index in range(count)]
    for req in riders:
        req.kv_committed_len = 200
    keep_decodes_out()
    return riders


def running_batch_of(riders: list[Any]) -> Any:
    """As the host finds it, whatever it did with the one before."""
    from pla_sglang.testing.scheduler import empty_batch

    running = empty_batch()
    running.reqs = list(riders)
    running.filter_batch = running.prepare_for_decode = lambda *args, **kwargs: None
    running.check_decode_mem = lambda *args, **kwargs: True  # 0.5.23 asks before it joins them
    return running


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from pla_sglang.testing.scheduler import undo

    scheduler = build_full_scheduler(args)
    riders = make_riders(scheduler, args.riders)
    adapter, run_pass = scheduler.pla, scheduler.pla.run_pass
    whole_s, inside_s, ordering_s = list[float](), list[float](), list[float]()  # one figure a pass, each
    adapter.on_ordered = clocked(adapter.on_ordered, ordering_s)
    adapter.run_pass = clocked(lambda stock, args, kwargs: run_pass(clocked(stock, inside_s), args, kwargs), whole_s)
    with measuring():
        for _ in range(WARM_UP_PASSES + args.passes):
            adapter.now_s = time.perf_counter()
            running = running_batch_of(riders)
            batch, _ = scheduler._get_new_batch_prefill_raw(prefill_delayer_single_pass=None, running_batch=running)
            undo(scheduler, batch)
    times_s = [*zip(whole_s, inside_s, ordering_s, strict=is_complete())][WARM_UP_PASSES:]
    if not times_s:
        raise BenchError("no pass was measured")
    seconds = {
        "added": [whole - inside + ordering for whole, inside, ordering in times_s],
        "stock": [inside - ordering for _, inside, ordering in times_s],
    }
    return {
        "bench": "sched_pass",
        "waiting": args.waiting,
        "long_share": args.long_share,
        "riders": args.riders,
        "slo_ttft_ms": args.slo_ttft_ms,
        "passes": args.passes,
        **{f"{name}_p{q}_ms": round(percentile(of, q) * 1e3, 3) for name, of in seconds.items() for q in (50, 99)},
        "decisions": dict(scheduler.pla.telemetry.decisions),
        "hooks": scheduler.pla_hooks,
        "seed": args.seed,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--waiting", type=int, default=1000, help="requests in the queue")
    parser.add_argument("--passes", type=int, default=300, help="timed passes")
    parser.add_argument("--long-share", type=float, default=0.1, help="share of longs in the queue")
    parser.add_argument("--riders", type=int, default=32, help="requests that run, whose decodes may join the pass")
    parser.add_argument("--slo-ttft-ms", type=float, default=3_600_000.0, help="of all; a small one: most are lost")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    if args.waiting < 1 or args.passes < 1 or args.riders < 0 or not 0 <= args.long_share <= 1:
        raise ConfigError("--waiting and --passes must be at least 1, --riders at least 0, --long-share from 0 to 1")
    result = measure(args)
    print(page(result))
    emit(result, "sched_pass")
    return 0


def page(result: Result) -> str:
    return (
        f"{result['waiting']:,} waiting, {result['long_share']:.0%} of them long, {result['passes']} passes: "
        f"added by us p50 {result['added_p50_ms']:.2f} ms, p99 {result['added_p99_ms']:.2f} ms; SGLang's own pass p50 "
        f"{result['stock_p50_ms']:.2f} ms, p99 {result['stock_p99_ms']:.2f} ms."
    )


PAGES = {"sched_pass": page}
