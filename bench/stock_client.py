"""SGLang's own load client (``python -m sglang.bench_serving``) against stock and against ours.

    python -m bench.stock_client

Random token ids, so that nothing is downloaded. Its table is shown as it is; the figures are compared underneath.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.lib import report
from bench.lib.arms import STOCK
from bench.lib.cli import BenchError, arms_of, check_common, make_fleet, make_parser, run_bench
from bench.lib.compare import final_state
from bench.lib.fleet import Fleet, Member
from bench.lib.results import headline_arm

FIGURES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "total_throughput", "completed")


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = make_parser("stock_client", (__doc__ or "").partition("\n")[0], rounds=1)
    work = parser.add_argument_group("workload")
    work.add_argument("--num-prompts", type=int, default=60)
    work.add_argument("--input-len", type=int, default=2000, help="longest prompt, tokens")
    work.add_argument("--output-len", type=int, default=16, help="longest answer, tokens")
    work.add_argument("--range-ratio", type=float, default=0.05, help="shortest prompt over longest prompt")
    work.add_argument("--request-rate", type=float, default=8.0, help="requests per second, Poisson")
    work.add_argument("--chunk-tokens", type=int, help="--chunked-prefill-size; default: 1024 on a CPU, 8192 on a GPU")
    work.add_argument("--client-flags", default="", metavar="FLAGS", help="further flags for bench_serving")
    args = parser.parse_args(argv)
    check_common(args, parser)
    args.chunk_tokens = args.chunk_tokens or (1024 if args.device == "cpu" else 8192)
    if args.quick:
        args.num_prompts = min(args.num_prompts, 10)
    return args


def client_command(args: argparse.Namespace, url: str, output: Path, seed: int) -> list[str]:
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url]
    command += ["--model", str(args.model_path), "--tokenizer", str(args.model_path), "--dataset-name", "random-ids"]
    command += ["--num-prompts", str(args.num_prompts), "--random-input-len", str(args.input_len)]
    command += ["--random-output-len", str(args.output_len), "--random-range-ratio", str(args.range_ratio)]
    command += ["--request-rate", str(args.request_rate), "--seed", str(seed), "--flush-cache", "--tokenize-prompt"]
    return [*command, "--disable-tqdm", "--output-file", str(output), *shlex.split(args.client_flags)]


async def run_client(command: list[str], output: Path) -> dict[str, Any]:
    """Show what the client prints, and return the figures that it wrote.

    Raises:
        BenchError: the client failed or wrote nothing.
    """
    output.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        text, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    shown = text.decode("utf-8", "replace")
    start = shown.find("============ Serving Benchmark Result")
    report.stdout.print(shown[start:] if start >= 0 else shown, markup=False)
    if process.returncode != 0 or not output.is_file():
        raise BenchError(f"bench_serving ended with {process.returncode}")
    figures: dict[str, Any] = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    return {name: figures.get(name) for name in FIGURES}


async def measure(args: argparse.Namespace, fleet: Fleet) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {member.name: [] for member in fleet.members}
    for index in range(args.rounds):
        shift = index % len(fleet.members)
        for member in [*fleet.members[shift:], *fleet.members[:shift]]:
            found[member.name].append(await _one(args, fleet, member, index))
    return found


async def _one(args: argparse.Namespace, fleet: Fleet, member: Member, index: int) -> dict[str, Any]:
    report.say(f"round {index + 1}/{args.rounds}: sglang.bench_serving against {member.name}")
    output = (args.out / "stock_client" / f"bench_serving-{member.name}.jsonl").absolute()
    async with fleet.awake(member):
        return await run_client(client_command(args, member.server.url, output, args.seed + index), output)


def compared(found: Mapping[str, list[dict[str, Any]]]) -> dict[str, float | None]:
    """Our figure over stock's, paired by round, the median over rounds."""
    arm = headline_arm(found)
    if arm is None or STOCK not in found:
        return {}
    ratios: dict[str, float | None] = {}
    for name in FIGURES:
        pairs = [(mine.get(name), stock.get(name)) for mine, stock in zip(found[arm], found[STOCK], strict=True)]
        of_rounds = [mine / stock for mine, stock in pairs if mine and stock]
        ratios[f"{name}_ratio"] = round(statistics.median(of_rounds), 4) if of_rounds else None
    return ratios


async def bench(args: argparse.Namespace) -> int:
    kv_tokens = 24 * (args.input_len + args.output_len)
    async with make_fleet(
        args, arms_of(args), chunk_tokens=args.chunk_tokens, kv_tokens=kv_tokens, bench="stock_client"
    ) as fleet:
        found = await measure(args, fleet)
        state = await final_state(fleet)
    complete = all(figures["completed"] == args.num_prompts for rounds in found.values() for figures in rounds)
    workload = {"name": "bench_serving random-ids", "num_prompts": args.num_prompts, "input_len": args.input_len}
    workload |= {"output_len": args.output_len, "range_ratio": args.range_ratio, "request_rate": args.request_rate}
    result = {"bench": "stock_client", **compared(found), "figures": found, "valid": complete}
    result |= {"rounds": args.rounds, "seed": args.seed, "workload": workload, "model": args.model_name, **state}
    report.emit(result | report.environment(), args.out, "stock_client")
    return 0 if complete else 1


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    return run_bench(lambda: bench(args))


if __name__ == "__main__":
    sys.exit(main())
