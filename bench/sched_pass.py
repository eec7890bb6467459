"""Time that our seams add to one scheduling pass, with many requests waiting.

Builds a real SGLang scheduler in this process (no event loop), fills its queue, and times passes: each pass is SGLang's
own ``_get_new_batch_prefill_raw`` with our hooks around it, and is undone afterwards, so every pass sees the same
queue. The added time is the time in our wrappers less the time in SGLang's function inside them, plus our step within
it.

    python -m bench.sched_pass --waiting 1000 --passes 300
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

SHORT_TOKENS = (16, 128)
LONG_TOKENS = (1024, 4096)


class PassTimer:
    """Splits each pass into SGLang's share and ours by wrapping the adapter's two entry points."""

    def __init__(self, adapter: Any) -> None:
        self.added_s: list[float] = []
        self.stock_s: list[float] = []
        self._inside_s = self._ordered_s = 0.0
        self._run_pass, self._on_ordered = adapter.run_pass, adapter.on_ordered
        adapter.run_pass, adapter.on_ordered = self.run_pass, self.on_ordered

    def run_pass(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._inside_s = self._ordered_s = 0.0

        def timed(*a: Any, **kw: Any) -> Any:
            started_s = time.perf_counter()
            result = original(*a, **kw)
            self._inside_s = time.perf_counter() - started_s
            return result

        started_s = time.perf_counter()
        result = self._run_pass(timed, args, kwargs)
        total_s = time.perf_counter() - started_s
        self.added_s.append(total_s - self._inside_s + self._ordered_s)
        self.stock_s.append(self._inside_s - self._ordered_s)
        return result

    def on_ordered(self, queue: list[Any]) -> None:
        started_s = time.perf_counter()
        self._on_ordered(queue)
        self._ordered_s = time.perf_counter() - started_s


def fill(scheduler: Any, *, waiting: int, long_share: float, rng: random.Random) -> None:
    from pla_sglang.testing.scheduler import make_request

    for index in range(waiting):
        low, high = LONG_TOKENS if rng.random() < long_share else SHORT_TOKENS
        scheduler._add_request_to_queue(make_request(scheduler, f"r{index}", rng.randint(low, high), rng))


def run(args: argparse.Namespace) -> dict[str, Any]:
    from pla_sglang.config import PlaConfig
    from pla_sglang.testing.scheduler import build_scheduler, empty_batch, undo
    from pla_sglang.testing.tiny_model import make_tiny_model

    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder)
        flags = ["--model-path", folder, "--device", "cpu", "--disable-overlap-schedule", "--log-level", "error"]
        scheduler = build_scheduler([*flags, "--chunked-prefill-size", "2048"], PlaConfig(prefill_disagg="temporal"))
    adapter = scheduler.pla
    adapter.now_s = time.perf_counter()
    fill(scheduler, waiting=args.waiting, long_share=args.long_share, rng=rng)
    timer = PassTimer(adapter)
    for index in range(args.warmup + args.passes):
        if index == args.warmup:
            timer.added_s.clear()
            timer.stock_s.clear()
        adapter.now_s = time.perf_counter()
        batch, _ = scheduler._get_new_batch_prefill_raw(prefill_delayer_single_pass=None, running_batch=empty_batch())
        undo(scheduler, batch)
    return report(args, timer, scheduler)


def report(args: argparse.Namespace, timer: PassTimer, scheduler: Any) -> dict[str, Any]:
    added, stock = quantiles_ms(timer.added_s), quantiles_ms(timer.stock_s)
    return {
        "bench": "sched_pass",
        "waiting": args.waiting,
        "long_share": args.long_share,
        "passes": args.passes,
        "added_p50_ms": added[0],
        "added_p99_ms": added[1],
        "stock_p50_ms": stock[0],
        "stock_p99_ms": stock[1],
        "decisions": dict(scheduler.pla.telemetry.decisions),
        "hooks": scheduler.pla_hooks,
        "seed": args.seed,
    }


def quantiles_ms(seconds: list[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds, rounded to a microsecond."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return round(cuts[49] * 1e3, 3), round(cuts[98] * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=1000, help="requests in the queue (default 1000)")
    parser.add_argument("--passes", type=int, default=300, help="timed passes (default 300)")
    parser.add_argument("--warmup", type=int, default=20, help="passes before timing starts (default 20)")
    parser.add_argument("--long-share", type=float, default=0.1, help="share of longs in the queue (default 0.1)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.waiting < 1 or args.passes < 2 or not 0 <= args.long_share <= 1:
        parser.error("--waiting must be at least 1, --passes at least 2, --long-share from 0 to 1")
    result = run(args)
    print(f"{args.waiting} waiting, {args.passes} passes: p50 / p99")
    print(f"  SGLang's own pass  {result['stock_p50_ms']:8.3f} / {result['stock_p99_ms']:8.3f} ms")
    print(f"  added by us        {result['added_p50_ms']:8.3f} / {result['added_p99_ms']:8.3f} ms")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
