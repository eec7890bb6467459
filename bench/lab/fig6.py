"""PLA-Serve Fig. 6 in small on emulated engines: short chats on one prefill instance, stock against temporal.

    python -m bench fig6 --device emulated

The load is that of ``bench gpu``: clients in a closed loop, each with conversations of eight turns, messages of at most
255 tokens, one answer token as on a prefill instance, chunks of 2,048. One engine after the other at each number of
clients, the order turned from one to the next; all times are the device's. Every token is checked.

``by_clients``: requests/s and P90 of temporal scheduling over stock's. ``h100``: the emulated figures over those that
one H100 gave the same load, single runs; its temporal figures are of a rule that only ``apart`` still resembles, so the
largest errors are those of stock. ``gap_ms_a_pass``: what a pass cost the device beside its tokens. A row whose host
was in the way for more than ``--max-overhead`` is not valid.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.gpu.chats import HISTORY_TOKENS, make_sessions, send_load
from bench.harness import report
from bench.harness.arms import STOCK, Arm
from bench.harness.bench import ROOT, Result, measuring
from bench.harness.cli import add_budget, add_max_overhead, add_output, add_quick
from bench.harness.engines import Setup, choose, server_of
from bench.harness.latency import percentile
from bench.harness.servers import count_passes, flush_cache, host_overhead_share, read_boundary, read_device
from bench.harness.steps import Row, Steps
from pla_sglang.common.reading import read_json
from pla_sglang.sim import chain
from pla_sglang.testing.server import Server, ServerError

PROFILE = "h100-qwen2.5-7b-tp1"
CLIENTS = (1, 4, 16, 64)
CHUNK_TOKENS = 2048
WARM_SHARE = 0.25  # of the load, before it counts
MEASURED = ROOT / "bench" / "results" / "gpu" / "h100_fig6.json"
_TEMPORAL = ("--prefill-disagg", "temporal")
TEMPORAL = "temporal"
ARMS = {
    arm.name: arm
    for arm in (
        Arm(STOCK),
        Arm("lpm", ("--schedule-policy", "lpm")),  # the prompt with most of it in the cache first
        Arm(TEMPORAL, _TEMPORAL),
        Arm("apart", (*_TEMPORAL, "--pla-mixing", "never", "--pla-boundary", "300")),  # about what that H100 ran
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("emulated",), default="emulated", help="on a GPU: bench gpu")
    parser.add_argument("--profile", default=PROFILE, help="of the emulated device")
    parser.add_argument("--time-scale", type=float, default=8.0, help="how much slower the device is")
    parser.add_argument("--arms", help=f"comma-separated, from: {', '.join(ARMS)}; default: all")
    parser.add_argument("--load-s", type=float, default=5.0, help="seconds of device time at each number of clients")
    add_max_overhead(parser, "the result")
    add_quick(parser)
    add_budget(parser)
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    chosen = choose(options.arms, ARMS, None)
    clients = CLIENTS[:2] if options.quick else CLIENTS
    load_s = min(options.load_s, 1.0) if options.quick else options.load_s
    flags = ("--chunked-prefill-size", str(CHUNK_TOKENS))
    setup = Setup(options.profile, options.time_scale, flags, options.out, "fig6")
    settings = {name: getattr(options, name) for name in ("profile", "time_scale", "seed")} | {"load_s": load_s}
    steps = Steps(options.out / "fig6.steps.jsonl", options.budget_s)
    keys = [settings | {"clients": count, "arm": arm.name} for count in clients for arm in chosen]
    with measuring():
        measure(chosen, keys, setup, steps)
    rows = {(key["clients"], key["arm"]): row for key, row in steps.finished(keys)}
    result = {"bench": "fig6", **settings, "chunk_tokens": CHUNK_TOKENS, **compare(rows, options.max_overhead)}
    report.show("short chats on a prefill instance", *table(result), caption="device time")
    report.emit(result | {"environment": report.environment()}, "fig6", options.out)
    return 0 if result["valid"] else 1


def measure(arms: Sequence[Arm], keys: list[dict[str, Any]], setup: Setup, steps: Steps) -> None:
    """Runs what is open: at each number of clients one arm after the other, while the others rest."""
    if not steps.open(keys) or not steps.has_time():
        return
    with tempfile.TemporaryDirectory(prefix="pla-bench-") as overlay, ExitStack() as running:
        report.say(f"starting {', '.join(arm.name for arm in arms)} (logs in {setup.out})")
        servers = {arm.name: server_of(arm, setup, Path(overlay)) for arm in arms}
        for server in servers.values():
            running.callback(server.stop)
            server.start()
        for server in servers.values():
            server.wait_ready()
        by_clients = sorted({key["clients"] for key in keys})
        for place, count in enumerate(by_clients):
            due = [key for key in keys if key["clients"] == count]
            turned = due[place % len(due) :] + due[: place % len(due)]
            for key in turned:
                if steps.get(key) is None and steps.has_time():
                    steps.add(key, load(servers[key["arm"]], key))


def load(server: Server, key: Mapping[str, Any]) -> Row:
    """One row: the figures in device time, and what the engine says of its passes. Raises ServerError."""
    scale = key["time_scale"]
    make_prompts = functools.partial(make_sessions, key["seed"], answer_tokens=HISTORY_TOKENS["cuda"])
    send = functools.partial(send_load, server.url, key["clients"], make_prompts=make_prompts, settle_s=0.0)
    asyncio.run(send(key["load_s"] * WARM_SHARE * scale))
    flush_cache(server.url)
    before = read_device(server.url)
    outcomes = asyncio.run(send(key["load_s"] * scale))
    after = read_device(server.url)
    flush_cache(server.url)
    ended = [outcome for outcome in outcomes if outcome.ok]
    if not ended:
        raise ServerError(f"{key['arm']}: no request of {key['clients']} clients ended within {key['load_s']:g} s")
    wrong = sum(one.output_ids != chain.expected(list(one.request.input_ids), 1).tokens for one in ended)
    row = describe_latencies([outcome.e2e_s / scale for outcome in ended], key["load_s"])
    report.say(f"{key['clients']} clients, {key['arm']}: {row['rps']:.1f} requests/s, P90 {row['p90_ms']:.1f} ms")
    return row | {
        "tokens_wrong": wrong,
        **count_passes(before, after, scale),
        "host_overhead_share": host_overhead_share(before, after),
        "boundary": read_boundary(server.url),
        "sglang": after["version"],
        "plugin_commit": report.environment()["plugin_commit"],
    }


def describe_latencies(latencies_s: Sequence[float], seconds: float) -> Row:
    return {
        "rps": round(len(latencies_s) / seconds, 3),
        "mean_ms": round(statistics.fmean(latencies_s) * 1e3, 3),
        "p90_ms": round(percentile(latencies_s, 90) * 1e3, 3),
        "requests": len(latencies_s),
    }


def compare(rows: Mapping[tuple[int, str], Row], max_overhead: float) -> dict[str, Any]:
    """``rows`` by clients and arm."""
    clients = sorted({count for count, _ in rows})
    by_clients = {
        str(count): {
            "rps_ratio": rows[count, TEMPORAL]["rps"] / rows[count, STOCK]["rps"],
            "p90_ratio": rows[count, TEMPORAL]["p90_ms"] / rows[count, STOCK]["p90_ms"],
        }
        for count in clients
        if {(count, TEMPORAL), (count, STOCK)} <= rows.keys()
    }
    h100 = compare_with_h100(rows)
    shares = [row["host_overhead_share"] for row in rows.values()]
    wrong = sum(row["tokens_wrong"] for row in rows.values())
    return {
        "by_clients": by_clients,
        "max_host_share": max(shares),
        "h100": h100,
        "h100_rps_error_max": max((abs(one["rps"] - 1) for one in h100.get(STOCK, {}).values()), default=None),
        "h100_p90_error_max": max((abs(one["p90_ms"] - 1) for one in h100.get(STOCK, {}).values()), default=None),
        "boundary": {str(count): rows[count, TEMPORAL]["boundary"] for count in clients if (count, TEMPORAL) in rows},
        "rows": [{"clients": count, "arm": arm, **row} for (count, arm), row in rows.items()],
        "tokens_wrong": wrong,
        "valid": wrong == 0 and max(shares) <= max_overhead,
    }


def compare_with_h100(rows: Mapping[tuple[int, str], Row]) -> dict[str, dict[str, dict[str, float]]]:
    """By arm and clients: the emulated figure over that of the GPU, where both have one."""
    measured = read_json(MEASURED, ServerError)["arms"]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (count, arm), row in rows.items():
        own = measured.get({STOCK: "stock", "apart": "disaggregation"}.get(arm, ""), {}).get("concurrency", {})
        if theirs := own.get(str(count)):
            found.setdefault(arm, {})[str(count)] = {name: row[name] / theirs[name] for name in ("rps", "p90_ms")}
    return found


def table(result: Result) -> report.Cells:
    header = [
        "clients",
        "arm",
        "requests/s",
        "P90, ms",
        "passes",
        "gap a pass, ms",
        "host in the way",
        "over the H100's",
    ]
    rows = []
    for row in result["rows"]:
        h100 = result["h100"].get(row["arm"], {}).get(str(row["clients"]))
        gpu = f"{h100['rps']:.2f}, {h100['p90_ms']:.2f}" if h100 else "-"
        rows.append(
            [
                *(str(row["clients"]), f"`{row['arm']}`", f"{row['rps']:.1f}", f"{row['p90_ms']:.1f}"),
                *(str(row["passes"]), f"{row['gap_ms_a_pass']:.1f}", f"{row['host_overhead_share']:.1%}", gpu),
            ]
        )
    return header, rows


def page(result: Result) -> str:
    ratios = [
        [clients, f"{of['rps_ratio']:.2f}x", f"{of['p90_ratio']:.2f}x", str(result["boundary"].get(clients, "-"))]
        for clients, of in result["by_clients"].items()
    ]
    over = report.markdown(["clients", "temporal: requests/s", "P90", "boundary, tokens"], ratios)
    where = report.emulated_conditions(result, result["profile"], report.scale_text(result), seed="seed")
    return f"{over}\n\n{report.markdown(*table(result))}\n\n{where}"


PAGES = {"fig6": page}
