"""``hol --device emulated``: the head-of-line workload at full size, 18 prompts of 24K and 11 of 2K tokens.

SGLang issue 22831 with its own lengths on the emulated device, every other flag SGLang's default for such a GPU (chunks
of 8,192 tokens, overlap schedule). Longs arrive within a second, shorts one by one while the longs run. Ratios are
taken within a round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.harness import engines, report
from bench.harness.arms import HRRN, MIXED, SPF, Arm
from bench.harness.bench import Result
from bench.harness.cli import add_budget
from bench.harness.engines import Setup
from bench.harness.figures import draw_ecdf, panels
from bench.harness.latency import percentile, spread
from bench.harness.replay import Planned
from bench.harness.report import (
    emit,
    emulated_conditions,
    environment,
    keep_columns,
    markdown,
    scale_text,
    show,
    spread_text,
    yes_no,
)
from bench.harness.steps import Row
from bench.harness.workload import HolShape, hol_arrivals, round_rng
from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles import load_profile
from pla_sglang.sim import chain

PROFILE = "h200-qwen2.5-14b-tp1"
ALONE = 5  # longs that come one by one
CHUNK_2560 = ("--chunked-prefill-size", "2560")  # just above the shorts
ARMS = {
    arm.name: arm
    for arm in (
        Arm("stock", ()),
        Arm("ours", ("--prefill-disagg", "temporal")),
        Arm("ride", ("--prefill-disagg", "temporal", "--enable-mixed-chunk")),
        Arm("spf", SPF),
        Arm("spf2560", (*SPF, *CHUNK_2560)),
        Arm("spf2560mix", (*SPF, *MIXED, *CHUNK_2560)),
        Arm("hrrn", HRRN),
        Arm("hrrn2560", (*HRRN, *CHUNK_2560)),
    )
}
FIGURES = (
    *("short_ttft_p50_s", "short_ttft_p99_s", "short_last_token_p50_s"),
    *("long_ttft_p50_s", "long_ttft_p90_s", "tokens_per_s"),
)
# ratio -> (figure, stock over the arm?): each above or below 1 as its name says
RATIOS = {
    "short_ttft_p99_gain": ("short_ttft_p99_s", True),
    "short_ttft_p50_ratio": ("short_ttft_p50_s", False),
    "short_last_token_p50_ratio": ("short_last_token_p50_s", False),
    "long_ttft_p90_ratio": ("long_ttft_p90_s", False),
    "throughput_ratio": ("tokens_per_s", False),
}


def long_work_s(shape: HolShape, profile: str) -> float:
    """Device time of all longs, one after the other in whole chunks."""
    known = load_profile(profile)
    total_s, done = 0.0, 0
    while done < shape.long_tokens:
        size = min(shape.chunk_tokens, shape.long_tokens - done)
        total_s += known.prefill_s(size, size * (size + 2 * done), done)
        done += size
    return shape.long_count * total_s


def planned(shape: HolShape, key: Mapping[str, Any], work_s: float) -> list[Planned]:
    """The requests of one round, arrivals in real time."""
    rng = round_rng(key["seed"], key["round"], "hol")
    timed = hol_arrivals(shape, rng, pattern=key["pattern"], burst_s=1.0, spread_s=work_s)
    tokens = {"long": shape.long_tokens, "short": shape.short_tokens}
    answer_tokens = shape.max_new_tokens
    return [
        Planned(index, at_s * key["time_scale"], chain.prompt_of(tokens[kind], answer_tokens, rng), answer_tokens)
        for index, (at_s, kind) in enumerate(timed)
    ]


def planned_alone(shape: HolShape, key: Mapping[str, Any], long_s: float) -> list[Planned]:
    """Longs that find nobody: each comes when the one before it is long done. ``long_s``: device time of one."""
    rng, answer_tokens = round_rng(key["seed"], 0, "alone"), shape.max_new_tokens
    return [
        Planned(
            index,
            index * 2 * long_s * key["time_scale"],
            chain.prompt_of(shape.long_tokens, answer_tokens, rng),
            answer_tokens,
        )
        for index in range(key["alone"])
    ]


def alone_ratios(rows: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """By arm, over stock's; empty where stock has none."""
    median_s = {arm: percentile([ttft_s for _, ttft_s, _ in row["requests"]], 50) for arm, (row, *_) in rows.items()}
    return {arm: value_s / median_s["stock"] for arm, value_s in median_s.items()} if "stock" in median_s else {}


