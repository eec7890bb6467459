"""Pictures of runs. Each function draws on axes that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pla_sglang.metrics.latency import ecdf
from pla_sglang.sim.experiment import Outcome
from pla_sglang.sim.samples import GONE, ROLE_ORDER
from pla_sglang.sim.simulation import RunResult

MOST_LINES = 16  # instances that are drawn one by one
MOST_REASONS = 18


def against_rate(axes: Any, outcomes: Sequence[Outcome], figure: str, label: str) -> None:
    """One figure of ``Goodput`` against the rate, a line per policy."""
    for name in dict.fromkeys(one.experiment.policy for one in outcomes):
        mine = sorted(
            (one.rate_per_s, getattr(one.figures, figure)) for one in outcomes if one.experiment.policy == name
        )
        axes.plot([rate for rate, _ in mine], [value for _, value in mine], marker="o", label=name)
    axes.set_xlabel("requests/s")
    axes.set_ylabel(label)
    axes.legend(fontsize=8)


def distribution(axes: Any, outcomes: Sequence[Outcome], what: str, target_s: float) -> None:
    """Empirical distribution of TTFT or TPOT, one line per run, and the target."""
    for one in outcomes:
        values = one.result.served.ttft_s() if what == "TTFT" else one.result.served.tpot_s()
        known = values[np.isfinite(values)]
        if len(known):
            axes.plot(*ecdf(known.tolist()), label=f"{one.experiment.policy} at {one.rate_per_s:.3g}/s")
    if np.isfinite(target_s):
        axes.axvline(target_s, color="black", linestyle=":", label="target")
    axes.set_xscale("log")
    axes.set_xlabel(f"{what}, s")
    axes.set_ylabel("share of requests")
    axes.legend(fontsize=8)


def load(axes: Any, result: RunResult, what: str) -> None:
    """Queued prefill tokens or decode context per instance over time; above 16 instances, quantiles over them."""
    samples = result.samples
    table = samples.queued_tokens if what == "queued prefill tokens" else samples.context_tokens
    if table.shape[1] <= MOST_LINES:
        for index in range(table.shape[1]):
            axes.plot(samples.at_s, table[:, index], linewidth=0.8, label=f"i{index}")
    else:
        for share in (0, 50, 90, 100):
            axes.plot(samples.at_s, np.percentile(table, share, axis=1), linewidth=0.8, label=f"p{share}")
    axes.set_xlabel("s")
    axes.set_ylabel(what)
    axes.legend(fontsize=6, ncol=4)


def membership(axes: Any, result: RunResult) -> None:
    """How many instances each pool has over time."""
    samples = result.samples
    counts = {role.value: (samples.role == place).sum(axis=1) for place, role in enumerate(ROLE_ORDER)}
    counts["not ready"] = (samples.role == GONE).sum(axis=1)
    used = {name: count for name, count in counts.items() if count.any()}
    axes.stackplot(samples.at_s, list(used.values()), labels=list(used), step="post")
    axes.set_xlabel("s")
    axes.set_ylabel("instances")
    axes.legend(fontsize=8)


def reasons(axes: Any, result: RunResult) -> None:
    """Decisions by reason, fleet and engine, the most frequent first."""
    both = {**result.reasons, **{f"pass.{name}": count for name, count in result.pass_reasons.items()}}
    ranked = sorted(both.items(), key=lambda item: (-item[1], item[0]))[:MOST_REASONS][::-1]
    axes.barh([name for name, _ in ranked], [count for _, count in ranked])
    axes.set_xscale("log")
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("decisions")
