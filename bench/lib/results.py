"""The JSON object of a comparison."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.lib import report
from bench.lib.arms import OUR_PRESETS, OURS, STOCK
from bench.lib.compare import Solo
from bench.lib.plot import plot_comparison
from bench.lib.stats import Identity, Runs, answers, arm_figures, as_json, compare_outputs, problems, ratios, warnings
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


def identity_to_first(runs: Runs, solo: Mapping[str, Solo] | None) -> dict[str, Identity]:
    """Every arm against the first one. Solo answers count too: they ran in no batch with anybody."""
    whole = {arm: [*of_arm, solo[arm].as_run()] if solo else list(of_arm) for arm, of_arm in runs.items()}
    first, *others = whole
    return {arm: compare_outputs(whole[first], whole[arm]) for arm in others}


def all_identical(identities: Mapping[str, Identity]) -> bool | None:
    """Over our arms. A peer with another torch may round another way; it counts only where there is no arm of ours."""
    mine = [found for arm, found in identities.items() if arm in OUR_PRESETS] or list(identities.values())
    known = [found.identical for found in mine if found.identical is not None]
    return all(known) if known else None


def identity_json(identities: Mapping[str, Identity]) -> dict[str, Any]:
    return {
        arm: {
            "identical": found.identical,
            "compared": found.compared,
            "different": len(found.different),
            "different_rids": list(found.different[:5]),
        }
        for arm, found in identities.items()
    }


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
    identities = identity_to_first(runs, solo)
    found = problems(runs)
    figures = {arm: arm_figures(of_arm) for arm, of_arm in runs.items()}
    return {
        "bench": bench,
        **{key: round(chosen[key].median, 4) if key in chosen else None for key in HEADLINE},
        "outputs_identical": all_identical(identities),
        "rounds": args.rounds,
        "seed": args.seed,
        "workload": dict(workload),
        "valid": not found,
        "problems": found,
        "warnings": warnings(runs),
        "figures_of": arm,
        "outputs_by_arm": identity_json(identities),
        "outputs_distinct": len({answer for of_arm in runs.values() for answer in answers(of_arm).values()}),
        "ratios": {arm: {key: as_json(value) for key, value in of.items()} for arm, of in against.items()},
        "figures": figures,
        **state,
        "device": args.device,
        "model": args.model_name,
        "server_flags": args.server_flags,
        "idle_arms": "frozen (SIGSTOP) while another arm is measured",
        **report.environment(),
    }


def headline(result: Mapping[str, Any], runs: Runs) -> None:
    """Identity and validity, in words, under the tables."""
    report.print_identity(result["outputs_by_arm"], next(iter(runs)), result["outputs_distinct"])
    report.print_problems(result["problems"], result["warnings"])
    cached = {arm: figures["cached_tokens"] for arm, figures in result["figures"].items()}
    if len(set(cached.values())) > 1:
        report.stdout.print(f"note: the arms took different numbers of tokens from their prefix caches: {cached}")


def keep(
    name: str, result: dict[str, Any], runs: Runs, out: Path, *, title: str, solo_s: dict[str, float] | None = None
) -> int:
    """Writes picture, requests and result of bench ``name`` to ``out``. Returns its exit status."""
    plot_comparison(runs, out / f"{name}.png", title=title, solo_s=solo_s)
    report.say(f"picture: {out / f'{name}.png'}")
    report.write_requests(runs, out / f"{name}.requests.jsonl")
    report.emit(result, out, name)
    return 0 if result["valid"] else 1
