"""``python -m bench.padding``: tokens that graph layouts compute for each wanted one, on LMSYS-like prompt lengths.

First and later turns of ``pla_sglang.workload`` in equal parts, without prompts above ``--longest`` tokens: those are
long, and no graph of ours takes them. Three arms on the same prompts: *varlen* (token buckets), *grid* (the paper's
powers of two, batches in order of arrival), *grid grouped* (each batch taken from four times as many waiting prompts,
grouped by padded length). Arithmetic only: the same figures on every machine. Last stdout line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from bench.lib.plot import COLOURS
from pla_sglang.policy.buckets.layouts import SLOTS, GridLayout, Layout, VariableLayout, group_by_length, token_steps
from pla_sglang.workload import length_model

SIZES = (1, 2, 4, 8, 16, 32, 64)
MODELS = ("lmsys_first_turn_prompt", "lmsys_later_turn_prompt")
POOL = 4  # batches' worth of prompts that grouping chooses from
ARMS = ("varlen", "grid", "grid_grouped")
Batches = list[list[int]]


def prompts(count: int, longest: int, rng: random.Random) -> list[int]:
    """New tokens of ``count`` prompts, each at most ``longest``."""
    models = [length_model(name) for name in MODELS]
    found: list[int] = []
    while len(found) < count:
        tokens = models[len(found) % len(models)].draw(rng)
        if tokens <= longest:
            found.append(tokens)
    return found


def in_order(lengths: Sequence[int], size: int) -> Batches:
    return [list(lengths[start : start + size]) for start in range(0, len(lengths), size)]


def grouped(lengths: Sequence[int], size: int, grid: GridLayout) -> Batches:
    """Batches of up to ``size`` prompts of one padded length, from pools of ``POOL`` times as many."""
    batches: Batches = []
    for pool in in_order(lengths, POOL * size):
        for members in group_by_length(pool, grid):
            batches += in_order([pool[member] for member in members], size)
    return batches


def waste_of(batches: Batches, layout: Layout) -> float:
    """Tokens computed over tokens wanted, over all batches. Every one must have a shape."""
    computed = wanted = 0
    for batch in batches:
        bucket = layout.nearest(batch)
        assert bucket is not None, f"no shape for {len(batch)} prompts of {sum(batch)} tokens"
        computed += bucket.tokens
        wanted += sum(batch)
    return computed / wanted


def measure(count: int, longest: int, seed: int) -> dict[str, dict[str, float]]:
    """Waste by arm, then by batch size; ``overall`` weighs every prompt alike over all sizes."""
    grid = GridLayout()
    varlen = VariableLayout(token_steps(SIZES[-1] * longest), SLOTS, longest)
    arms: dict[str, tuple[Layout, Callable[[Sequence[int], int], Batches]]] = {
        "varlen": (varlen, in_order),
        "grid": (grid, in_order),
        "grid_grouped": (grid, lambda lengths, size: grouped(lengths, size, grid)),
    }
    lengths = prompts(count, longest, random.Random(seed))
    found: dict[str, dict[str, float]] = {}
    for arm, (layout, split) in arms.items():
        batches = {size: split(lengths, size) for size in SIZES}
        found[arm] = {str(size): round(waste_of(of_size, layout), 4) for size, of_size in batches.items()}
        found[arm]["overall"] = round(waste_of([batch for of_size in batches.values() for batch in of_size], layout), 4)
    return found


def plot(found: dict[str, dict[str, float]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for arm, colour in zip(ARMS, COLOURS, strict=False):
        values = [found[arm][str(size)] for size in SIZES]
        axes.plot(SIZES, values, marker="o", color=colour, label=f"{arm} ({found[arm]['overall']:.2f} overall)")
    axes.axhline(1.1, color="#7f7f7f", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.set_xlabel("requests in the batch")
    axes.set_ylabel("tokens computed / tokens wanted")
    axes.set_title("Padding of graph layouts, LMSYS-like prompts (dashed: 1.10)", fontsize=10)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def show(found: dict[str, dict[str, float]]) -> None:
    table = Table(title="tokens computed / tokens wanted")
    for name in ("requests", *ARMS):
        table.add_column(name, justify="right")
    for size in (*map(str, SIZES), "overall"):
        table.add_row(size, *(f"{found[arm][size]:.3f}" for arm in ARMS))
    Console(width=100).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.padding", description=__doc__)
    parser.add_argument("--prompts", type=int, default=50_000, help="prompts of each batch size (default 50000)")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a short prompt at most (default 256)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for padding.json and padding.png")
    args = parser.parse_args(argv)
    if args.prompts < POOL * SIZES[-1] or not 1 <= args.longest <= 256:
        parser.error(f"--prompts must be at least {POOL * SIZES[-1]}, --longest from 1 to 256")
    found = measure(args.prompts, args.longest, args.seed)
    show(found)
    result: dict[str, Any] = {
        "bench": "padding",
        **{f"{arm}_waste": found[arm] for arm in ARMS},
        "seed": args.seed,
        "workload": {"models": list(MODELS), "longest_tokens": args.longest, "prompts": args.prompts},
    }
    if args.out is not None:
        plot(found, args.out / "padding.png")
        (args.out / "padding.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
