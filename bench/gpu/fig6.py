"""Part (b): PLA-Serve Fig. 6 in small. Short multi-turn requests at concurrency 1 to 64 on one prefill instance.

    python -m bench.gpu.fig6 --model FOLDER --device cuda --out fig6.json

Four arms, one server after the other: *stock* (best flags: SGLang captures prefill graphs by default on CUDA),
*disaggregation* (temporal), *graphs* (variable length), *full* (both). Every client asks, waits for the one token that
a prefill instance gives, and asks the next turn: the history so far and a new message of LMSYS-like length. The same
sessions in every arm. The file is written anew after each concurrency.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.gpu.models import model_flags
from bench.gpu.steps import CAPTURE_BUDGET_S
from bench.lib.arms import OUR_MODULE, STOCK_MODULE, stock_env
from pla_sglang.testing.server import Server, greedy_body, running
from pla_sglang.workload import length_model

_TEMPORAL, _GRAPHS = ("--prefill-disagg", "temporal"), ("--pla-graph-layout", "varlen")
ARMS: dict[str, tuple[str, ...]] = {
    "stock": (),
    "disaggregation": _TEMPORAL,
    "graphs": _GRAPHS,
    "full": (*_TEMPORAL, *_GRAPHS),
}
CONCURRENCY = {"cuda": (1, 4, 16, 64), "cpu": (1, 4)}
TURNS = 8
LONGEST_TOKENS = 255  # of a message: short
ANSWER_TOKENS = {"cuda": 128, "cpu": 8}  # that the decode side would have added to the history


def sessions(seed: int, client: int, answer_tokens: int) -> Sequence[list[int]]:
    """Prompts of one client, turn after turn, session after session. Token ids below 10,000 mean nothing."""
    rng = random.Random(f"{seed}/{client}")
    first, later = length_model("lmsys_first_turn_prompt"), length_model("lmsys_later_turn_prompt")

    def message(turn: int) -> list[int]:
        tokens = LONGEST_TOKENS + 1
        while tokens > LONGEST_TOKENS:
            tokens = (later if turn else first).draw(rng)
        return [rng.randrange(3, 500) for _ in range(tokens)]

    prompts = []
    for _ in range(8):
        history: list[int] = []
        for turn in range(TURNS):
            history = history + message(turn)
            prompts.append(history)
            history = history + [rng.randrange(3, 500) for _ in range(answer_tokens)]
    return prompts


async def load(url: str, clients: int, *, seconds: float, seed: int, answer_tokens: int) -> list[float]:
    """Latencies in seconds of what ended in time. Raises aiohttp's errors where the server does not answer."""
    found: list[float] = []
    end_s = time.perf_counter() + seconds

    async def one(http: aiohttp.ClientSession, client: int) -> None:
        for prompt in itertools.cycle(sessions(seed, client, answer_tokens)):
            sent_s = time.perf_counter()
            if sent_s >= end_s:
                return
            async with http.post(url + "/generate", json=greedy_body(prompt, 1)) as answer:
                answer.raise_for_status()
                await answer.read()
            found.append(time.perf_counter() - sent_s)

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http, asyncio.TaskGroup() as group:
        for client in range(clients):
            group.create_task(one(http, client))
    return found


def figures(latencies_s: Sequence[float], seconds: float) -> dict[str, float]:
    """RPS, mean and P90."""
    ordered = sorted(latencies_s)
    return {
        "rps": round(len(ordered) / seconds, 3),
        "mean_ms": round(statistics.fmean(ordered) * 1e3, 3),
        "p90_ms": round(ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))] * 1e3, 3),
        "requests": len(ordered),
    }


def measure_arm(server: Server, device: str, *, seconds: float, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for clients in CONCURRENCY[device]:
        answer_tokens = ANSWER_TOKENS[device]
        warm_up = load(server.url, clients, seconds=seconds / 4, seed=seed, answer_tokens=answer_tokens)
        asyncio.run(warm_up)
        server.post("/flush_cache?timeout=10", {})
        timed = load(server.url, clients, seconds=seconds, seed=seed, answer_tokens=answer_tokens)
        latencies_s = asyncio.run(timed)
        server.post("/flush_cache?timeout=10", {})
        found[str(clients)] = figures(latencies_s, seconds)
        print(f"  {clients:3} clients: {found[str(clients)]}", file=sys.stderr, flush=True)
    state = server.get("/server_info")["internal_states"][0]
    return {"concurrency": found, "graphs": state.get("pla_graphs")}


def ratios(arms: dict[str, Any]) -> dict[str, Any]:
    """Every arm against stock at the highest concurrency that both have."""
    stock = arms.get("stock", {}).get("concurrency", {})
    found = {}
    for name, arm in arms.items():
        both = [clients for clients in arm["concurrency"] if clients in stock]
        if name != "stock" and both:
            mine, theirs = arm["concurrency"][both[-1]], stock[both[-1]]
            pairs = {"rps": "rps", "mean": "mean_ms", "p90": "p90_ms"}
            found[name] = {key: round(mine[at] / theirs[at], 4) for key, at in pairs.items()}
            found[name]["clients"] = int(both[-1])
    return found


def measure(model: Path, device: str, *, seconds: float, seed: int, out: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"arms": {}, "completed": False}
    for name, flags in ARMS.items():
        print(f"arm {name}", file=sys.stderr, flush=True)
        common = ("--device", device, "--chunked-prefill-size", "2048", *model_flags(device), "--log-level", "warning")
        stock = name == "stock"
        if _GRAPHS[0] in flags:
            flags = (*flags, "--pla-graph-capture-budget-s", str(CAPTURE_BUDGET_S[device]))
        server = Server(
            model,
            (*common, *flags),
            module=STOCK_MODULE if stock else OUR_MODULE,
            env=stock_env(device) if stock else {},
            stop_timeout_s=2.0,
        )
        with running(server):
            result["arms"][name] = measure_arm(server, device, seconds=seconds, seed=seed)
        result["ratios_to_stock"] = ratios(result["arms"])
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    result["completed"] = True
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.fig6", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load at each concurrency")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(argv)
    measure(args.model, args.device, seconds=args.seconds, seed=args.seed, out=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