def ttfts_s(row: Row, shape: HolShape, kind: str, *, last: bool = False) -> list[float]:
    """Of one class in one round, in device time; ``last``: until the last token."""
    limit = (shape.short_tokens + shape.long_tokens) / 2
    return [times_s[last] for tokens, *times_s in row["requests"] if (tokens < limit) == (kind == "short")]


def round_figures(row: Row, shape: HolShape) -> dict[str, float]:
    """Of one round of one arm, in device time."""
    shorts, longs = (ttfts_s(row, shape, kind) for kind in ("short", "long"))
    tokens = sum(tokens for tokens, _, _ in row["requests"]) + row["output_tokens"]
    return {
        "short_ttft_p50_s": percentile(shorts, 50),
        "short_ttft_p99_s": percentile(shorts, 99),
        "short_last_token_p50_s": percentile(ttfts_s(row, shape, "short", last=True), 50),
        "long_ttft_p50_s": percentile(longs, 50),
        "long_ttft_p90_s": percentile(longs, 90),
        "tokens_per_s": tokens / row["span_s"],
    }


def arm_figures(rows: Sequence[Row], shape: HolShape) -> dict[str, Any]:
    """Medians over the rounds with the lowest and the highest."""
    rounds = [round_figures(row, shape) for row in rows]
    return {name: asdict(spread([of_round[name] for of_round in rounds])) for name in FIGURES} | engines.quality(rows)


def ratios(rows: Mapping[str, Sequence[Row]], shape: HolShape) -> dict[str, dict[str, Any]]:
    """Against stock, within each round; none where stock did not run."""
    rounds = {arm: [round_figures(row, shape) for row in own] for arm, own in rows.items()}
    against: dict[str, dict[str, Any]] = {}
    for arm, own in rounds.items() if "stock" in rounds else ():
        pairs = list(zip(own, rounds["stock"], strict=False))
        against[arm] = {}
        for name, (figure, is_gain) in RATIOS.items():
            values = [of_arm[figure] / of_stock[figure] for of_arm, of_stock in pairs]
            against[arm][name] = asdict(spread([1 / value for value in values] if is_gain else values))
    return against


def last_token_vs_pure(arms: Mapping[str, Any]) -> float | None:
    """Median last token of shorts where decodes ride over that of the pure form; None where one did not run."""
    if not {"ride", "ours"} <= set(arms):
        return None
    ride, pure = (arms[arm]["short_last_token_p50_s"]["median"] for arm in ("ride", "ours"))
    return float(ride / pure)


def arms_table(result: Result) -> report.Cells:
    rows = []
    for arm, own in result["arms"].items():
        to_stock = result["ratios"].get(arm, {})
        figures = ("short_ttft_p50_s", "short_ttft_p99_s", "short_last_token_p50_s", "long_ttft_p90_s")
        cells = [spread_text(own[name], " s") for name in figures]
        keys = ("short_ttft_p99_gain", "long_ttft_p90_ratio", "throughput_ratio")
        cells += [spread_text(to_stock.get(key), "x") for key in keys]
        rows.append([f"`{arm}`", own["sglang"], *cells, f"{own['host_overhead_share']:.1%}", yes_no(own["valid"])])
    header = ["arm", "SGLang", "short TTFT p50", "short TTFT p99", "short last token p50", "long TTFT p90"]
    return [*header, "short p99 gain", "long p90 ratio", "throughput", "host in the way", "valid"], rows


def plot(rows: Mapping[str, Sequence[Row]], shape: HolShape, path: Path, title: str) -> None:
    with panels(path, 2, size=(10.5, 4.4), title=title) as axes:
        for panel, kind in zip(axes, ("short", "long"), strict=True):
            samples = {
                arm: [ttft_s for row in own for ttft_s in ttfts_s(row, shape, kind)] for arm, own in rows.items()
            }
            draw_ecdf(panel, samples, kind)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    emulated = parser.add_argument_group("--device emulated")
    emulated.add_argument("--profile", default=PROFILE, help="of the emulated device")
    emulated.add_argument("--time-scale", type=float, default=1.0, help="how much slower the device is")
    engines.add_peer_python(emulated)
    add_budget(emulated)


