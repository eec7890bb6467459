"""Clients that know nothing of us, against our router.

Starts prefill and decode instances on an emulated device behind our router, and runs SGLang's own load client with its
stock command line: over SGLang's endpoint, completions and chat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
from typing import Any

from bench.check.leftovers import wait_until_at_rest
from bench.harness.bench import BenchError, Result, measuring
from bench.harness.cli import add_emulated_device, add_output, emulation_flags
from bench.harness.report import device_conditions, emit, environment, markdown, say
from bench.harness.servers import running_cluster
from pla_sglang.testing.server import fetch

BACKENDS = "sglang,sglang-oai,sglang-oai-chat"
SHOWN = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "total_throughput")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", default=BACKENDS, help="of bench_serving, with commas between")
    parser.add_argument("--requests", type=int, default=300, help="for each backend")
    parser.add_argument("--rate", type=float, default=10.0, help="requests/s")
    parser.add_argument("--input-len", type=int, default=2000, help="longest prompt, tokens")
    parser.add_argument("--output-len", type=int, default=32, help="longest answer, tokens")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--policy", default="cache-aware")
    add_emulated_device(parser, time_scale=4.0)
    add_output(parser)


def command_of(options: argparse.Namespace, backend: str, url: str, model: str) -> list[str]:
    """Arguments of Python; all of them are stock. Random token ids, so that nothing is downloaded."""
    flags = ["--backend", backend, "--base-url", url, "--model", model, "--tokenizer", model]
    flags += ["--dataset-name", "random-ids", "--num-prompts", str(options.requests)]
    flags += ["--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len)]
    flags += ["--request-rate", str(options.rate), "--random-range-ratio", "0.05", "--seed", str(options.seed)]
    return ["-m", "sglang.bench_serving", *flags]


def run_client(options: argparse.Namespace, backend: str, url: str, model: str) -> dict[str, Any]:
    """Its figures, and the command that gives them. Raises BenchError where it fails or writes nothing."""
    say(f"sglang.bench_serving --backend {backend}")
    output = options.out / f"bench_serving-{backend}.jsonl"
    output.unlink(missing_ok=True)
    command = [sys.executable, *command_of(options, backend, url, model), "--disable-tqdm"]
    command += ["--output-file", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 or not output.is_file():
        text = f"{done.stdout}{done.stderr}"[-3000:]
        raise BenchError(f"bench_serving ended with {done.returncode}:\n{text}")
    found = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    shown = f"python {shlex.join(command_of(options, backend, 'URL', 'MODEL'))}"
    return {"requests": options.requests, "command": shown} | {name: found.get(name) for name in ("completed", *SHOWN)}


def run(options: argparse.Namespace) -> int:
    fleet = ["--prefill", str(options.prefill), "--decode", str(options.decode), "--router", "pla"]
    device = emulation_flags(options.profile, options.time_scale)
    clients: dict[str, dict[str, Any]] = {}
    with running_cluster([*fleet, *device, "--policy", options.policy], options.out, "router_clients") as described:
        url = described["url"]
        model = str(fetch(f"{url}/v1/models")["data"][0]["id"])
        with measuring():
            for backend in options.backends.split(","):
                clients[backend] = run_client(options, backend, url, model)
        rest = asyncio.run(wait_until_at_rest(described))
    settings = {name: getattr(options, name) for name in ("seed", "rate", "policy", "profile", "time_scale")}
    left = {"ledger_balanced": rest.ledger_balanced, "gauges_zero": rest.gauges_zero, "kv_free": rest.kv_free}
    result = {"bench": "router_clients", **settings, "clients": clients, **left, "environment": environment()}
    print(page(result))
    emit(result, "router_clients", options.out)
    complete = all(client["completed"] == client["requests"] for client in clients.values())
    return 0 if complete and not rest.details else 1


def page(result: Result) -> str:
    rows = []
    for name, client in result["clients"].items():
        figures = ["-" if client.get(key) is None else f"{client[key]:,.0f}" for key in SHOWN]
        rows.append([f"`{name}`", f"{client['completed']:,} of {client['requests']:,}", *figures])
    header = ["client", "completed", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "tokens/s"]
    return f"{markdown(header, rows)}\n\n{device_conditions(result)}"


PAGES = {"router_clients": page}
