"""Tables of the benches on emulated engines, made from their JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.lib import router_pages
from bench.lib.tables import markdown

Result = Mapping[str, Any]
RANKS = "dp"  # layout of bench.spatial: the ranks of one server


def _conditions(result: Result, *further: str) -> str:
    where, commits = result["environment"], ", ".join(_commits(result))
    return " · ".join([*further, where["hardware"], f"commit {commits}", f"first seed {result.get('seed', 1)}"])


def _commits(result: Result) -> list[str]:
    """Those that measured, which a result made of several runs names by arm or by row."""
    by_arm = {commit for own in result.get("arms", {}).values() for commit in own["commits"]}
    by_row = {row["plugin_commit"] for row in result.get("rows", ()) if "plugin_commit" in row}
    return sorted(by_arm | by_row | set(result.get("commits", ()))) or [result["environment"]["plugin_commit"]]


def _scale(result: Result) -> str:
    return f"time scale {result['time_scale']:g}"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def verified(result: Result) -> str:
    rows = [
        [group["layout"], group["workload"], *(f"{group[name]:,}" for name in COUNTS)] for group in result["groups"]
    ]
    rows.append(["all", "", *(f"{result[name]:,}" for name in COUNTS)])
    header = ["layout", "workload", "requests", "completed", "prompt tokens", "tokens checked", "wrong"]
    router = f"router {result['policy']}"
    return f"{markdown(header, rows)}\n\n{_conditions(result, result['profile'], router)}"


COUNTS = ("requests", "completed", "input_tokens", "tokens_verified", "tokens_wrong")


def baselines(result: Result) -> str:
    rows = []
    for row in result["rows"]:
        shown = [row["slo_attainment"], row["goodput_rps"], row["ttft_p50_s"], row["ttft_p99_s"]]
        times = [f"{row[name] * 1e3:.1f}" for name in ("tpot_p50_s", "tpot_p99_s")]
        rows.append(
            [row["layout"], row["policy"], row["workload"], f"{row['rate_rps']:g}", str(row["requests"])]
            + [f"{value:.3g}" for value in shown]
            + [*times, f"{row['host_overhead_share']:.1%}", _yes(row["valid"])]
        )
    header = ["layout", "router", "workload", "per s", "requests", "met both targets", "goodput per s"]
    header += ["TTFT p50, s", "p99", "TPOT p50, ms", "p99", "host in the way", "valid"]
    totals = f"{result['tokens_verified']:,} tokens checked, {result['tokens_wrong']} wrong"
    return f"{markdown(header, rows)}\n\n{totals} · {_conditions(result, result['profile'], _scale(result))}"


def frontier(result: Result) -> str:
    rows = []
    for arm, own in result["arms"].items():
        against = own.get("long_max_vs_fcfs")
        ratio = "-" if against is None else f"{against:.2f}x"
        times = [f"{own[name]:.2f}" for name in ("short_mean_s", "short_p99_s", "long_mean_s")]
        times += [f"{own['long_max_s']:.1f}", ratio]
        rows.append([f"`{arm}`", own["sglang"], *times, f"{own['host_overhead_share']:.1%}", _yes(own["valid"])])
    for name, own in result.get("bounds", {}).items():
        times = [f"{own[key]:.2f}" for key in ("short_mean_s", "short_p99_s", "long_mean_s")]
        rows.append([f"`{name}`", "bound", *times, f"{own['long_max_s']:.1f}", "-", "-", "-"])
    header = ["arm", "SGLang", "short mean, s", "short p99", "long mean", "long max", "against FCFS"]
    header += ["host in the way", "valid"]
    misses = "; ".join(result["targets_missed"])
    verdict = f"Targets missed: {misses}." if misses else "All targets are met."
    seeds = min(own["seeds"] for own in result["arms"].values())
    work = f"load {result['load']:.0%}, seeds measured: {seeds}"
    return f"{markdown(header, rows)}\n\n{verdict}\n\n{_conditions(result, work, _scale(result))}"


def _spread(value: Mapping[str, float], unit: str = "") -> str:
    return f"{value['median']:.3g}{unit} ({value['low']:.3g} .. {value['high']:.3g})"


def hol_emulated(result: Result) -> str:
    rows = []
    for arm, own in result["arms"].items():
        ratios = result["ratios"].get(arm, {})
        cells = [_spread(own[name], " s") for name in ("short_ttft_p50_s", "short_ttft_p99_s", "long_ttft_p90_s")]
        keys = ("short_ttft_p99_gain", "long_ttft_p90_ratio", "throughput_ratio")
        cells += [_spread(ratios[key], "x") if key in ratios else "-" for key in keys]
        rows.append([f"`{arm}`", own["sglang"], *cells, f"{own['host_overhead_share']:.1%}", _yes(own["valid"])])
    header = ["arm", "SGLang", "short TTFT p50", "short TTFT p99", "long TTFT p90", "short p99 gain"]
    header += ["long p90 ratio", "throughput", "host in the way", "valid"]
    work = f"{result['rounds']} rounds, median (lowest .. highest)"
    return f"{markdown(header, rows)}\n\n{_conditions(result, work, result['profile'], _scale(result))}"


def emulation_check(result: Result) -> str:
    table = result["dopd_table"]
    rows = []
    for phase in ("prefill", "decode"):
        own = [row for row in table if row["phase"] == phase]
        worst = max(own, key=lambda row: abs(row["error"]))
        shape = f"{worst['batch']} x {worst['context']:,} tokens"
        rows.append([f"DOPD Table I, {phase}: largest error of {len(own)} entries", f"{worst['error']:+.2%} ({shape})"])
    work = f"mixed load, time scale {result['time_scale']:g}, {result['steps']:,} passes"
    rows = [
        [f"error of a step's time, {work}: median", f"{result['step_error_p50']:.2%}"],
        ["the same, p99", f"{result['step_error_p99']:.2%}"],
        ["share of the time with work in which the device waited for its host", f"{result['host_overhead_share']:.1%}"],
        *rows,
        ["tokens checked, wrong", f"{result['tokens_verified']:,}, {result['tokens_wrong']}"],
    ]
    conditions = _conditions(result, f"DOPD's table at time scale {result['dopd_time_scale']:g}")
    return f"{markdown(['what', 'result'], rows)}\n\n{conditions}"


def cluster_start(result: Result) -> str:
    rows = []
    for row in result["rows"]:
        sizes = [f"{row[name]:.2f} GiB" for name in ("pss_gib", "pss_after_requests_gib")]
        parts = ", ".join(f"{part} {size:.2f}" for part, size in row["pss_by_part_gib"].items())
        rows.append([row["layout"], str(row["engines"]), f"{row['ready_s']:.1f} s", *sizes, parts])
    header = ["prefill + decode", "engines", "ready after", "memory (PSS)", "after 24 requests", "of it, in GiB"]
    return f"{markdown(header, rows)}\n\n{_conditions(result, result['profile'])}"


def client_load(result: Result) -> str:
    names = {
        "peak_streams": "{:,}",
        "seconds_with_300_streams": "{:,} s",
        "events_per_s": "{:,.0f}",
        "peak_events_per_s": "{:,}",
        "client_cpu_share": "{:.0%}",
        "source_cpu_share": "{:.0%}",
        "client_lag_p99_ms": "{:.1f} ms",
        "client_loop_late_p99_ms": "{:.1f} ms",
        "tokens_verified": "{:,}",
        "tokens_wrong": "{:,}",
    }
    header = [
        "most streams at once",
        "with 300 or more",
        "token events per s then",
        "most in a second",
        "client's CPU, of a core",
        "source's",
    ]
    header += ["lag at sending, p99", "late wake-ups, p99", "tokens checked", "wrong"]
    cells = [form.format(result[name]) for name, form in names.items()]
    return f"{markdown(header, [cells])}\n\n{_conditions(result)}"


def spatial(result: Result) -> str:
    rows = []
    for arm, own in result["arms"].items():
        shares = [own["violation_rate"], own["short"]["violation_rate"], own["long"]["violation_rate"]]
        by_seed = ", ".join(f"{value:.1%}" for value in own["violation_rate_by_seed"])
        times = [f"{own[name][f'ttft_{at}_s']:.3f}" for name in ("short", "long") for at in ("p50", "p99")]
        moves = str(own["flips"] + own["flips_while_settling"]) if "moves" in own else "-"
        hosts = [own["host_overhead_share"], own["host_overhead_share_decode"]]
        cells = [*(f"{share:.1%}" for share in shares), by_seed, *times, moves]
        cells.append(", ".join(f"{share:.1%}" for share in hosts if share is not None))
        rows.append([f"`{arm}`", *cells, _yes(own["valid"])])
    header = ["arm", "late", "of shorts", "of longs", "late by seed", "short TTFT p50, s", "p99", "long p50", "p99"]
    host = "host in the way" if result["layout"] == RANKS else "host in the way: prefill, decode"
    header += ["moves", host, "valid"]
    savings = [f"{_SAVINGS[key]} {result[key]:.0%}" for key in _SAVINGS if result.get(key) is not None]
    lines = [markdown(header, rows), "", f"Fewer late requests with pools than with {', '.join(savings)}."]
    if "flips_constant_load" in result:
        settling, after = result["flips_constant_load_while_settling"], result["flips_constant_load"]
        lines[-1] += f" At constant load {settling} moves while the pools settle, {after} after."
    lines[-1] += _spatial_verdict(result)
    rates = " then ".join(f"{rate:g}" for rate in result["long_rps"])
    work = f"{result['short_rps']:g} shorts and {rates} longs per s for {result['duration_s']:g} s"
    checked = f"{result['tokens_verified']:,} tokens checked, {result['tokens_wrong']} wrong"
    return "\n".join([*lines, "", _conditions(result, work, checked, result["profile"], _scale(result))])


def _spatial_verdict(result: Result) -> str:
    wanted = ["fewer_than_dp", "fewer_than_router", "flips_constant_load"]
    if result["layout"] != RANKS:  # SGLang's ``bucket`` is for prefill instances
        wanted.append("fewer_than_bucket")
    absent = ", ".join(f"`{key}`" for key in wanted if result.get(key) is None)
    misses = "; ".join(result["targets_missed"])
    found = f" Targets missed: {misses}." if misses else f" All {'measured ' if absent else ''}targets are met."
    return found + (f" Not measured: {absent}." if absent else "")


_SAVINGS = {
    "fewer_than_dp": "plain round robin:",
    "fewer_than_router": "SGLang's best load balancing:",
    "fewer_than_bucket": "`bucket`:",
    "fewer_than_temporal": "`temporal`:",
}


PAGES: dict[str, Callable[[Result], str]] = {
    "verified": verified,
    "baselines": baselines,
    "frontier": frontier,
    "hol_emulated": hol_emulated,
    "emulation_check": emulation_check,
    "cluster_start": cluster_start,
    "client_load": client_load,
    **router_pages.PAGES,
    "spatial-pd": spatial,
    "spatial-dp": spatial,
}
