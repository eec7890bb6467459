"""Part (b): short multi-turn chats on one card, engines side by side, one under load at a time, in turns.

PLA-Serve Fig. 6 in small (answers of one token, as a prefill instance gives them), and the same chats with longer
answers. Every client asks, waits for the answer, and asks the next turn: the history so far and a new message of
LMSYS-like length. The same sessions in every arm, from an empty prefix cache. Each round begins with another arm, and
ratios are taken within a round, so that what the machine does slowly meets all arms alike. The file is written anew
after each round. In the end SGLang's profiler records some passes of each arm.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import random
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu import models
from bench.gpu.device_time import Recording
from bench.gpu.parts import write_result
from bench.gpu.steps import CAPTURE_BUDGET_S
from bench.harness.arms import OUR_MODULE, STOCK_ENV, STOCK_MODULE
from bench.harness.latency import paired_ratio, percentile, spread
from bench.harness.load_client import Client, Outcome, Request, encode_body
from bench.harness.report import installed_version
from bench.harness.talks import Dataset, Talk, lengths_label
from pla_sglang import profile
from pla_sglang.predictor.model import LengthMlp, PredictorFacts, save_predictor
from pla_sglang.sim.workload import length_model
from pla_sglang.testing.server import Server, running

_TEMPORAL = ("--prefill-disagg", "temporal")
_NO_GRAPHS = ("--pla-graph-layout", "off")
_MIXED = ("--enable-mixed-chunk",)
PREDICTS = "ours-predicts"
ARMS: dict[str, tuple[str, ...]] = {
    "stock": (),
    "ours": _TEMPORAL,  # the default form
    "ours-no-graphs": (*_TEMPORAL, *_NO_GRAPHS),
    "graphs": ("--pla-graph-layout", "varlen"),  # stock's scheduling
    "ours-no-wait": (*_TEMPORAL, "--pla-wait-max-ms", "0"),
    "stock-mixed": _MIXED,
    "ours-mixed": (*_TEMPORAL, *_MIXED),
    PREDICTS: _TEMPORAL,  # with a length predictor
}
# By answer tokens: arms and clients. On one card with 80 GB three engines of 7B have room.
LOADS: dict[int, tuple[tuple[str, ...], tuple[int, ...]]] = {
    1: (("stock", "ours", "ours-no-graphs"), (1, 4, 16, 64)),
    64: (("stock", "ours", "stock-mixed", "ours-mixed"), (16, 64)),
}
CHUNK_TOKENS = {"cuda": 8192, "cpu": 1024}
KV_TOKENS = {"cuda": 200_000, "cpu": 20_000}
SETTLE_S = 1.0
COUNTS = ("requests", "failed")  # figures that are not compared
TURNS = 8
LONGEST_TOKENS = 255  # of a message: short
HISTORY_TOKENS = {"cuda": 128, "cpu": 8}  # that the decode side would have added, where an answer is one token
SEED = 0
PROFILED_PASSES = 40
PROFILED_CLIENTS = (1, 16)
PROFILE_POINTS: dict[str, list[str]] = {
    "cuda": [],  # those of pla_sglang.profile
    "cpu": ["--prefill-tokens", "16,64,128,256,512", "--decode-batches", "1,4", "--decode-contexts", "64,256"],
}
MakePrompts = Callable[[int], Sequence[list[int]]]
Runs = dict[str, dict[str, list[dict[str, Any]]]]  # figures of each round, by clients and arm


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
    make_prompts: MakePrompts,
    answer_tokens: int = 1,
    settle_s: float = SETTLE_S,
) -> list[Outcome]:
    """What became of all that was sent within ``settle_s + seconds``. Times count from the end of ``settle_s``: all
    clients begin at once, and an engine that has emptied its cache asks the driver for memory."""
    start_s, outcomes = time.perf_counter() + settle_s, list[Outcome]()

    async def run_client(http: Client, client: int) -> None:
        for number, prompt in enumerate(itertools.cycle(make_prompts(client))):
            sent_s = time.perf_counter() - start_s
            if sent_s >= seconds:
                return
            request = Request(f"{uuid.uuid4().hex}-{client}-{number}", "chat", sent_s, tuple(prompt), answer_tokens)
            outcomes.append(await http.generate(request, encode_body(request), start_s))

    async with Client(url, timeout_s=120.0) as http:
        async with asyncio.TaskGroup() as group:
            for client in range(clients):
                group.create_task(run_client(http, client))
        await http.flush_cache()
    for outcome in outcomes:
        outcome.settle(answer_tokens)
    return outcomes


def figures(outcomes: Sequence[Outcome], seconds: float, clients: int) -> dict[str, Any]:
    """Of requests that ended within ``seconds``, once it has settled; ``failed`` counts all that did not end well.

    Requests/s are clients over mean latency, as nobody thinks between two turns. What has ended within the time would
    depend on where it cuts the waves in which the clients come.
    """
    ended = [outcome for outcome in outcomes if outcome.ok and outcome.done_s and 0 <= outcome.done_s < seconds]
    found: dict[str, Any] = {"requests": len(ended), "failed": sum(not outcome.ok for outcome in outcomes)}
    if ended:
        found["rps"] = round(clients / statistics.fmean(outcome.e2e_s for outcome in ended), 2)
    for name, values in (("ttft", [o.ttft_s for o in ended]), ("tpot", [o.tpot_s for o in ended])):
        known_ms = [value_s * 1e3 for value_s in values if value_s is not None]
        if known_ms:
            found |= {f"{name}_p{q}_ms": round(percentile(known_ms, q), 2) for q in (50, 90, 99)}
    return found


def compare(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """By arm: medians over rounds, and the ratios to stock within a round: median, least and most."""
    stock = rounds["stock"]
    by_arm: dict[str, Any] = {}
    for arm, rows in rounds.items():
        keys = [key for key in rows[0] if key not in COUNTS and all(key in row for row in (*rows, *stock))]
        of_arm: dict[str, Any] = {key: round(spread([row[key] for row in rows]).median, 2) for key in keys}
        of_arm["failed"] = sum(row["failed"] for row in rows)
        if arm != "stock":
            for key in keys:
                both = [(row[key], base[key]) for row, base in zip(rows, stock, strict=False) if base[key]]
                ratio = paired_ratio([own for own, _ in both], [base for _, base in both])
                of_arm[f"{key}_to_stock"] = [round(value, 3) for value in (ratio.median, ratio.low, ratio.high)]
        by_arm[arm] = of_arm
    return by_arm


def flags_of(arm: str, model: str, device: str) -> list[str]:
    flags = ["--chunked-prefill-size", str(CHUNK_TOKENS[device]), "--max-total-tokens", str(KV_TOKENS[device])]
    flags += [*ARMS[arm], *(["--mem-fraction-static", "0.9"] if device == "cuda" else [])]
    if not arm.startswith("stock") and "off" not in ARMS[arm] and device == "cuda":
        flags += ["--pla-graph-capture-budget-s", str(CAPTURE_BUDGET_S[device])]
    if arm == PREDICTS:
        path = Path(model).with_suffix(".predictor")
        make_predictor(model, path)
        flags += ["--pla-length-predictor", str(path)]
    return flags


def make_predictor(model: str, path: Path) -> None:
    """One with the paper's widths and random weights, as those of the model are: its time is that of a trained one."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    hidden_size, dtype = config["hidden_size"], config.get("dtype") or config["torch_dtype"]
    torch.manual_seed(SEED)
    facts = PredictorFacts(model, hidden_size, dtype, str(installed_version("sglang")), every_steps=20)
    save_predictor(path, LengthMlp(hidden_size), facts)


