"""``python -m bench.router_clients``: clients that know nothing of us, against our router.

Starts prefill and decode instances on an emulated device behind our router, and runs SGLang's own load client with its
stock command line: over SGLang's endpoint, completions and chat. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.chaotic.after import at_rest
from bench.lib.report import emit, environment, say, stdout
from bench.replaying.cluster import running_cluster
from pla_sglang.testing.server import ServerError

BACKENDS = "sglang,sglang-oai,sglang-oai-chat"
FIGURES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "total_throughput")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.router_clients", description=(__doc__ or "").split("\n\n")[1])
    made.add_argument("--backends", default=BACKENDS, help="of bench_serving, with commas between")
    made.add_argument("--requests", type=int, default=300, help="for each backend")
    made.add_argument("--rate", type=float, default=10.0, help="requests/s")
    made.add_argument("--input-len", type=int, default=2000, help="longest prompt, tokens")
    made.add_argument("--output-len", type=int, default=32, help="longest answer, tokens")
    made.add_argument("--prefill", type=int, default=2)
    made.add_argument("--decode", type=int, default=2)
    made.add_argument("--policy", default="cache-aware")
    made.add_argument("--profile", default="h100-llama3.1-8b-tp1")
    made.add_argument("--time-scale", type=float, default=4.0)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


def command_of(options: argparse.Namespace, backend: str, url: str, model: str) -> list[str]:
    """Arguments of ``sglang.bench_serving``; all of them are stock."""
    flags = ["--backend", backend, "--base-url", url, "--model", model, "--tokenizer", model]
    flags += ["--dataset-name", "random-ids", "--num-prompts", str(options.requests)]
    flags += ["--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len)]
    flags += ["--random-range-ratio", "0.05", "--request-rate", str(options.rate), "--seed", str(options.seed)]
    return ["-m", "sglang.bench_serving", *flags]


def run_client(options: argparse.Namespace, backend: str, url: str, model: str) -> dict[str, Any]:
    """Its figures. Raises ServerError where it fails or writes nothing."""
    output = options.out / f"bench_serving-{backend}.jsonl"
    output.unlink(missing_ok=True)
    command = command_of(options, backend, url, model)
    say(f"sglang.bench_serving --backend {backend}")
    done = subprocess.run(
        [sys.executable, *command, "--disable-tqdm", "--output-file", str(output)],
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode != 0 or not output.is_file():
        raise ServerError(f"bench_serving ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    figures = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    shown = shlex.join(command_of(options, backend, "URL", "MODEL"))
    found = {"requests": options.requests, "completed": figures["completed"], "command": f"python {shown}"}
    return found | {name: figures.get(name) for name in FIGURES}


def model_of(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    listed: dict[str, Any] = json.loads(opener.open(f"{url}/v1/models", timeout=30).read())
    return str(listed["data"][0]["id"])


def run(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    fleet = ["--prefill", str(options.prefill), "--decode", str(options.decode), "--router", "pla"]
    device = ["--pla-emulate", options.profile, "--pla-time-scale", str(options.time_scale)]
    with running_cluster([*fleet, *device, "--policy", options.policy], options.out, "router_clients") as described:
        url = described["url"]
        model = model_of(url)
        clients = {name: run_client(options, name, url, model) for name in options.backends.split(",")}
        rest = asyncio.run(at_rest(described))
    table = Table(title="sglang.bench_serving against our router")
    for column in ("backend", "completed", *FIGURES):
        table.add_column(column)
    for name, one in clients.items():
        table.add_row(name, f"{one['completed']} of {one['requests']}", *(f"{one[key]:.1f}" for key in FIGURES))
    stdout.print(table)
    settings = {name: getattr(options, name) for name in ("seed", "rate", "policy", "profile", "time_scale")}
    left = {"ledger_balanced": rest.ledger_balanced, "gauges_zero": rest.gauges_zero, "kv_free": rest.kv_free}
    emit(
        {"bench": "router_clients", **settings, "clients": clients, **left, "environment": environment()},
        options.out,
        "router_clients",
    )
    complete = all(one["completed"] == one["requests"] for one in clients.values())
    return 0 if complete and not rest.details else 1


def main(argv: list[str] | None = None) -> int:
    try:
        return run(parser().parse_args(argv))
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
