"""The sentence that a reader looks for first: which policy keeps the target, up to which rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pla_sglang.sim.core.experiment import ExperimentResult
from pla_sglang.sim.metrics.goodput import LEAST_SPAN_S, Capacity, Slo
from pla_sglang.sim.report.columns import show_number


@dataclass(frozen=True, slots=True)
class Knee:
    """What a policy reaches: the highest rate that keeps the target (None: none does), and the highest that was run."""

    policy: str
    held_per_s: float | None
    highest_per_s: float

    @property
    def at_end(self) -> bool:
        """The target is kept at every rate up to the highest: the knee lies beyond it."""
        return self.held_per_s == self.highest_per_s


def group_by_policy(outcomes: Sequence[ExperimentResult]) -> dict[str, list[ExperimentResult]]:
    """Runs of each policy by rate, policies in the order in which they were run."""
    groups: dict[str, list[ExperimentResult]] = {}
    for run in outcomes:
        groups.setdefault(run.experiment.policy, []).append(run)
    return {policy: sorted(runs, key=lambda run: run.rate_per_s) for policy, runs in groups.items()}


def find_knees(outcomes: Sequence[ExperimentResult], target: float) -> list[Knee]:
    """A rate counts only if all rates below it that were run keep the target as well."""
    knees = []
    for policy, runs in group_by_policy(outcomes).items():
        held = None
        for run in runs:
            if run.figures.attainment < target:
                break
            held = run.rate_per_s
        knees.append(Knee(policy, held, runs[-1].rate_per_s))
    return knees


def find_best(outcomes: Sequence[ExperimentResult], target: float) -> str:
    """The policy that keeps the target up to the highest rate, then the one with most in target at its highest."""
    held = {knee.policy: knee.held_per_s or 0.0 for knee in find_knees(outcomes, target)}
    last = {policy: runs[-1].figures.attainment for policy, runs in group_by_policy(outcomes).items()}
    return max(last, key=lambda policy: (held[policy], last[policy]))


def describe_targets(slo: Slo, target: float) -> str:
    """``TTFT 3 s and TPOT 100 ms for 99 % of all requests``."""
    ttft = f"TTFT {show_number(slo.ttft_s)} s" if math.isfinite(slo.ttft_s) else "no TTFT target"
    tpot = f"TPOT {show_number(slo.tpot_s * 1e3)} ms" if math.isfinite(slo.tpot_s) else "no TPOT target"
    return f"{ttft} and {tpot} for {show_share(target)} of all requests"


def show_share(share: float) -> str:
    return f"{share * 100:.4g} %"


def describe_runs(outcomes: Sequence[ExperimentResult], target: float) -> list[str]:
    """The verdict on runs; the first sentence says it all."""
    if len({run.rate_per_s for run in outcomes}) > 1:
        return [describe_knees(find_knees(outcomes, target), target)]
    ranked = sorted(outcomes, key=lambda run: -run.figures.attainment)
    keep = [run.experiment.policy for run in ranked if run.figures.attainment >= target]
    shares = ", ".join(f"{run.experiment.policy} {show_share(run.figures.attainment)}" for run in ranked)
    where = f"At {show_number(ranked[0].rate_per_s)} requests/s"
    return [f"{where} {name_keepers(keep)} {show_share(target)} of requests in target: {shares}."]


def name_keepers(names: Sequence[str]) -> str:
    """``a and b keep``, ``a keeps`` or ``no policy keeps``."""
    if not names:
        return "no policy keeps"
    return f"{' and '.join(names)} keep{'s' if len(names) == 1 else ''}"


def describe_knees(knees: Sequence[Knee], target: float) -> str:
    """One sentence on all policies, the best ones first."""
    best = max((knee.held_per_s for knee in knees if knee.held_per_s is not None), default=None)
    wanted = f"{show_share(target)} of requests in target"
    if best is None:
        return f"No policy keeps {wanted}, not even at the lowest rate that was run."
    first = [knee for knee in knees if knee.held_per_s == best]
    beyond = ", the highest rate that was run" if any(knee.at_end for knee in first) else ""
    rest = "".join(f"; {_describe_knee(knee)}" for knee in knees if knee not in first)
    names = name_keepers([knee.policy for knee in first])
    return f"{names} {wanted} up to {_rate(best)} requests/s{beyond}{rest}."


def _describe_knee(knee: Knee) -> str:
    return f"{knee.policy} {'at no rate' if knee.held_per_s is None else f'up to {_rate(knee.held_per_s)}'}"


def describe_capacities(capacities: Mapping[str, Capacity], target: float) -> list[str]:
    """The verdict of a search for the highest rates."""
    held = {name: capacity.held_per_s for name, capacity in capacities.items() if capacity.held_per_s is not None}
    wanted = f"{show_share(target)} of requests in target"
    if not held:
        return [f"No policy keeps {wanted}, not even at the lowest rate."]
    ranked = sorted(held, key=lambda name: -held[name])
    first = ranked[0]
    failed_per_s = capacities[first].failed_per_s
    limit = "the highest rate of the search" if failed_per_s is None else f"fails at {_rate(failed_per_s)}"
    sentences = [f"{first} keeps {wanted} up to {_rate(held[first])} requests/s ({limit})."]
    if len(ranked) > 1:
        others = ", ".join(f"{name} {_rate(held[name])} ({held[name] / held[first]:.0%})" for name in ranked[1:])
        sentences.append(f"The others, and their share of that: {others}.")
    if none := [name for name in capacities if name not in held]:
        sentences.append(f"Not even at the lowest rate: {', '.join(none)}.")
    return sentences


def list_short_spans(capacities: Mapping[str, Capacity]) -> list[str]:
    """A sentence on the searches whose runs were bursts; none where all were long enough."""
    spans = {name: one.span_s for name, one in capacities.items() if one.span_s is not None}
    names = ", ".join(f"{name} {span_s:.0f} s" for name, span_s in spans.items() if span_s < LEAST_SPAN_S)
    if not names:
        return []
    least = f"{LEAST_SPAN_S:.0f} s for a steady load"
    return [f"Short span: {names} of arrivals at the rate held, of {least}; one burst more or less may change it."]


def _rate(rate_per_s: float) -> str:
    return f"{rate_per_s:.3g}"
