"""The JSON object of a comparison."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from bench.lib import report
from bench.lib.arms import OUR_PRESETS, OURS, STOCK
from bench.lib.client import Run
from bench.lib.compare import Solo
from bench.lib.stats import Identity, Runs, arm_figures, as_json, compare_outputs, problems, ratios, warnings
from pla_sglang.metrics.latency import Spread

HEADLINE = ("short_ttft_p99_gain", "short_ttft_p50_ratio", "long_ttft_p90_ratio", "throughput_ratio")


def ratios_to_stock(runs: Runs) -> dict[str, dict[str, Spread]]:
    """Of every other arm, paired by round. Empty without a stock arm."""
    if STOCK not in runs:
        return {}
    return {arm: ratios(runs[STOCK], of_arm) for arm, of_arm in runs.items() if arm != STOCK}


def headline_arm(arms: Iterable[str]) -> str | None:
    """The arm that the top-level figures are about: ours, else the first that is not stock, else None."""
    names = list(arms)
    if OURS in names:
        return OURS
    mine = [arm for arm in names if arm in OUR_PRESETS]
    others = [arm for arm in names if arm != STOCK]
    return next(iter(mine or others), None)


def identity_of(runs: Runs, solo: Mapping[str, Solo] | None) -> Identity:
    """Solo answers count too: they differ from the others by running in no batch with anybody."""
    if solo is None:
        return compare_outputs(runs)
    everything: dict[str, list[Run]] = {arm: [*of_arm, solo[arm].as_run()] for arm, of_arm in runs.items()}
    return compare_outputs(everything)


def comparison_result(
    bench: str,
    args: argparse.Namespace,
    workload: Mapping[str, Any],
    runs: Runs,
    state: Mapping[str, Any],
    *,
    solo: Mapping[str, Solo] | None = None,
) -> dict[str, Any]:
    """Top level: the figures of ``headline_arm`` as medians of paired ratios. Below: everything, per arm."""
    against = ratios_to_stock(runs)
    arm = headline_arm(runs)
    chosen = against.get(arm, {}) if arm is not None else {}
    identity = identity_of(runs, solo)
    found = problems(runs)
    figures = {arm: arm_figures(of_arm) for arm, of_arm in runs.items()}
    return {
        "bench": bench,
        **{key: round(chosen[key].median, 4) if key in chosen else None for key in HEADLINE},
        "outputs_identical": identity.identical,
        "rounds": args.rounds,
        "seed": args.seed,
        "workload": dict(workload),
        "valid": not found,
        "problems": found,
        "warnings": warnings(runs),
        "figures_of": arm,
        "outputs_compared": identity.compared,
        "outputs_different": identity.different_count,
        "outputs_distinct": identity.distinct,
        "outputs_different_rids": list(identity.different),
        "ratios": {arm: {key: as_json(value) for key, value in of.items()} for arm, of in against.items()},
        "figures": figures,
        **state,
        "device": args.device,
        "model": args.model_path.name,
        "server_flags": args.server_flags,
        "idle_arms": "frozen (SIGSTOP) while another arm is measured",
        **report.environment(),
    }


def headline(result: Mapping[str, Any], runs: Runs) -> None:
    """Identity and validity, in words, under the tables."""
    report.print_identity(
        Identity(
            compared=result["outputs_compared"],
            different=tuple(result["outputs_different_rids"]),
            different_count=result["outputs_different"],
            distinct=result["outputs_distinct"],
        )
    )
    report.print_problems(result["problems"], result["warnings"])
    cached = {arm: figures["cached_tokens"] for arm, figures in result["figures"].items()}
    if len(set(cached.values())) > 1:
        report.stdout.print(f"note: the arms took different numbers of tokens from their prefix caches: {cached}")
