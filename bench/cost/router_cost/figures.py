"""From samples to figures, the goals that our router is to reach, and the table of both. Pure.

The goals are for the full product on two cores, set from prototypes before it was written.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.cost.router_cost.client import HELD_STREAMS, RATES_PER_S, quantile
from bench.harness.report import Cells, markdown, number

MOVABLE = "ours_movable"
TLS, LIMITS = "ours_tls", "ours_limits"
MOST_RATIO = {TLS: 1.6, LIMITS: 1.03}  # CPU time a request, over that of the arm "ours"
ARMS = ("ours", "ours_quickack", "ours_one_process", MOVABLE, TLS, LIMITS, "mini_lb", "rust", "rust_quickack")
CALM_CORES = 0.35  # other work on the machine, in cores, up to which a sample counts as calm
SPLIT_LIMIT_MS = 0.2  # what the control plane in a process of its own may add to the median
Sample = Mapping[str, Any]
Samples = Mapping[str, Sequence[Sample]]  # probe -> one sample a round


@dataclasses.dataclass(frozen=True)
class Goal:
    """One figure of an arm. ``limit``: the most it may be, or the least where ``at_least``."""

    key: str
    title: str
    limit: float
    at_least: bool = False

    def met_by(self, figures: Mapping[str, Any]) -> bool:
        """Of an arm; False where it was not measured."""
        value = figures.get(self.key)
        if value is None:
            return False
        return bool(value >= self.limit if self.at_least else value <= self.limit)


EVENT_GOAL = Goal("us_per_event", "CPU an event, us", 24.0)  # of streams that can move, too
MOVABLE_MISSED = f"{MOVABLE}.{EVENT_GOAL.key}"
GOALS = (
    Goal("added_ttft_p50_ms", "added TTFT at 200/s, p50 ms", 0.6),
    Goal("added_ttft_p99_ms", "p99 ms", 2.0),
    Goal("added_ttft_p50_ms_400_per_s", "added TTFT at 400/s, p50 ms", 0.7),
    Goal("added_ttft_p99_ms_400_per_s", "p99 ms", 4.0),
    Goal("cpu_ms_per_request", "CPU a non-stream request, ms", 0.15),
    Goal("cpu_ms_per_stream", "CPU a 16-token stream at 200/s, ms", 0.8),
    EVENT_GOAL,
    Goal("requests_per_s", "non-stream requests a second", 8_000, at_least=True),
    Goal("events_per_s", "events a second", 50_000, at_least=True),
    Goal("long_body_rps", "requests of 60K tokens a second", 1_000, at_least=True),
    Goal("mb_idle", "idle, MB", 45.0),
    Goal("kb_per_stream", "an open stream, KB", 10.0),
)


def is_calm(sample: Sample) -> bool:
    return bool(sample["other_cores"] < CALM_CORES)


def calm(samples: Sequence[Sample]) -> list[Sample]:
    """Those without much other work on the machine; the calmest one where there is none."""
    return [*filter(is_calm, samples)] or [min(samples, key=lambda sample: sample["other_cores"])]


def median(samples: Sequence[Sample], figure: Callable[[Sample], float | None]) -> float | None:
    """Over calm rounds, of those that have the figure."""
    values = [value for sample in calm(samples) if (value := figure(sample)) is not None]
    return statistics.median(values) if values else None


def median_ttft_ms(samples: Sequence[Sample], q: float) -> float | None:
    return median(samples, lambda sample: quantile(sample["ttfts_ms"], q) if sample["ttfts_ms"] else None)


def cpu_ms(sample: Sample) -> float | None:
    """Of the router, for one that was completed."""
    return 1e3 * sample["cpu_s"] / sample["completed"] if sample["completed"] else None


def rate_per_s(sample: Sample) -> float:
    return float(sample["completed"] / sample["window_s"])


def figures(samples: Samples, direct: Samples) -> dict[str, Any]:
    """One arm's figures. ``direct``: the same probes without a router, of the same run.

    TTFT is what the router adds: a quantile through it, less the direct median.
    """
    figures: dict[str, Any] = {}
    for rate, suffix in zip(RATES_PER_S, ("", "_400_per_s"), strict=True):
        base_ms = median_ttft_ms(direct[f"stream_{rate}"], 50)
        for q in (50, 99):
            value_ms = median_ttft_ms(samples[f"stream_{rate}"], q)
            added_ms = None if value_ms is None or base_ms is None else value_ms - base_ms
            figures[f"added_ttft_p{q}_ms{suffix}"] = added_ms
    figures["cpu_ms_per_stream"] = median(samples[f"stream_{RATES_PER_S[0]}"], cpu_ms)
    if "closed" in samples:
        figures |= throughput(samples)
    figures["errors"] = sum(sample["errors"] for of_probe in samples.values() for sample in of_probe)
    figures["calm"] = all(is_calm(sample) for of_probe in samples.values() for sample in calm(of_probe))
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}


def throughput(samples: Samples) -> dict[str, Any]:
    held, flood, closed, long = (samples[probe] for probe in ("held", "flood", "closed", "long"))
    event_ms = median(held, cpu_ms)
    return {
        "cpu_ms_per_request": median(closed, cpu_ms),
        "requests_per_s": median(closed, rate_per_s),
        "long_body_rps": median(long, rate_per_s),
        "cpu_ms_per_long_body": median(long, cpu_ms),
        "us_per_event": None if event_ms is None else event_ms * 1e3,
        "event_delay_p50_ms": median(held, lambda sample: sample["delay_ms"]["p50"]),
        "event_delay_p99_ms": median(held, lambda sample: sample["delay_ms"]["p99"]),
        "events_per_s": median(flood, rate_per_s),
        "flood_delay_p99_ms": median(flood, lambda sample: sample["delay_ms"]["p99"]),
        "mb_idle": min(sample["idle_bytes"] for of_probe in samples.values() for sample in of_probe) / 1e6,
        "kb_per_stream": median(
            held, lambda sample: (sample["open_bytes"] - sample["idle_bytes"]) / HELD_STREAMS / 1024
        ),
    }


def split_ms(by_arm: Mapping[str, Mapping[str, Any]]) -> float | None:
    """What the control plane in a process of its own adds to the median TTFT at 200/s."""
    apart, together = (by_arm.get(arm, {}).get("added_ttft_p50_ms") for arm in ("ours", "ours_one_process"))
    return None if apart is None or together is None else round(apart - together, 4)


def cpu_ratios(by_arm: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What TLS, and keys with limits, cost in CPU time: over the arm ``ours`` of the same run; what was measured."""
    ratios: dict[str, dict[str, float]] = {}
    for arm in MOST_RATIO:
        for key in ("cpu_ms_per_request", "cpu_ms_per_stream", "us_per_event", "cpu_ms_per_long_body"):
            own, plain = (by_arm.get(name, {}).get(key) for name in (arm, "ours"))
            if own is not None and plain:
                ratios.setdefault(arm, {})[key] = round(own / plain, 3)
    return ratios