@dataclasses.dataclass(frozen=True)
class Turns:
    """``arms`` take turns: ``rounds`` times, at each number of ``clients``, each under ``seconds`` of load."""

    arms: Sequence[str]
    clients: Sequence[int]
    rounds: int = 3
    seconds: float = 3.0


def choose_prompts(
    model: str, device: str, answer_tokens: int, clients: int, dataset: str | None
) -> tuple[MakePrompts, str]:
    """What each client asks, and a word on its lengths. ``dataset``: file of conversations; None: LMSYS-like lengths,
    shorts only."""
    path = Path(dataset) if dataset else None
    lengths = lengths_label(path, Path(model), "LMSYS-like, drawn from published shares")
    if path:
        return functools.partial(recorded_prompts, Dataset(path, Path(model)).read_talks(8 * clients)), lengths
    history_tokens = answer_tokens if answer_tokens > 1 else HISTORY_TOKENS[device]
    return functools.partial(make_sessions, SEED, answer_tokens=history_tokens), lengths


def measure(
    model: str,
    device: str,
    out: str,
    answer_tokens: int,
    turns: Mapping[str, Any] | None = None,
    dataset: str | None = None,
) -> None:
    """``turns``: fields of ``Turns`` in place of ``LOADS``'s."""
    plan = Turns(**dict(zip(("arms", "clients"), LOADS[answer_tokens], strict=True)) | dict(turns or {}))
    make_prompts, lengths = choose_prompts(model, device, answer_tokens, max(plan.clients), dataset)
    result: dict[str, Any] = {"lengths": lengths, "answer_tokens": answer_tokens, "load_s": plan.seconds}
    result["completed"] = False
    flags = {arm: flags_of(arm, model, device) for arm in plan.arms}
    made = {arm: make_server(model, device, *flags[arm], stock=arm.startswith("stock")) for arm in plan.arms}

    def send(arm: str, clients: int, seconds: float = plan.seconds) -> list[Outcome]:
        return asyncio.run(send_load(made[arm].url, clients, seconds, make_prompts, answer_tokens))

    with running(*made.values()):
        result["start_s"] = {arm: round(server.start_time_s or 0.0, 1) for arm, server in made.items()}
        for arm, clients in itertools.product(plan.arms, (1, plan.clients[-1])):
            send(arm, clients, 0.5)  # to warm up
        for runs in take_turns(plan, send):
            result |= {"rounds": runs, "compared": {level: compare(of_level) for level, of_level in runs.items()}}
            write_result(result, out)
        result["device"] = record_devices(plan, made, device, send)
        states = {arm: server.get("/server_info")["internal_states"][0] for arm, server in made.items()}
        result["states"] = {
            arm: {key: value for key, value in state.items() if key.startswith("pla")} for arm, state in states.items()
        }
    result["completed"] = True
    write_result(result, out)


