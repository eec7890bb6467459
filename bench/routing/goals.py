"""What the router is to cost, and the page that compares it with what was measured. Pure.

The goals are for the full product on two cores, set from prototypes before it was written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bench.lib.tables import markdown as table

ARMS = ("ours", "ours_quickack", "ours_one_process", "ours_zmq", "mini_lb", "rust", "rust_quickack")


@dataclasses.dataclass(frozen=True)
class Goal:
    """One figure of an arm. ``limit``: the most it may be, or the least where ``at_least``."""

    key: str
    title: str
    limit: float
    at_least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


GOALS = (
    Goal("added_ttft_p50_ms", "added TTFT at 200/s, p50 ms", 0.6),
    Goal("added_ttft_p99_ms", "p99 ms", 2.0),
    Goal("added_ttft_p50_ms_400_per_s", "added TTFT at 400/s, p50 ms", 0.7),
    Goal("added_ttft_p99_ms_400_per_s", "p99 ms", 4.0),
    Goal("cpu_ms_per_request", "CPU a non-stream request, ms", 0.15),
    Goal("cpu_ms_per_stream", "CPU a 16-token stream at 200/s, ms", 0.8),
    Goal("us_per_event", "CPU an event, us", 24.0),
    Goal("requests_per_s", "non-stream requests a second", 8_000, at_least=True),
    Goal("events_per_s", "events a second", 50_000, at_least=True),
    Goal("long_body_rps", "requests of 60K tokens a second", 1_000, at_least=True),
    Goal("mb_idle", "idle, MB", 45.0),
    Goal("kb_per_stream", "an open stream, KB", 10.0),
)
SPLIT_LIMIT_MS = 0.2  # what the control plane in a process of its own may add to the median


def split_ms(by_arm: Mapping[str, Mapping[str, Any]]) -> float | None:
    """What the control plane in a process of its own adds to the median TTFT at 200/s."""
    apart, together = (by_arm.get(arm, {}).get("added_ttft_p50_ms") for arm in ("ours", "ours_one_process"))
    return None if apart is None or together is None else round(apart - together, 4)


def missed(by_arm: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Keys of the goals that the arm ``ours`` does not reach; what was not measured counts as missed."""
    ours = by_arm.get("ours", {})
    keys = [goal.key for goal in GOALS if ours.get(goal.key) is None or not goal.met(ours[goal.key])]
    split = split_ms(by_arm)
    return keys if split is not None and split <= SPLIT_LIMIT_MS else [*keys, "split_added_ttft_p50_ms"]


def page(result: Mapping[str, Any]) -> str:
    """A row a figure, a column an arm."""
    rows = []
    for goal in GOALS:
        limit = f"{'at least ' if goal.at_least else ''}{goal.limit:,g}"
        cells = ["-" if result[arm].get(goal.key) is None else f"{result[arm][goal.key]:,.3g}" for arm in ARMS]
        late = goal.key in result["goals_missed"]
        rows.append([goal.title, limit, f"{cells[0]}{' (missed)' if late else ''}", *cells[1:]])
    split = result["split_added_ttft_p50_ms"]
    rounds = f"{result['rounds']} rounds, probes of {result['duration_s']:g} s, medians over calm rounds"
    return (
        table(["figure", "goal", *ARMS], rows)
        + f"\n\nThe control plane in a process of its own adds {split:.2f} ms to the median (goal: {SPLIT_LIMIT_MS:g})."
        + f" Errors: {sum(result[arm]['errors'] for arm in ARMS)}.\n\n"
        + f"{rounds} · {result['hardware']} · commit {result['plugin_commit']} · seed {result['seed']}"
    )