def missed(by_arm: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Keys of the goals that the arm ``ours`` does not reach, and ``MOVABLE_MISSED``; what was not measured counts as
    missed."""
    ours = by_arm.get("ours", {})
    keys = [goal.key for goal in GOALS if not goal.met_by(ours)]
    if not EVENT_GOAL.met_by(by_arm.get(MOVABLE, {})):
        keys.append(MOVABLE_MISSED)
    ratios = cpu_ratios(by_arm)
    keys += [arm for arm, of_arm in ratios.items() if of_arm.get("cpu_ms_per_request", 0.0) > MOST_RATIO[arm]]
    split = split_ms(by_arm)
    return keys if split is not None and split <= SPLIT_LIMIT_MS else [*keys, "split_added_ttft_p50_ms"]


def table(result: Mapping[str, Any], arms: Sequence[str]) -> Cells:
    """A row a figure, a column an arm."""
    rows = []
    for goal in GOALS:
        limit = f"{'at least ' if goal.at_least else ''}{goal.limit:,g}"
        cells = {arm: number(result[arm].get(goal.key)) for arm in arms}
        if goal.key in result["goals_missed"] and "ours" in cells:
            cells["ours"] += " (missed)"
        if goal is EVENT_GOAL and MOVABLE_MISSED in result["goals_missed"] and MOVABLE in cells:
            cells[MOVABLE] += " (missed)"
        rows.append([goal.title, limit, *cells.values()])
    return ["figure", "goal", *arms], rows


def page(result: Mapping[str, Any]) -> str:
    split, arms = result["split_added_ttft_p50_ms"], [arm for arm in ARMS if arm in result]
    rounds = f"{result['rounds']} rounds, probes of {result['duration_s']:g} s, medians over calm rounds"
    return (
        markdown(*table(result, arms))
        + f"\n\nThe control plane in a process of its own adds {split:.2f} ms to the median (goal: {SPLIT_LIMIT_MS:g})."
        + f" Errors: {sum(result[arm]['errors'] for arm in arms)}.\n\n"
        + f"{rounds} · {result['hardware']} · commit {result['plugin_commit']} · seed {result['seed']}"
    )
