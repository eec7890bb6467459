"""Parts (b) and (e): what the clients of a server see, and a timing profile fitted on a stock server.

(b) is PLA-Serve Fig. 6 in small: short multi-turn requests at concurrency 1 to 64 on one prefill instance. Six arms,
one server after the other, the most telling first: *stock* (best flags: SGLang captures prefill graphs by default on
CUDA), *full* (temporal with graphs of variable length), *disaggregation* (temporal without), *observed*: stock's
scheduling under our launcher, which only measures what passes cost beside their tokens, *apart*: the paper's rule,
classes never in one pass, at about the boundary that the first H100 had fitted, and *graphs* alone. Every client
asks, waits for the one token that a prefill instance gives, and asks the next turn: the history so far and a new
message of LMSYS-like length. The same sessions in every arm. The file is written anew after each arm.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.gpu import models
from bench.gpu.parts import write_result
from bench.gpu.steps import CAPTURE_BUDGET_S
from bench.harness.arms import OUR_MODULE, STOCK_ENV, STOCK_MODULE
from bench.harness.talks import Dataset, Talk, lengths_label
from pla_sglang import profile
from pla_sglang.sim.workload import length_model
from pla_sglang.testing.server import Server, greedy_body

_GRAPHS, _NO_GRAPHS = ("--pla-graph-layout", "varlen"), ("--pla-graph-layout", "off")
_TEMPORAL = ("--prefill-disagg", "temporal")
_NOBODY = "tcp://127.0.0.1:9"  # takes no load reports
ARMS = {
    "stock": (),
    "full": (*_TEMPORAL, *_GRAPHS),
    "disaggregation": (*_TEMPORAL, *_NO_GRAPHS),
    "observed": ("--pla-telemetry", _NOBODY),
    "apart": (*_TEMPORAL, *_NO_GRAPHS, "--pla-mixing", "never", "--pla-boundary", "300"),
    "graphs": _GRAPHS,
}
SHOWN = ("boundary_tokens", "step_model", "step_model_fits", "decisions", "batches")  # of an engine's state
CONCURRENCY = {"cuda": (1, 4, 16, 64), "cpu": (1, 4)}
TURNS = 8
LONGEST_TOKENS = 255  # of a message: short
ANSWER_TOKENS = {"cuda": 128, "cpu": 8}  # that the decode side would have added to the history
LOAD_S = {"cuda": 5.0, "cpu": 3.0}  # at each concurrency
SEED = 0
PROFILE_POINTS: dict[str, list[str]] = {
    "cuda": [],  # those of pla_sglang.profile
    "cpu": ["--prefill-tokens", "16,64,128,256,512", "--decode-batches", "1,4", "--decode-contexts", "64,256"],
}


def make_server(model: str, device: str, *flags: str, stock: bool) -> Server:
    module, env = (STOCK_MODULE, STOCK_ENV[device]) if stock else (OUR_MODULE, {})
    return Server(model, [*models.launcher_flags(device), *flags], module=module, env=env, stop_timeout_s=2.0)


def recorded_prompts(talks: Sequence[Talk], client: int) -> Sequence[list[int]]:
    """Of one client, eight of the conversations that are its own; a made-up answer of the recorded length between."""
    rng, prompts = random.Random(f"{SEED}/{client}"), []
    for place in range(8):
        history: list[int] = []
        for turn in talks[(8 * client + place) % len(talks)][:TURNS]:
            prompts.append(history + list(turn.prompt_ids))
            history = prompts[-1] + [rng.randrange(3, 500) for _ in range(turn.answer_tokens)]
    return prompts


def make_sessions(seed: int, client: int, answer_tokens: int) -> Sequence[list[int]]:
    """Prompts of one client, turn after turn, session after session. Token ids below 10,000 mean nothing."""
    rng = random.Random(f"{seed}/{client}")
    first, later = length_model("lmsys_first_turn_prompt"), length_model("lmsys_later_turn_prompt")

    def draw_ids(tokens: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(tokens)]

    prompts = []
    for _ in range(8):
        history: list[int] = []
        for turn in range(TURNS):
            while (tokens := (later if turn else first).draw(rng)) > LONGEST_TOKENS:
                pass
            prompts.append(history + draw_ids(tokens))
            history = prompts[-1] + draw_ids(answer_tokens)
    return prompts


async def send_load(
    url: str,
    clients: int,
    seconds: float,
    make_prompts: Callable[[int], Sequence[list[int]]],
    note: Callable[[list[int], Any], None] = lambda prompt, answer: None,
) -> list[float]:
    """Latencies in seconds of what ended in time. ``note`` gets each prompt with its answer.

    Raises aiohttp's errors where the server does not answer.
    """
    latencies_s: list[float] = []
    end_s = time.perf_counter() + seconds

    async def run_client(http: aiohttp.ClientSession, client: int) -> None:
        for prompt in itertools.cycle(make_prompts(client)):
            sent_s = time.perf_counter()
            if sent_s >= end_s:
                return
            async with http.post(url + "/generate", json=greedy_body(prompt, 1)) as answer:
                answer.raise_for_status()
                data = await answer.read()
            latencies_s.append(time.perf_counter() - sent_s)
            note(prompt, json.loads(data))

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http, asyncio.TaskGroup() as group:
        for client in range(clients):
            group.create_task(run_client(http, client))
    return latencies_s


def figures(latencies_s: Sequence[float], seconds: float) -> dict[str, float]:
    p90_s = sorted(latencies_s)[min(len(latencies_s) - 1, int(0.9 * len(latencies_s)))]
    return {
        "rps": round(len(latencies_s) / seconds, 3),
        "mean_ms": round(statistics.fmean(latencies_s) * 1e3, 3),
        "p90_ms": round(p90_s * 1e3, 3),
        "requests": len(latencies_s),
    }


def measure_arm(server: Server, device: str, make_prompts: Callable[[int], Sequence[list[int]]]) -> dict[str, Any]:
    by_clients: dict[str, Any] = {}
    for clients in CONCURRENCY[device]:
        for seconds in (LOAD_S[device] / 4, LOAD_S[device]):  # to warm up, then timed
            latencies_s = asyncio.run(send_load(server.url, clients, seconds, make_prompts))
            server.post("/flush_cache?timeout=10", {})
        by_clients[str(clients)] = figures(latencies_s, LOAD_S[device])
        print(f"  {clients:3} clients: {by_clients[str(clients)]}", file=sys.stderr, flush=True)
    state = server.get("/server_info")["internal_states"][0]
    own = state.get("pla", {})
    found = {"concurrency": by_clients, "graphs": state.get("pla_graphs")}
    found["scheduling"] = {name: own[name] for name in SHOWN if name in own}
    passes = own.get("step_model_fits") or own.get("telemetry")
    if passes:
        found["gap_ms_a_pass"] = round(1e3 * passes["pass_gap_s"] / max(1, passes["passes"]), 3)
    return found


def ratios(arms: dict[str, Any]) -> dict[str, Any]:
    """Every arm against stock at the highest concurrency that both have."""
    stock = arms.get("stock", {}).get("concurrency", {})
    by_arm = {}
    for name, arm in arms.items():
        both = [clients for clients in arm["concurrency"] if clients in stock]
        if name != "stock" and both:
            ours, theirs = arm["concurrency"][both[-1]], stock[both[-1]]
            fields = ("rps", "mean_ms", "p90_ms")
            by_arm[name] = {field.removesuffix("_ms"): round(ours[field] / theirs[field], 4) for field in fields}
            by_arm[name]["clients"] = int(both[-1])
    return by_arm


def measure_fig6(model: str, device: str, out: str, dataset: str | None = None) -> None:
    """``dataset``: file of conversations; None: LMSYS-like lengths, shorts only."""
    path, most = dataset and Path(dataset), 8 * max(CONCURRENCY[device])
    make_prompts = functools.partial(make_sessions, SEED, answer_tokens=ANSWER_TOKENS[device])
    if path:
        make_prompts = functools.partial(recorded_prompts, Dataset(path, Path(model)).read_talks(most))
    lengths = lengths_label(path or None, Path(model), "LMSYS-like, drawn from published shares")
    result: dict[str, Any] = {"lengths": lengths, "arms": {}, "completed": False}
    for name, flags in ARMS.items():
        print(f"arm {name}", file=sys.stderr, flush=True)
        budget = ("--pla-graph-capture-budget-s", str(CAPTURE_BUDGET_S[device])) if "varlen" in flags else ()
        server = make_server(model, device, "--chunked-prefill-size", "2048", *flags, *budget, stock=name == "stock")
        with server:
            result["arms"][name] = measure_arm(server, device, make_prompts)
        result["ratios_to_stock"] = ratios(result["arms"])
        write_result(result, out)
    result["completed"] = True
    write_result(result, out)


def fit_profile(model: str, size: str, device: str, out: str) -> int:
    """Measures a stock server as a client and writes the profile. Returns the fitting command's exit status."""
    source = f"bench.gpu on {device}, Qwen2.5-{size.upper()} with random weights, stock SGLang"
    with make_server(model, device, stock=True) as server:
        given = ["--url", server.url, "--name", f"{device}-{size}", "--source", source, "--out", out]
        return profile.main([*given, *PROFILE_POINTS[device]])