def take_turns(plan: Turns, send: Callable[[str, int], list[Outcome]]) -> Iterator[Runs]:
    """All figures so far, after each round. Each round begins with another arm."""
    runs: Runs = {str(clients): {arm: [] for arm in plan.arms} for clients in plan.clients}
    for number in range(plan.rounds):
        first = number % len(plan.arms)
        order = [*plan.arms[first:], *plan.arms[:first]]
        for clients, arm in itertools.product(plan.clients, order):
            rows = runs[str(clients)][arm]
            rows.append(figures(send(arm, clients), plan.seconds, clients))
            print(f"  {clients:3} clients, {arm}: {rows[-1]}", file=sys.stderr, flush=True)
        yield runs


def record_devices(
    plan: Turns, made: Mapping[str, Server], device: str, send: Callable[[str, int], list[Outcome]]
) -> dict[str, Any]:
    """By clients and arm what the device did, and the figures of that load: recording slows the host down."""
    found: dict[str, Any] = {}
    for clients, arm in itertools.product([one for one in plan.clients if one in PROFILED_CLIENTS], plan.arms):
        with Recording(made[arm], device, passes=PROFILED_PASSES) as recording:
            outcomes = send(arm, clients)
        row = recording.found | figures(outcomes, plan.seconds, clients)
        found.setdefault(str(clients), {})[arm] = row
        print(f"  {clients:3} clients, {arm}: {row}", file=sys.stderr, flush=True)
    return found


def fit_profile(model: str, size: str, device: str, out: str) -> int:
    """Measures a stock server as a client and writes the profile. Returns the fitting command's exit status."""
    source = f"bench.gpu on {device}, Qwen2.5-{size.upper()} with random weights, stock SGLang"
    with make_server(model, device, stock=True) as server:
        given = ["--url", server.url, "--name", f"{device}-{size}", "--source", source, "--out", out]
        return profile.main([*given, *PROFILE_POINTS[device]])