def shape_of(args: argparse.Namespace) -> HolShape:
    """Raises ConfigError for a flag that this form does not have, and for a bad scale."""
    unused: tuple[str, ...] = ("ablation", "peer", "our_flags", "model_path", "server_flags", "kv_tokens")
    unused += ("spread_s", "chunk_tokens")
    if given := [f"--{name.replace('_', '-')}" for name in unused if getattr(args, name)]:
        raise ConfigError(f"{', '.join(given)} cannot be used with --device emulated")
    args.scale = 1.0 if args.scale is None else args.scale
    if args.quick:
        args.rounds = 1
    shape = HolShape.of_issue(args.scale, max_new_tokens=args.max_new_tokens)
    return replace(shape, long_count=6, short_count=4) if args.quick else shape


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    shape = shape_of(args)
    chosen = engines.choose(args.arms, ARMS, args.peer_python)
    flags = ("--chunked-prefill-size", str(shape.chunk_tokens))
    setup = Setup(args.profile, args.time_scale, flags, args.out, "hol_emulated", args.peer_python)
    settings = {name: getattr(args, name) for name in ("profile", "scale", "pattern", "time_scale", "seed")}
    settings_of_step = settings | ({"quick": True} if args.quick else {})
    keys = [settings_of_step | {"round": index} for index in range(args.rounds)] + [settings_of_step | {"alone": ALONE}]
    work_s = long_work_s(shape, args.profile)

    def plan_of(key: dict[str, Any]) -> list[Planned]:
        alone = "alone" in key
        return planned_alone(shape, key, work_s / shape.long_count) if alone else planned(shape, key, work_s)

    every = engines.collect(chosen, keys, plan_of, setup=setup, budget_s=args.budget_s)
    rows = {arm: found for arm, own in every.items() if (found := [row for row in own if "round" in row])}
    alone = {arm: found for arm, own in every.items() if (found := [row for row in own if "alone" in row])}
    arms = {arm: arm_figures(own, shape) for arm, own in rows.items()}
    against = ratios(rows, shape)
    result = {
        "bench": "hol_emulated",
        **settings,
        "shape": asdict(shape),
        **{name: {arm: own[name]["median"] for arm, own in against.items()} for name in RATIOS},
        "short_last_token_p50_vs_pure": last_token_vs_pure(arms),
        "long_alone_ratio": alone_ratios(alone),
        "gap_ms_a_pass": {arm: statistics.median(row["gap_ms_a_pass"] for row in own) for arm, own in rows.items()},
        "passes": {arm: statistics.median(row["passes"] for row in own) for arm, own in rows.items()},
        "boundary": {arm: own[-1]["boundary"] for arm, own in rows.items() if own[-1]["boundary"] is not None},
        "rounds": min(map(len, rows.values())),
        "ratios": against,
        "arms": arms,
        "valid": all(own["valid"] for own in arms.values()),
        "environment": environment(),
    }
    sizes = f"{shape.long_count} x {shape.long_tokens:,} and {shape.short_count} x {shape.short_tokens:,} tokens"
    title = f"{sizes}, {args.profile}"
    show(title, *arms_table(result), caption="median over rounds (lowest .. highest), device time")
    plot(rows, shape, args.out / "hol_emulated.png", title)
    for arm, ratio in result["long_alone_ratio"].items():
        report.say(f"{arm}: a lone long takes {ratio:.3f} of stock's time, {result['passes'][arm]:.0f} passes a round")
    emit(result, "hol_emulated", args.out)
    return 0 if result["valid"] else 1


PAGE_COLUMNS = (
    "arm",
    "SGLang",
    "short TTFT p50",
    "short TTFT p99",
    "short last token p50",
    "long TTFT p90",
    "throughput",
)


def page(result: Result) -> str:
    work = f"{result['rounds']} rounds, median (lowest .. highest)"
    conditions = emulated_conditions(result, work, result["profile"], scale_text(result))
    shown = keep_columns(arms_table(result), PAGE_COLUMNS)
    return f"{markdown(*shown)}\n\n{conditions}"
