"""Tables of the benches of the router, made from their JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.lib.tables import markdown

Result = Mapping[str, Any]
CHAOS_ROWS = {
    "requests": "requests",
    "completed": "completed, every token right",
    "disconnected": "whose client went away on purpose",
    "aborted": "aborted on purpose at their prefill instance",
    "failed_in_flight_at_kill": "failed, in flight at an instance when that was killed",
    "failed_not_in_flight_at_kill": "failed otherwise",
    "tokens_wrong": "wrong tokens",
    "retried_after_transfer": "attempts whose KV transfer failed, and that were followed by another",
    "retried_unsent": "dispatches again because an instance could not be reached",
}


def chaos(result: Result) -> str:
    rows = [[text, f"{result[name]:,.0f}"] for name, text in CHAOS_ROWS.items()]
    rows.append(["share of dispatches whose KV transfer failed", f"{result['transfer_failure_share']:.1%}"])
    for name, text in (("ledger_balanced", "ledger balances"), ("gauges_zero", "gauges at 0")):
        rows.append([text, _yes(result[name])])
    rows.append(["queues and KV of every instance back at their start", _yes(result["kv_free"])])
    for name, text in (("abort", "the prefill's abort"), ("order", "the order to abort")):
        p50, p99 = (result[f"decode_free_after_{name}_{share}_s"] for share in ("p50", "p99"))
        rows.append([f"decode free after {text}, p50 / p99 of {result['abort_probes']}", f"{p50:.2f} / {p99:.2f} s"])
    killed = " and ".join(f"`{name}`" for name in result["killed"])
    work = f"{result['rate']:g} requests/s, policy `{result['policy']}`, SIGKILL of {killed}"
    return f"{markdown(['what', 'count'], rows)}\n\n{work} · {_conditions(result)}"


def parity(result: Result) -> str:
    rows = []
    for policy, one in result["by_policy"].items():
        share = f"{one['identical_share']:.2%}"
        cells = [f"{one['decisions']:,}", share, f"{one['failed']:,}", f"{one['tokens_wrong']:,}"]
        rows.append([f"`{policy}`", *cells])
    header = ["policy", "decisions", "identical", "failed requests", "wrong tokens"]
    work = f"{result['requests']:,} requests a policy at {result['rate_rps']:g}/s, {result['instances']} instances"
    total = f"All: {result['decisions']:,} decisions, {result['identical_share']:.2%} identical."
    return f"{markdown(header, rows)}\n\n{total}\n\n{work} · {_conditions(result)}"


def router_clients(result: Result) -> str:
    rows = []
    for name, one in result["clients"].items():
        figures = ["-" if one.get(key) is None else f"{one[key]:,.0f}" for key in CLIENT_FIGURES]
        rows.append([f"`{name}`", f"{one['completed']:,} of {one['requests']:,}", *figures])
    header = ["client", "completed", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "tokens/s"]
    commands = "\n".join(f"- `{one['command']}`" for one in result["clients"].values())
    return f"{markdown(header, rows)}\n\n{commands}\n\n{_conditions(result)}"


CLIENT_FIGURES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "total_throughput")


def _conditions(result: Result) -> str:
    commits = ", ".join(result.get("commits", ())) or result["environment"]["plugin_commit"]
    device = f"{result['profile']}, time scale {result['time_scale']:g}"
    return f"{device} · {result['environment']['hardware']} · commit {commits} · seed {result['seed']}"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


PAGES: dict[str, Callable[[Result], str]] = {
    "chaos": chaos,
    "parity": parity,
    "router_clients": router_clients,
}
