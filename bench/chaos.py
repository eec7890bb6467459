"""``python -m bench.chaos``: clients that go away, aborts, failed KV transfers, and instances that are killed.

A cluster on an emulated device behind our router gets Poisson arrivals. Some clients disconnect at a random time, some
requests are aborted at their prefill instance, KV transfers fail at random (``--transfer-failures``: each transfer with
the same probability; ``--poll-failures``: SGLang's own test switch, by the poll), and one prefill and one decode
instance are killed by SIGKILL and started again. Afterwards every token of what completed is checked, and nothing may
be left: ledger, gauges, KV. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.chaotic.after import Freed, Leftover, at_rest, decode_free, retry_counts
from bench.chaotic.faults import Fault, Faults
from bench.chaotic.judge import Verdict, judge
from bench.chaotic.picture import plot_chaos
from bench.lib.report import emit, environment, progress_bar, say, stdout
from bench.parity import workload
from bench.replaying.client import Record
from bench.replaying.cluster import running_cluster
from bench.replaying.rough import RoughReplay
from pla_sglang.metrics.goodput import quantile
from pla_sglang.testing.server import ServerError

TRANSFER_SWITCH = "SGLANG_TEST_DISAGG_FAILURE_PROB"  # of SGLang: each poll of a transfer fails so often


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.chaos", description=(__doc__ or "").split("\n\n")[1])
    made.add_argument("--requests", type=int, default=10_000)
    made.add_argument("--rate", type=float, default=12.0, help="requests/s")
    made.add_argument("--prefill", type=int, default=2)
    made.add_argument("--decode", type=int, default=2)
    made.add_argument("--policy", default="minimal-load")
    made.add_argument("--profile", default="h100-llama3.1-8b-tp1")
    made.add_argument("--time-scale", type=float, default=4.0)
    made.add_argument("--disconnect-share", type=float, default=0.1)
    made.add_argument("--abort-share", type=float, default=0.03)
    made.add_argument("--transfer-failures", type=float, default=0.05, help="share of KV transfers that fail")
    made.add_argument("--poll-failures", type=float, default=0.0, help="share of transfer polls that fail")
    made.add_argument("--no-kills", action="store_true")
    made.add_argument("--abort-probes", type=int, default=20, help="lone requests whose prefill is aborted")
    made.add_argument("--router-args", default="", help="further arguments of the router, quoted as one")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--quick", action="store_true", help="a small run that only shows that everything works")
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


def arguments(options: argparse.Namespace) -> list[str]:
    """Of the cluster."""
    fleet = ["--prefill", str(options.prefill), "--decode", str(options.decode)]
    told = f"--explain-requests {2 * options.requests} {options.router_args}"  # the judge asks about each that fails
    router = ["--router", "pla", "--policy", options.policy, f"--router-args={told}"]
    device = ["--pla-emulate", options.profile, "--pla-time-scale", str(options.time_scale)]
    device += ["--pla-emulate-kv-failures", str(options.transfer_failures)]
    return [*fleet, *router, *device, "--incremental-streaming-output"]


async def storm(described: dict[str, Any], state: Path, options: argparse.Namespace) -> tuple[list[Record], Faults]:
    """All requests and all faults."""
    rng = random.Random(options.seed)
    planned = workload(options.requests, options.rate, options.seed)
    end_s = planned[-1].at_s
    give_up_s = {one.index: rng.uniform(0.01, 4.0) for one in planned if rng.random() < options.disconnect_share}
    client = RoughReplay(described["url"], timeout_s=300, prefix=f"chaos-{options.seed}", give_up_s=give_up_s)
    faults = Faults(described, state)
    others = [one for one in planned if one.index not in give_up_s]
    for one in rng.sample(others, int(options.abort_share * len(planned))):
        faults.plan_abort(one.at_s + rng.uniform(0.02, 1.0), client.rid(one.index))
    if not options.no_kills:
        faults.plan_kill(end_s * 0.3, "prefill-0")
        faults.plan_kill(end_s * 0.6, "decode-0")
    with progress_bar("chaos", len(planned)) as advance:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(client.run(planned, on_done=advance))
            group.create_task(faults.run())
    return running.result(), faults


def result_of(
    verdict: Verdict, rest: Leftover, retries: dict[str, float], freed: list[Freed], requests: int
) -> dict[str, Any]:
    failed_transfers = retries["retried_after_transfer"] + verdict.by_transfer
    return {
        "requests": requests,
        "completed": verdict.completed,
        "failed": verdict.failed,
        "failed_not_in_flight_at_kill": verdict.wrongly_failed,
        "failed_in_flight_at_kill": verdict.at_kill,
        "failed_by_transfer": verdict.by_transfer,
        "failed_unexplained": verdict.unexplained,
        "aborted": verdict.aborted,
        "disconnected": verdict.gone,
        "tokens_wrong": verdict.tokens_wrong,
        **retries,
        "transfer_failure_share": failed_transfers / max(1.0, retries["dispatches"]),
        "ledger_balanced": rest.ledger_balanced,
        "gauges_zero": rest.gauges_zero,
        "kv_free": rest.kv_free,
        "leftovers": rest.details,
        **_spread("decode_free_after_abort", [one.after_abort_s for one in freed]),
        **_spread("decode_free_after_order", [one.after_order_s for one in freed]),
        "abort_probes": len(freed),
        "errors": verdict.examples,
    }


def _spread(name: str, seconds: list[float]) -> dict[str, float | None]:
    values = np.array(seconds)
    return {f"{name}_p{share}_s": quantile(values, share) if seconds else None for share in (50, 99)}


def run(options: argparse.Namespace) -> int:
    if options.quick:
        options.requests, options.abort_probes = 120, 3
    os.environ[TRANSFER_SWITCH] = str(options.poll_failures)
    state = options.out / "chaos.state.json"
    with running_cluster(arguments(options), options.out, "chaos") as described:
        records, faults = asyncio.run(storm(described, state, options))
        say("waiting until nothing is left")
        rest = asyncio.run(at_rest(described))
        verdict = judge(records, faults, described, prefix=f"chaos-{options.seed}")
        retries = asyncio.run(retry_counts(described))
        freed = asyncio.run(decode_free(described, options.abort_probes, options.seed))
    result = result_of(verdict, rest, retries, freed, options.requests)
    table = Table(title=f"chaos, {options.requests} requests, policy {options.policy}")
    for column in ("figure", "value"):
        table.add_column(column)
    for key, value in result.items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    stdout.print(table)
    plot_chaos(records, faults.done, options.out / "chaos.png")
    settings = {name: getattr(options, name) for name in ("seed", "rate", "policy", "profile", "time_scale")}
    faults_given = ("disconnect_share", "abort_share", "transfer_failures", "poll_failures")
    shares = {name: getattr(options, name) for name in faults_given}
    killed = [one.name for one in faults.done if one.kind is Fault.KILL]
    emit(
        {"bench": "chaos", **settings, **shares, "killed": killed, **result, "environment": environment()},
        options.out,
        "chaos",
    )
    good = not (verdict.wrongly_failed or verdict.tokens_wrong) and rest.ledger_balanced and rest.gauges_zero
    return 0 if good and rest.kv_free else 1


def main(argv: list[str] | None = None) -> int:
    try:
        return run(parser().parse_args(argv))
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
