"""Tokens that graph layouts compute for each wanted one, on LMSYS-like prompt lengths.

First and later turns of ``pla_sglang.sim.workload`` in equal parts, without prompts above ``--longest`` tokens: those
are long, and no graph of ours takes them. Three arms on the same prompts: *varlen* (token buckets), *grid* (the paper's
powers of two, batches in order of arrival), *grid grouped* (each batch taken from four times as many waiting prompts,
grouped by padded length). For each the padding if every batch ran in a graph, and what an engine does, which replays no
batch that is padded to more than twice its tokens: the share of prompts that are replayed, and their padding.
Arithmetic only: the same figures on every machine.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

from bench.harness.figures import COLOURS, panels
from bench.harness.report import emit, show
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.pla.graphs.layouts import SLOTS, GridLayout, Layout, VariableLayout, token_steps
from pla_sglang.sim.workload import length_model

SIZES = (1, 2, 4, 8, 16, 32, 64)
MODELS = ("lmsys_first_turn_prompt", "lmsys_later_turn_prompt")
POOL = 4  # batches' worth of prompts that grouping chooses from
Batches = list[list[int]]


def draw_prompts(count: int, longest: int, rng: random.Random) -> list[int]:
    """New tokens of ``count`` prompts, each at most ``longest``."""
    models = [length_model(name) for name in MODELS]
    lengths: list[int] = []
    while len(lengths) < count:
        tokens = models[len(lengths) % len(models)].draw(rng)
        lengths += [tokens] if tokens <= longest else []
    return lengths


def in_order(lengths: Sequence[int], size: int) -> Batches:
    return [list(lengths[start : start + size]) for start in range(0, len(lengths), size)]


def grouped(lengths: Sequence[int], size: int, grid: GridLayout) -> Batches:
    """Batches of up to ``size`` prompts of one padded length, from pools of ``POOL`` times as many."""
    batches: Batches = []
    for pool in in_order(lengths, POOL * size):
        groups: dict[int, list[int]] = {}
        for tokens in pool:
            groups.setdefault(grid.batch_group(tokens), []).append(tokens)
        for _, members in sorted(groups.items()):
            batches += in_order(members, size)
    return batches


def waste_of(batches: Batches, layout: Layout) -> float:
    """Tokens computed over tokens wanted, over all batches. Every one must have a shape."""
    computed = 0
    for batch in batches:
        bucket = layout.nearest(batch)
        assert bucket is not None, f"no shape for {len(batch)} prompts of {sum(batch)} tokens"
        computed += bucket.tokens
    return computed / sum(map(sum, batches))


def replayed(batches: Batches, layout: Layout) -> dict[str, float]:
    """Under the padding limit: share of the prompts that are in a replayed batch, and the waste of these batches."""
    taken = [batch for batch in batches if layout.nearest(batch) is not None]
    share = sum(map(len, taken)) / sum(map(len, batches))
    return {"share": round(share, 4), "waste": round(waste_of(taken, layout), 4) if taken else 0.0}


def measure(count: int, longest: int, seed: int) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Waste by arm, then by batch size (``overall`` weighs every prompt alike over all sizes), and what is replayed."""
    tokens = token_steps(SIZES[-1] * longest)
    grid, varlen = GridLayout(max_padding=math.inf), VariableLayout(tokens, SLOTS, longest, max_padding=math.inf)
    limited: dict[str, Layout] = {
        "varlen": VariableLayout(tokens, SLOTS, longest),
        "grid": GridLayout(),
        "grid_grouped": GridLayout(),
    }
    lengths = draw_prompts(count, longest, random.Random(seed))
    ordered = {size: in_order(lengths, size) for size in SIZES}
    by_length = {size: grouped(lengths, size, grid) for size in SIZES}
    arms: list[tuple[str, Layout, dict[int, Batches]]]
    arms = [("varlen", varlen, ordered), ("grid", grid, ordered), ("grid_grouped", grid, by_length)]
    waste: dict[str, dict[str, float]] = {}
    of_engine: dict[str, dict[str, float]] = {}
    for arm, layout, batches in arms:
        waste[arm] = {str(size): round(waste_of(of_size, layout), 4) for size, of_size in batches.items()}
        everything = [*itertools.chain(*batches.values())]
        waste[arm]["overall"] = round(waste_of(everything, layout), 4)
        of_engine[arm] = replayed(everything, limited[arm])
    return waste, of_engine


def plot(waste: dict[str, dict[str, float]], path: Path) -> None:
    title = "Padding of graph layouts, LMSYS-like prompts (dashed: 1.10)"
    with panels(path, size=(6.4, 4.0), title=title) as (panel,):
        for (arm, of_sizes), colour in zip(waste.items(), COLOURS, strict=False):
            values = [of_sizes[str(size)] for size in SIZES]
            panel.plot(SIZES, values, marker="o", color=colour, label=f"{arm} ({of_sizes['overall']:.2f} overall)")
        panel.axhline(1.1, color="#7f7f7f", linewidth=0.8, linestyle="--")
        panel.set_xscale("log", base=2)
        panel.set_xticks(SIZES, [str(size) for size in SIZES])
        panel.set(xlabel="requests in the batch", ylabel="tokens computed / tokens wanted")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=50_000, help="prompts of each batch size")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a short prompt at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for padding.json and padding.png")


def run(options: argparse.Namespace) -> int:
    if options.prompts < POOL * SIZES[-1] or not 1 <= options.longest <= 256:
        raise ConfigError(f"--prompts must be at least {POOL * SIZES[-1]}, --longest from 1 to 256")
    waste, of_engine = measure(options.prompts, options.longest, options.seed)
    rows = [[size, *(f"{of_sizes[size]:.3f}" for of_sizes in waste.values())] for size in (*map(str, SIZES), "overall")]
    show("tokens computed / tokens wanted", ("requests", *waste), rows)
    rows = [[arm, f"{kept['share']:.3f}", f"{kept['waste']:.3f}"] for arm, kept in of_engine.items()]
    show("under the padding limit of 2", ("layout", "prompts replayed", "computed / wanted"), rows)
    if options.out is not None:
        plot(waste, options.out / "padding.png")
    workload = {"models": list(MODELS), "longest_tokens": options.longest, "prompts": options.prompts}
    figures = {f"{arm}_waste": of_sizes for arm, of_sizes in waste.items()}
    figures |= {f"{arm}_replayed": kept for arm, kept in of_engine.items()}
    emit({"bench": "padding", **figures, "seed": options.seed, "workload": workload}, "padding", options.out)
    return 0
