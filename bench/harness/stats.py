"""From runs to figures: per class and arm over rounds, ratios between arms, identity of outputs, validity."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.latency import Spread, paired_ratio, spread, summarise
from bench.harness.load_client import Run

KINDS = ("short", "long")
QUANTILES = ("p50", "p90", "p99", "mean", "max")
CPU_SHARE_LIMIT = 0.5  # of one core: above it the client itself may be what is measured
LAG_LIMIT_S = 0.1

# ratio -> class, quantile of its TTFT, whether it is a gain: base over arm, else arm over base
ROUND_RATIOS = {
    "short_ttft_p99_gain": ("short", "p99", True),
    "short_ttft_p50_ratio": ("short", "p50", False),
    "long_ttft_p90_ratio": ("long", "p90", False),
    "long_ttft_p50_ratio": ("long", "p50", False),
}

Runs = Mapping[str, Sequence[Run]]  # arm -> one run per round


@dataclass(frozen=True, slots=True)
class Identity:
    """Tells whether two arms gave the same tokens to the same prompts."""

    compared: int
    different: tuple[str, ...]  # request ids

    @property
    def identical(self) -> bool | None:
        """None when there was nothing to compare."""
        return not self.different if self.compared else None

    def as_json(self) -> dict[str, Any]:
        counts = {"identical": self.identical, "compared": self.compared, "different": len(self.different)}
        return counts | {"different_rids": list(self.different[:5])}


def ttfts_s(runs: Sequence[Run], kind: str) -> list[float]:
    return [outcome.ttft_s for run in runs for outcome in run.of_kind(kind)]


def per_round(runs: Sequence[Run], kind: str, quantile: str, figure: str = "ttft_s") -> list[float]:
    """A quantile of an outcome's figure per round, for rounds in which requests of this kind have it."""
    samples = [[getattr(outcome, figure) for outcome in run.of_kind(kind)] for run in runs]
    known = [[value for value in sample if value is not None] for sample in samples]
    return [getattr(summarise(sample), quantile) for sample in known if sample]


def arm_figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything about one arm, JSON-ready: spreads over rounds, and the rounds themselves."""
    figures: dict[str, Any] = {}
    for kind in KINDS:
        ttft_s = {quantile: per_round(runs, kind, quantile) for quantile in QUANTILES}
        if ttft_s["p50"]:
            figures[f"{kind}_ttft_s"] = {name: as_json(spread(rounds)) for name, rounds in ttft_s.items()}
            for name in ("p99", "p90"):
                figures[f"{kind}_ttft_s"][f"{name}_rounds"] = [round(value, 4) for value in ttft_s[name]]
            e2e_s = {name: per_round(runs, kind, name, "e2e_s") for name in ("p50", "p99")}
            figures[f"{kind}_e2e_s"] = {name: as_json(spread(rounds)) for name, rounds in e2e_s.items()}
        if tpot_s := per_round(runs, kind, "p50", "tpot_s"):
            figures[f"{kind}_tpot_s"] = as_json(spread(tpot_s))
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    return figures | {
        "tokens_per_s": as_json(spread([run.tokens_per_s for run in runs])),
        "makespan_s": as_json(spread([run.makespan_s for run in runs])),
        "requests": len(outcomes),
        "failed": sum(not outcome.ok for outcome in outcomes),
        "retractions": sum(outcome.retractions for outcome in outcomes),
        "cached_tokens": sum(outcome.cached_tokens for outcome in outcomes),
        "client_max_lag_s": round(max(run.max_lag_s for run in runs), 4),
        "client_cpu_share": round(max(run.client_cpu_share for run in runs), 3),
    }


def ratios(base: Sequence[Run], arm: Sequence[Run]) -> dict[str, Spread]:
    """``arm`` against ``base``, paired by round. A class that did not occur has no entry."""
    pairs = {
        name: tuple(per_round(runs, kind, part) for runs in ((arm, base) if is_gain else (base, arm)))
        for name, (kind, part, is_gain) in ROUND_RATIOS.items()
    }
    pairs["throughput_ratio"] = tuple([run.tokens_per_s for run in runs] for runs in (base, arm))
    return {
        name: paired_ratio(above, below)
        for name, (below, above) in pairs.items()
        if below and all(below) and len(below) == len(above)
    }


def last_token_ratio(base: Sequence[Run], arm: Sequence[Run], kind: str) -> float | None:
    """Median by round of the p50 of last tokens, ``arm`` over ``base``; None where a round has none."""
    below, above = (per_round(runs, kind, "p50", "e2e_s") for runs in (base, arm))
    if not below or not all(below) or len(below) != len(above):
        return None
    return round(paired_ratio(above, below).median, 4)


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
    texts = []
    for where, run in _each(runs):
        if run.max_lag_s > LAG_LIMIT_S:
            texts.append(f"{where}: the client sent up to {run.max_lag_s * 1e3:.0f} ms late")
        if run.client_cpu_share > CPU_SHARE_LIMIT:
            texts.append(f"{where}: the client took {run.client_cpu_share:.0%} of a core")
    return texts


def _each(runs: Runs) -> list[tuple[str, Run]]:
    return [(f"{arm}, round {index + 1}", run) for arm, of_arm in runs.items() for index, run in enumerate(of_arm)]


def as_json(value: Spread) -> dict[str, float]:
    return {name: round(number, 4) for name, number in dataclasses.asdict(value).items() if name != "rounds"}
