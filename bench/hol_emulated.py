"""``python -m bench.hol_emulated``: head-of-line blocking at full size, 18 prompts of 24K and 11 of 2K tokens.

SGLang issue 22831 with its own lengths on the emulated device, profile ``h200-qwen2.5-14b-tp1``, every other flag
SGLang's default for such a GPU (chunks of 8,192 tokens, overlap schedule). ``bench.hol`` is the same on a real device.
Longs arrive within a second, shorts one by one while the longs run. Arms: ``stock``; ``ours``, temporal disaggregation
with default knobs; with ``--peer-python`` of an SGLang 0.5.23 its shortest-prefill-first with default chunks (``spf``)
and with chunks just above the shorts (``spf2560``). Ratios are taken within a round. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.lib.picture import panels
from bench.lib.plot import arm_colours, log_seconds
from bench.lib.report import emit, environment
from bench.lib.tables import show
from bench.lib.workload import PATTERNS, HolShape, hol_arrivals, round_rng
from bench.replaying import engines
from bench.replaying.engines import Arm, Setup
from bench.replaying.plan import Planned
from bench.replaying.steps import Row
from bench.replaying.stopping import exit_status
from pla_sglang import chain
from pla_sglang.errors import ConfigError
from pla_sglang.metrics.latency import ecdf, percentile, spread
from pla_sglang.profiles import load_profile

SPF = ("--schedule-policy", "shortest-prefill-first")
ARMS = {
    arm.name: arm
    for arm in (
        Arm("stock", ()),
        Arm("ours", ("--prefill-disagg", "temporal")),
        Arm("spf", SPF, peer=True),
        Arm("spf2560", (*SPF, "--chunked-prefill-size", "2560"), peer=True),
    )
}
FIGURES = ("short_ttft_p50_s", "short_ttft_p99_s", "long_ttft_p50_s", "long_ttft_p90_s", "tokens_per_s")
# ratio -> (figure, stock over the arm?): each above or below 1 as its name says
RATIOS = {
    "short_ttft_p99_gain": ("short_ttft_p99_s", True),
    "short_ttft_p50_ratio": ("short_ttft_p50_s", False),
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
    answer = shape.max_new_tokens
    return [
        Planned(index, at_s * key["time_scale"], chain.prompt_of(tokens[kind], answer, rng), answer)
        for index, (at_s, kind) in enumerate(timed)
    ]


def round_figures(row: Row, shape: HolShape) -> dict[str, float]:
    """Of one round of one arm, in device time."""
    limit = (shape.short_tokens + shape.long_tokens) / 2
    shorts = [first_s for tokens, first_s, _ in row["requests"] if tokens < limit]
    longs = [first_s for tokens, first_s, _ in row["requests"] if tokens >= limit]
    tokens = sum(tokens for tokens, _, _ in row["requests"]) + row["output_tokens"]
    return {
        "short_ttft_p50_s": percentile(shorts, 50),
        "short_ttft_p99_s": percentile(shorts, 99),
        "long_ttft_p50_s": percentile(longs, 50),
        "long_ttft_p90_s": percentile(longs, 90),
        "tokens_per_s": tokens / row["span_s"],
    }


def arm_figures(rows: Sequence[Row], shape: HolShape) -> dict[str, Any]:
    """Medians over the rounds with the lowest and the highest."""
    rounds = [round_figures(row, shape) for row in rows]
    return {name: asdict(spread([one[name] for one in rounds])) for name in FIGURES} | engines.quality(rows)


def ratios(rows: Mapping[str, Sequence[Row]], shape: HolShape) -> dict[str, dict[str, Any]]:
    """Against stock, within each round; none where stock did not run."""
    found: dict[str, dict[str, Any]] = {}
    stock = [round_figures(row, shape) for row in rows.get("stock", ())]
    for arm in rows if stock else ():
        own = [round_figures(row, shape) for row in rows[arm]]
        found[arm] = {}
        for name, (figure, inverse) in RATIOS.items():
            pairs = [(a[figure], b[figure]) for a, b in zip(own, stock, strict=False)]
            found[arm][name] = asdict(spread([base / mine if inverse else mine / base for mine, base in pairs]))
    return found


def print_table(arms: Mapping[str, Any], against: Mapping[str, Any], title: str) -> None:
    def cell(value: Mapping[str, float] | None) -> str:
        return "-" if value is None else f"{value['median']:.3g} ({value['low']:.3g} .. {value['high']:.3g})"

    rows = []
    for arm, own in arms.items():
        shown = [cell(own[name]) for name in FIGURES] + [cell(against.get(arm, {}).get(name)) for name in RATIOS]
        rows.append([arm, *shown, f"{own['host_overhead_share']:.1%}", own["valid"]])
    header = ("arm", *FIGURES, *RATIOS, "host_overhead_share", "valid")
    show(title, header, rows, caption="median over rounds (lowest .. highest), device time")


def plot(rows: Mapping[str, Sequence[Row]], shape: HolShape, path: Path, title: str) -> None:
    """Distribution of TTFT by class, all rounds together."""
    colours = arm_colours(list(rows))
    limit = (shape.short_tokens + shape.long_tokens) / 2
    with panels(path, 2, size=(10.5, 4.4), title=title) as axes:
        for panel, kind in zip(axes, ("short", "long"), strict=True):
            everything: list[float] = []
            for arm, own in rows.items():
                mine = [
                    one for row in own for tokens, one, _ in row["requests"] if (tokens < limit) == (kind == "short")
                ]
                values, shares = ecdf(mine)
                panel.step(values, shares, where="post", color=colours[arm], label=arm)
                everything += values
            low, high = min(everything) * 0.8, max(everything) * 1.25
            panel.set(xscale="log", xlim=(low, high), ylim=(0, 1.02), xlabel=f"time to first token, {kind} prompts")
            log_seconds(panel.xaxis, low, high)
            panel.set_ylabel("share of requests")
            panel.grid(alpha=0.3)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.hol_emulated", description=(__doc__ or "").split("\n\n")[0])
    engines.add_arguments(made, ARMS)
    made.add_argument("--profile", default="h200-qwen2.5-14b-tp1")
    made.add_argument("--scale", type=float, default=1.0, help="divides prompt lengths and chunk")
    made.add_argument("--pattern", choices=PATTERNS, default="stream")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--max-new-tokens", type=int, default=8)
    made.add_argument("--seed", type=int, default=0)
    return made


def measure(options: argparse.Namespace, shape: HolShape) -> dict[str, list[Row]]:
    """Rows by arm, one per round that is finished. Raises ConfigError, ServerError, NoStepError."""
    chosen = engines.choose(options.arms, ARMS, options.peer_python)
    flags = ("--chunked-prefill-size", str(shape.chunk_tokens))
    setup = Setup(options.profile, options.time_scale, flags, options.out, "hol_emulated", options.peer_python)
    settings = {name: getattr(options, name) for name in ("profile", "scale", "pattern", "time_scale", "seed")}
    keys = [settings | {"round": index} for index in range(options.rounds)]
    work_s = long_work_s(shape, options.profile)
    return engines.collect(
        chosen, keys, lambda key: planned(shape, key, work_s), setup=setup, budget_s=options.budget_s
    )


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError, NoStepError."""
    if not options.scale > 0:
        raise ConfigError(f"--scale {options.scale} is out of range; allowed: above 0")
    shape = HolShape.of_issue(options.scale, max_new_tokens=options.max_new_tokens)
    rows = measure(options, shape)
    arms = {arm: arm_figures(own, shape) for arm, own in rows.items()}
    against = ratios(rows, shape)
    sizes = f"{shape.long_count} x {shape.long_tokens:,} and {shape.short_count} x {shape.short_tokens:,} tokens"
    title = f"{sizes}, {options.profile}"
    print_table(arms, against, title)
    plot(rows, shape, options.out / "hol_emulated.png", title)
    keys = ("profile", "scale", "pattern", "time_scale", "seed")
    settings = {name: getattr(options, name) for name in keys} | {"shape": asdict(shape)}
    outcome: dict[str, Any] = {name: {arm: own[name]["median"] for arm, own in against.items()} for name in RATIOS}
    valid = all(own["valid"] for own in arms.values())
    outcome |= {"rounds": min(map(len, rows.values())), "ratios": against, "arms": arms, "valid": valid}
    emit({"bench": "hol_emulated", **settings, **outcome, "environment": environment()}, options.out, "hol_emulated")
    return 0 if valid else 1


def main(argv: list[str] | None = None) -> int:
    return exit_status(run, parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
