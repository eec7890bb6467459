"""From runs to figures: per class and arm over rounds, ratios between arms, identity of outputs, validity."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.lib.client import Run
from pla_sglang.metrics.latency import Spread, paired_ratio, percentile, spread, summarise

KINDS = ("short", "long")
QUANTILES = ("p50", "p90", "p99", "mean", "max")
CPU_SHARE_LIMIT = 0.5  # of one core: above it the client itself may be what is measured
LAG_LIMIT_S = 0.1

Runs = Mapping[str, Sequence[Run]]  # arm -> one run per round


@dataclass(frozen=True, slots=True)
class Identity:
    """Whether two arms gave the same tokens to the same prompts."""

    compared: int
    different: tuple[str, ...]  # request ids

    @property
    def identical(self) -> bool | None:
        """None when there was nothing to compare."""
        return not self.different if self.compared else None


def ttfts_s(run: Run, kind: str) -> list[float]:
    return [outcome.ttft_s for outcome in run.of_kind(kind)]


def per_round(runs: Sequence[Run], kind: str, quantile: str) -> list[float]:
    """One TTFT figure per round, for rounds that have requests of this kind."""
    samples = [ttfts_s(run, kind) for run in runs]
    return [getattr(summarise(sample), quantile) for sample in samples if sample]


def tpot_per_round(runs: Sequence[Run], kind: str) -> list[float]:
    """Median seconds per output token after the first, per round."""
    samples = [[o.tpot_s for o in run.of_kind(kind) if o.tpot_s is not None] for run in runs]
    return [percentile(sample, 50) for sample in samples if sample]


def e2e_per_round(runs: Sequence[Run], kind: str, q: float) -> list[float]:
    """A percentile of the time from arrival to the last token, per round."""
    samples = [[outcome.e2e_s for outcome in run.of_kind(kind)] for run in runs]
    return [percentile(sample, q) for sample in samples if sample]


def arm_figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything about one arm, JSON-ready: spreads over rounds, and the rounds themselves."""
    figures: dict[str, Any] = {}
    for kind in KINDS:
        values = {quantile: per_round(runs, kind, quantile) for quantile in QUANTILES}
        if values["p50"]:
            figures[f"{kind}_ttft_s"] = {name: as_json(spread(rounds)) for name, rounds in values.items()}
            figures[f"{kind}_ttft_s"]["p99_rounds"] = rounded(values["p99"])
            figures[f"{kind}_ttft_s"]["p90_rounds"] = rounded(values["p90"])
            figures[f"{kind}_e2e_s"] = {f"p{q}": as_json(spread(e2e_per_round(runs, kind, q))) for q in (50, 99)}
        tpot = tpot_per_round(runs, kind)
        if tpot:
            figures[f"{kind}_tpot_s"] = as_json(spread(tpot))
    throughput = [run.tokens_per_s for run in runs]
    figures["tokens_per_s"] = as_json(spread(throughput))
    figures["makespan_s"] = as_json(spread([run.makespan_s for run in runs]))
    figures["requests"] = sum(len(run.outcomes) for run in runs)
    figures["failed"] = sum(len(run.failed) for run in runs)
    figures["retractions"] = sum(outcome.retractions for run in runs for outcome in run.outcomes)
    figures["cached_tokens"] = sum(outcome.cached_tokens for run in runs for outcome in run.outcomes)
    figures["client_max_lag_s"] = round(max(run.max_lag_s for run in runs), 4)
    figures["client_cpu_share"] = round(max(run.client_cpu_share for run in runs), 3)
    return figures


def ratios(base: Sequence[Run], arm: Sequence[Run]) -> dict[str, Spread]:
    """The issue's figures of ``arm`` against ``base``, paired by round. A class that did not occur has no entry."""
    found: dict[str, Spread] = {}
    for name, kind, quantile, gain in (
        ("short_ttft_p99_gain", "short", "p99", True),
        ("short_ttft_p50_ratio", "short", "p50", False),
        ("long_ttft_p90_ratio", "long", "p90", False),
        ("long_ttft_p50_ratio", "long", "p50", False),
    ):
        of_base, of_arm = per_round(base, kind, quantile), per_round(arm, kind, quantile)
        if of_base and len(of_base) == len(of_arm):
            found[name] = paired_ratio(of_base, of_arm) if gain else paired_ratio(of_arm, of_base)
    speed_base, speed_arm = [run.tokens_per_s for run in base], [run.tokens_per_s for run in arm]
    if all(speed_base) and len(speed_base) == len(speed_arm):
        found["throughput_ratio"] = paired_ratio(speed_arm, speed_base)
    return found


def answers(runs: Sequence[Run]) -> dict[str, tuple[int, ...]]:
    return {o.request.rid: o.output_ids for run in runs for o in run.outcomes if o.ok}


def compare_outputs(base: Sequence[Run], arm: Sequence[Run]) -> Identity:
    """Token by token, over every request of every round that succeeded in both arms."""
    of_base, of_arm = answers(base), answers(arm)
    shared = [rid for rid in of_base if rid in of_arm]
    return Identity(len(shared), tuple(rid for rid in shared if of_base[rid] != of_arm[rid]))


def problems(runs: Runs) -> list[str]:
    """What makes the result invalid, in words: requests that failed or were lost."""
    return [
        f"{where}: {len(run.failed)} of {len(run.outcomes)} requests failed, first: {run.failed[0].error}"
        for where, run in _each(runs)
        if run.failed
    ]


def warnings(runs: Runs) -> list[str]:
    """What casts doubt on the figures: a client that was late or that took the machine from the server."""
    late = [f"{where}: the client sent up to {r.max_lag_s * 1e3:.0f} ms late" for where, r in _each(runs) if _late(r)]
    busy = [
        f"{where}: the client took {run.client_cpu_share:.0%} of a core"
        for where, run in _each(runs)
        if run.client_cpu_share > CPU_SHARE_LIMIT
    ]
    return late + busy


def _each(runs: Runs) -> list[tuple[str, Run]]:
    return [(f"{arm}, round {index + 1}", run) for arm, of_arm in runs.items() for index, run in enumerate(of_arm)]


def _late(run: Run) -> bool:
    return run.max_lag_s > LAG_LIMIT_S


def rounded(values: Sequence[float], digits: int = 4) -> list[float]:
    return [round(value, digits) for value in values]


def as_json(value: Spread) -> dict[str, float]:
    return {name: round(number, 4) for name, number in dataclasses.asdict(value).items() if name != "rounds"}
