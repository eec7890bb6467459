"""SGLang's own load client (``python -m sglang.bench_serving``) against stock and against ours.

    python -m bench stock_client

Random token ids, so that nothing is downloaded. Its table is shown as it is; the figures are compared underneath.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.arms import STOCK
from bench.harness.bench import BenchError, Result, measuring
from bench.harness.comparison import Comparison, add_comparison, headline_arm, prepare_comparison
from bench.harness.fleet import Fleet, Member, final_state, in_turns
from bench.harness.report import describe_rounds, emit, environment, markdown, say, stdout

FIGURES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "total_throughput", "completed")
_RESULT = "============ Serving Benchmark Result"


def client_command(
    backend: str, url: str, model: str, *, requests: int, lengths: tuple[int, int], rate: float, further: Sequence[str]
) -> list[str]:
    """Arguments of Python; all of them are stock. ``lengths``: longest prompt and longest answer, in tokens."""
    flags = ["--backend", backend, "--base-url", url, "--model", model, "--tokenizer", model]
    flags += ["--dataset-name", "random-ids", "--num-prompts", str(requests)]
    flags += ["--random-input-len", str(lengths[0]), "--random-output-len", str(lengths[1])]
    return ["-m", "sglang.bench_serving", *flags, "--request-rate", str(rate), *further]


async def run_load_client(command: Sequence[str], output: Path) -> tuple[dict[str, Any], str]:
    """Its figures and the table that it prints. Raises BenchError where it fails or writes nothing."""
    output.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        "--disable-tqdm",
        "--output-file",
        str(output),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = printed.decode("utf-8", "replace")
    if process.returncode != 0 or not output.is_file():
        raise BenchError(f"bench_serving ended with {process.returncode}:\n{text[-3000:]}")
    figures = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    return {name: figures.get(name) for name in FIGURES}, text[max(0, text.find(_RESULT)) :]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_comparison(parser, rounds=1)
    work = parser.add_argument_group("workload")
    work.add_argument("--num-prompts", type=int, default=60)
    work.add_argument("--input-len", type=int, default=2000, help="longest prompt, tokens")
    work.add_argument("--output-len", type=int, default=16, help="longest answer, tokens")
    work.add_argument("--range-ratio", type=float, default=0.05, help="shortest prompt over longest prompt")
    work.add_argument("--request-rate", type=float, default=8.0, help="requests per second, Poisson")
    work.add_argument("--chunk-tokens", type=int, help="--chunked-prefill-size; default: 1024 on a CPU, 8192 on a GPU")
    work.add_argument("--client-flags", default="", metavar="FLAGS", help="further flags for bench_serving")


async def measure(args: argparse.Namespace, fleet: Fleet) -> dict[str, list[dict[str, Any]]]:
    """Figures by arm and round, as far as all arms got."""
    figures: dict[str, list[dict[str, Any]]] = {member.name: [] for member in fleet.members}
    with measuring():
        for index in range(args.rounds):
            for member in in_turns(fleet.members, index):
                figures[member.name].append(await run_client(args, fleet, member, index))
    rounds = min(map(len, figures.values()))
    return {arm: of_arm[:rounds] for arm, of_arm in figures.items()}


async def run_client(args: argparse.Namespace, fleet: Fleet, member: Member, index: int) -> dict[str, Any]:
    """One round on one server; its table is shown as it is."""
    say(f"round {index + 1}/{args.rounds}: sglang.bench_serving against {member.name}")
    output = (args.out / "stock_client" / f"bench_serving-{member.name}.jsonl").absolute()
    further = ["--random-range-ratio", str(args.range_ratio), "--seed", str(args.seed + index)]
    further += ["--flush-cache", "--tokenize-prompt", *shlex.split(args.client_flags)]
    command = client_command(
        "sglang",
        member.server.url,
        str(args.model_path),
        requests=args.num_prompts,
        lengths=(args.input_len, args.output_len),
        rate=args.request_rate,
        further=further,
    )
    async with fleet.awake(member):
        figures, shown = await run_load_client(command, output)
    stdout.print(shown, markup=False)
    return figures


def compared(figures: Mapping[str, list[dict[str, Any]]]) -> dict[str, float | None]:
    """Our figure over stock's, paired by round, the median over rounds."""
    arm = headline_arm(figures)
    if arm is None or STOCK not in figures:
        return {}
    ratios: dict[str, float | None] = {}
    for name in FIGURES:
        pairs = [(ours.get(name), stock.get(name)) for ours, stock in zip(figures[arm], figures[STOCK], strict=True)]
        of_rounds = [ours / stock for ours, stock in pairs if ours and stock]
        ratios[f"{name}_ratio"] = round(statistics.median(of_rounds), 4) if of_rounds else None
    return ratios


def run(args: argparse.Namespace) -> int:
    prepare_comparison(args)
    args.chunk_tokens = args.chunk_tokens or (1024 if args.device == "cpu" else 8192)
    if args.quick:
        args.num_prompts = min(args.num_prompts, 10)
    kv_tokens = 24 * (args.input_len + args.output_len)
    comparison = Comparison("stock_client", args, chunk_tokens=args.chunk_tokens, kv_tokens=kv_tokens)

    async def measure_start(fleet: Fleet, _: int) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
        return await measure(args, fleet), await final_state(fleet)

    ((figures, state),) = comparison.measure_starts(measure_start)
    valid = all(of_round["completed"] == args.num_prompts for rounds in figures.values() for of_round in rounds)
    workload = {"name": "bench_serving random-ids", "num_prompts": args.num_prompts, "input_len": args.input_len}
    workload |= {"output_len": args.output_len, "range_ratio": args.range_ratio, "request_rate": args.request_rate}
    result = {"bench": "stock_client", **compared(figures), "figures": figures, "valid": valid}
    result |= {"rounds": args.rounds, "seed": args.seed, "workload": workload, "model": args.model_name, **state}
    emit(result | environment(), "stock_client", args.out)
    return 0 if valid else 1


def page(result: Result) -> str:
    """Medians over rounds of what SGLang's own client reports."""
    rows = []
    for key in result["figures"]["stock"][0]:
        medians = [statistics.median(round_[key] for round_ in result["figures"][arm]) for arm in ("stock", "ours")]
        ratio = result.get(f"{key}_ratio")
        rows.append([f"`{key}`", *(f"{value:.4g}" for value in medians), "-" if ratio is None else f"{ratio:.2f}x"])
    work = result["workload"]
    rounds = describe_rounds(result["rounds"])
    conditions = f"{rounds}, medians · {work['num_prompts']} prompts, input length {work['input_len']}"
    return markdown(["figure", "stock", "ours", "ours / stock"], rows) + "\n\n" + conditions


PAGES = {"stock_client": page}
