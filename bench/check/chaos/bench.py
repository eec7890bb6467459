"""Clients that go away, aborts, failed KV transfers, and instances that are killed.

A cluster on an emulated device behind our router gets Poisson arrivals. Some clients disconnect at a random time, some
requests are aborted at their prefill instance, KV transfers fail at random, and instances are killed by SIGKILL and
started again, in turns prefill and decode ones. Afterwards every token of what completed is checked, and nothing may be
left: ledger, gauges, KV. With ``--stateless N`` all instances serve either phase: aborts go to all of them, they are
killed in turns, and it is measured how soon one that comes back is paired with the others; a run in which that takes
longer than ``PAIRED_S`` has failed. With ``--moves`` the router has ``--migration on``: then a kill is no reason to
fail either, but only that no instance is left. Half of the kills are then other losses: a scheduler that raises, frozen
processes, a proxy that lets nothing through; no stream may stand still for as long. With ``--routers`` and
``--restarts`` several routers stand before one fleet and are ended themselves; each has to move requests after each
restart. Prefix caches of stateless instances are compared with the oracle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import math
import os
import random
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.check.chaos.caches import CacheAudit, audit_caches
from bench.check.chaos.probes import Freed, measure_decode_free
from bench.check.faults.client import GONE, Stream, find_silences, longest_pass_s, make_streams
from bench.check.faults.fleet import BLACKHOLE, CRASH, FREEZE, FREEZE_ALL, KILL, STILL_S, Fleet
from bench.check.faults.proxy import running_behind_proxies, running_proxies
from bench.check.faults.routers import Routers, plan_restarts
from bench.check.faults.table import Due, choose_kills, describe_silence, judge, send_and_inject
from bench.check.leftovers import ClusterLeftovers, sum_series, wait_until_at_rest
from bench.check.parity import workload
from bench.harness.bench import Result, is_complete, measuring
from bench.harness.cli import add_emulated_device, add_output, add_quick, emulation_flags
from bench.harness.figures import panels
from bench.harness.latency import percentile
from bench.harness.replay import print_figures
from bench.harness.report import device_conditions, emit, environment, markdown, progress_bar, say, yes_no
from bench.harness.servers import Router, running_cluster
from pla_sglang.common.errors import ConfigError
from pla_sglang.testing.server import fetch

PAIRED_S = 15.0  # within which one that is started again has the others, and they it
TIMEOUT_S = 300.0  # for one request
KILL_SPAN = 0.9  # of the run: the last one that is killed is back before the run ends
TRANSFER_SWITCH = "SGLANG_TEST_DISAGG_FAILURE_PROB"  # of SGLang: each poll of a transfer fails so often


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=12.0, help="requests/s")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument(
        "--stateless", type=int, default=0, help="instances of either phase; 0: prefill and decode ones"
    )
    parser.add_argument("--moves", action="store_true", help="stateless instances, whose requests go on elsewhere")
    parser.add_argument("--routers", type=int, default=1, help="before the same instances; needs --moves")
    parser.add_argument(
        "--restarts", type=int, default=0, help="SIGKILL of control processes and routers in turns; needs --moves"
    )
    parser.add_argument("--policy", default="minimal-load")
    parser.add_argument("--kills", type=int, default=2, help="of instances, evenly over the run")
    add_emulated_device(parser, time_scale=4.0)
    parser.add_argument("--disconnect-share", type=float, default=0.1)
    parser.add_argument("--abort-share", type=float, default=0.03)
    parser.add_argument("--transfer-failures", type=float, default=0.05, help="share of KV transfers that fail")
    parser.add_argument("--poll-failures", type=float, default=0.0, help="share of polls that fail (SGLang's switch)")
    parser.add_argument("--abort-probes", type=int, default=20, help="lone requests whose prefill is aborted")
    parser.add_argument("--router-args", default="", help="further arguments of the router, quoted as one")
    add_output(parser)
    add_quick(parser)


def router_flags(options: argparse.Namespace) -> str:
    # The judge asks about each request that fails.
    moves = "--migration on " if options.moves else ""
    # So that each router moves requests, and has a control process that can be ended alone.
    late = "--relay-workers 1 --place-decode prefilled " if has_own_routers(options) else ""
    return f"--explain-requests {2 * options.requests} {moves}{late}{options.router_args}"


def has_own_routers(options: argparse.Namespace) -> bool:
    """Tells whether the routers are the bench's, to be ended by it, and not the cluster's one."""
    return bool(options.routers > 1 or options.restarts)


def cluster_arguments(options: argparse.Namespace) -> list[str]:
    pairs = ("--prefill", str(options.prefill), "--decode", str(options.decode))
    one = ("--router", "pla", "--policy", options.policy, f"--router-args={router_flags(options)}")
    return [
        *(("--stateless", str(options.stateless)) if options.stateless else pairs),
        *(("--router", "none") if options.moves else one),  # then the bench's, which knows proxies
        *emulation_flags(options.profile, options.time_scale),
        *("--pla-emulate-kv-failures", str(options.transfer_failures), "--incremental-streaming-output"),
    ]


def plan_kills(options: argparse.Namespace, end_s: float) -> list[tuple[str, float]]:
    """Who is killed, and when: all instances in turns, prefill and decode ones one after the other."""
    if options.stateless:
        names = [f"stateless-{place}" for place in range(options.stateless)]
    else:
        places = range(min(options.prefill, options.decode))
        names = [f"{kind}-{place}" for place in places for kind in ("prefill", "decode")]
    step_s = KILL_SPAN * end_s / (options.kills + 1)
    return [(name, step_s * number) for number, name in zip(range(1, options.kills + 1), itertools.cycle(names))]


def plan_faults(streams: Sequence[Stream], routers: int, options: argparse.Namespace) -> list[Due]:
    """Of a run that begins at 0."""
    rng, end_s = random.Random(options.seed), streams[-1].due_s
    leaving = {
        stream.rid: Due("leave", stream.rid, stream.due_s + rng.uniform(0.01, 4.0))
        for stream in streams
        if rng.random() < options.disconnect_share
    }
    others = [stream for stream in streams if stream.rid not in leaving]
    aborted = rng.sample(others, int(options.abort_share * len(streams)))
    restarts = enumerate(plan_restarts(options.restarts, routers), 1)
    restart_s = KILL_SPAN * end_s / (options.restarts + 1)
    kinds = choose_kills(options.kills, options.seed) if options.moves else [KILL] * options.kills
    return [
        *leaving.values(),
        *(Due("abort", stream.rid, stream.due_s + rng.uniform(0.02, 1.0)) for stream in aborted),
        *(Due(fault, name, at_s) for fault, (name, at_s) in zip(kinds, plan_kills(options, end_s), strict=True)),
        *(Due(what, str(router), number * restart_s) for number, (what, router) in restarts),
    ]


async def storm(fleet: Fleet, plan: Sequence[Due]) -> None:
    with measuring(), progress_bar("chaos", len(fleet.streams)) as advance:
        await send_and_inject(fleet, plan, timeout_s=TIMEOUT_S, on_done=advance)


def result_of(
    verdict: Mapping[str, Any], rest: ClusterLeftovers, retries: dict[str, float], freed: list[Freed], requests: int
) -> dict[str, Any]:
    failed_transfers = retries["retried_after_transfer"] + verdict["failed_by_transfer"]
    return {
        "requests": requests,
        **verdict,
        "failed_not_in_flight_at_kill": verdict["failed_by_transfer"] + verdict["failed_unexplained"],
        **retries,
        "transfer_failure_share": failed_transfers / max(1.0, retries["dispatches"]),
        **{name: getattr(rest, name) for name in CHAOS_CHECKS},
        "leftovers": rest.details,
        **decode_free_s("abort", [probe.after_abort_s for probe in freed]),
        **decode_free_s("order", [probe.after_order_s for probe in freed]),
        "abort_probes": len(freed),
    }


def decode_free_s(after: str, values_s: list[float]) -> dict[str, float | None]:
    return {f"decode_free_after_{after}_p{q}_s": percentile(values_s, q) if values_s else None for q in (50, 99)}


def read_retry_counts(url: str) -> dict[str, float]:
    """Dispatches and retries by reason, off the router's metrics."""
    metrics, retries = fetch(f"{url}/metrics"), "pla_router_retries_total"
    return {
        "dispatches": sum_series(metrics, "pla_router_dispatches_total"),
        "retried_after_transfer": sum_series(metrics, retries, 'reason="transfer_failed"'),
        "retried_unsent": sum_series(metrics, retries, 'reason="not_sent"'),
        "hops": sum_series(metrics, "pla_router_migrations_total"),
    }


def name_of(options: argparse.Namespace) -> str:
    """Of the result."""
    if has_own_routers(options):
        return "chaos_routers"
    return "chaos_moves" if options.moves else "chaos_stateless" if options.stateless else "chaos"


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError, ServerError.

    Exit status 1: a request had no right to fail, something is left, or an instance was late to be paired.
    """
    if options.moves and options.stateless < 2:
        raise ConfigError(f"--moves --stateless {options.stateless}: allowed are 2 stateless instances and more")
    if options.routers < 1 or options.restarts < 0 or (has_own_routers(options) and not options.moves):
        text = f"--routers {options.routers} --restarts {options.restarts}"
        raise ConfigError(f"{text}: allowed are 1 router and more, 0 restarts and more; others than these with --moves")
    if options.kills < 0:
        raise ConfigError(f"--kills {options.kills}: allowed are 0 and more")
    if options.quick:
        options.requests, options.abort_probes = 120, 3
    os.environ[TRANSFER_SWITCH] = str(options.poll_failures)
    with (
        running_cluster(cluster_arguments(options), options.out, "chaos") as described,
        before_instances(options, described) as routers,
    ):
        found = look_into(described, options, routers)
    result = found.result()
    print_figures(result, f"chaos, {len(found.streams)} requests, policy {options.policy}")
    name = name_of(options)
    plot(found, options.out / f"{name}.png")
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    lost, paired_s = found.list_lost(), found.fleet.paired_s
    about = {"bench": "chaos", **settings, "killed": [name for fault, name in lost if fault == KILL], "lost": lost}
    about |= {"paired_s": paired_s}
    emit({**about, **result, "environment": environment()}, name, options.out)
    late = late_to_pair([name for _, name in lost], paired_s) if options.stateless else []
    for instance in late:
        say(f"failed: {instance} was not paired within {PAIRED_S:g} s of its start, or of the end of its standstill")
    idle = 0 in result.get("moves_after_restart", [])
    if idle:
        say("failed: a router moved nothing after a restart")
    unseen = found.caches is not None and not found.caches.cache_entries
    if unseen:
        say("failed: no prefix cache had anything to compare with the oracle")
    still = options.moves and result["longest_silence_s"] >= STILL_S
    if still:
        say(f"failed: a stream stood still: {result['longest_silence']}")
    wrong = result["tokens_wrong"] or result["bytes_wrong"] or result.get("cache_entries_wrong") or found.rest.details
    return 0 if not (result["failed_wrongly"] or wrong or unseen or late or idle or still) else 1


@contextlib.contextmanager
def before_instances(options: argparse.Namespace, described: dict[str, Any]) -> Iterator[Routers | None]:
    """Where requests move: a proxy before each instance, and a router before the proxies, which ``described`` names
    from then on. None but where routers are to be ended; the first is known as that of the cluster. Raises
    ServerError."""
    if not options.moves:
        yield None
        return
    router = Router("pla", options.policy, tuple(shlex.split(router_flags(options))))
    if not has_own_routers(options):
        with running_behind_proxies(router, described, options.out, "chaos") as behind:
            described |= behind
            yield None
        return
    with running_proxies(described, options.out) as proxied:
        described |= proxied
        with Routers(router, described, options.out, options.routers) as routers:
            described["url"] = routers.urls[0]
            yield routers


@dataclasses.dataclass(frozen=True)
class Found:
    """What became of everything. ``caches``: of stateless instances; others keep no answers, or serve none alone."""

    fleet: Fleet
    streams: list[Stream]  # that have ended
    verdict: Mapping[str, Any]
    caches: CacheAudit | None
    rest: ClusterLeftovers
    retries: dict[str, float]
    freed: list[Freed]
    pass_s: float  # the longest of the device, of real time
    silence: str  # the longest

    def list_lost(self) -> list[tuple[str, str]]:
        """By which fault which instance was lost, in the order of the times."""
        fleet = self.fleet
        kills = [(kill.at_s, CRASH if kill.crashed else KILL, kill.name) for kill in fleet.kills]
        stills = [(still.at_s, still.fault, still.name) for still in fleet.standstills]
        return [(fault, name) for _, fault, name in sorted([*kills, *stills])]

    def result(self) -> dict[str, Any]:
        made = result_of(self.verdict, self.rest, self.retries, self.freed, len(self.streams))
        faults = Counter(fault for fault, _ in self.list_lost())
        made |= {"crashes": faults[CRASH], "freezes": faults[FREEZE] + faults[FREEZE_ALL]}
        made |= {"blackholes": faults[BLACKHOLE], **find_silences(self.streams, self.pass_s)}
        made["longest_silence"] = self.silence
        if self.caches is not None:
            made |= dataclasses.asdict(self.caches)
        if (routers := self.fleet.routers) is not None:
            made["pulls"] = routers.moves
            made["restarted"] = [f"{one.what} {one.router}" for one in routers.restarts]
            made["moves_after_restart"] = [one.moves for one in routers.restarts]
        return made


def look_into(described: dict[str, Any], options: argparse.Namespace, routers: Routers | None) -> Found:
    """The storm, and what it has left."""
    planned = make_streams(workload(options.requests, options.rate, options.seed), "chaos")
    state = options.out / "chaos.state.json"
    fleet = Fleet(described, state, streams=planned, routers=routers, moves=options.moves)
    asyncio.run(storm(fleet, plan_faults(planned, len(fleet.router_urls), options)))
    streams = [stream for stream in planned if stream.is_over]
    for stream in streams:
        stream.settle()
    caches = None
    if options.stateless:
        say("comparing prefix caches with the oracle")
        caches = asyncio.run(audit_caches(described, streams))
    say("waiting until nothing is left")
    urls = fleet.router_urls
    rest = add_up([asyncio.run(wait_until_at_rest(described | {"url": url})) for url in urls])
    verdict = judge(fleet, streams)
    counts = [read_retry_counts(url) for url in urls]
    silence = describe_silence(fleet, streams)
    retries = {name: sum(of_one[name] for of_one in counts) for name in counts[0]}
    if routers is not None:
        for number in range(len(urls)):
            routers.count_moves(number)
    # A probe has to hold up one prefill instance, which no role of a stateless one forbids to decode.
    probes = options.abort_probes if is_complete() and not options.stateless else 0
    freed = asyncio.run(measure_decode_free(fleet, probes, options.seed))
    pass_s = longest_pass_s(options.profile, options.time_scale)
    return Found(fleet, streams, verdict, caches, rest, retries, freed, pass_s, silence)


def add_up(rests: Sequence[ClusterLeftovers]) -> ClusterLeftovers:
    """As each router sees it."""
    checks = {name: all(getattr(rest, name) for rest in rests) for name in CHAOS_CHECKS}
    return ClusterLeftovers(**checks, details=[detail for rest in rests for detail in rest.details])


def late_to_pair(killed: Sequence[str], paired_s: Mapping[str, float]) -> list[str]:
    """Stateless instances that took too long once, or did not come back."""
    return [name for name in dict.fromkeys(killed) if paired_s.get(name, math.inf) > PAIRED_S]


def plot(found: Found, path: Path) -> None:
    ends = {None: "completed", GONE: "client gone"}
    arrivals = [(stream, int(stream.due_s - found.fleet.start_s)) for stream in found.streams]
    counts = Counter((ends.get(stream.error, "failed or aborted"), second) for stream, second in arrivals)
    seconds = range(max(second for _, second in arrivals) + 1)
    base = [0] * len(seconds)
    with panels(path, size=(9, 3.5)) as (panel,):
        for name, colour in (("completed", "#4477aa"), ("client gone", "#bbbbbb"), ("failed or aborted", "#cc3311")):
            height = [counts[name, second] for second in seconds]
            panel.bar(seconds, height, width=1.0, bottom=base, label=name, color=colour)
            base = [below + more for below, more in zip(base, height, strict=True)]
        for kill in found.fleet.kills:
            at_s = kill.at_s - found.fleet.start_s
            panel.axvline(at_s, color="black", linestyle="--", linewidth=1)
            panel.annotate(
                f"{'crash' if kill.crashed else 'SIGKILL'} {kill.name}", (at_s, max(base)), fontsize=8, va="top"
            )
        for still in found.fleet.standstills:
            from_s, until_s = still.at_s - found.fleet.start_s, still.over_s - found.fleet.start_s
            panel.axvspan(from_s, until_s, color="#cccccc", alpha=0.5)
            panel.annotate(f"{still.fault} {still.name}", (from_s, max(base)), fontsize=8, va="top")
        panel.set(xlabel="arrival, s", ylabel="requests a second")


CHAOS_ROWS = {
    "requests": "requests",
    "completed": "completed, every token right",
    "disconnected": "whose client went away on purpose",
    "aborted": "aborted or left on purpose",
    "failed_in_flight_at_kill": "failed with an instance that was killed",
    "failed_not_in_flight_at_kill": "failed otherwise",
    "tokens_wrong": "wrong tokens",
    "retried_after_transfer": "attempts after a KV transfer that failed",
    "retried_unsent": "dispatches again, as an instance could not be reached",
}
MOVE_ROWS = {
    "crashes": "schedulers that raised",
    "freezes": f"instances of which schedulers, or all processes, were frozen for {STILL_S:g} s",
    "blackholes": f"instances whose proxy let nothing through for {STILL_S:g} s",
    "failed_no_instance": "failed, as no instance was left",
    "failed_to_blame": "failed, as a scheduler may have died of them",
    "hops": "hops to another instance",
}
CHAOS_CHECKS = ("ledger_balanced", "gauges_zero", "kv_free")  # of what is left behind


def page(result: Result) -> str:
    counts = CHAOS_ROWS | (MOVE_ROWS if result.get("moves") else {})
    always = ("failed_not_in_flight_at_kill", "tokens_wrong", "failed_no_instance")
    left_out = ("disconnected", "retried_after_transfer", "retried_unsent")  # told together, or by a share
    shown = {name: result[name] for name in counts if name in result and name not in left_out}
    shown["aborted"] += result["disconnected"]
    rows = [[counts[name], f"{count:,.0f}"] for name, count in shown.items() if count or name in always]
    if result.get("moves") and "longest_silence_s" in result:
        silence = f"{result['longest_silence_s']:.1f} / {result['longest_wait_s']:.1f} s"
        rows.append(["longest that a stream stood still / waited to begin, beyond the longest pass", silence])
    if "restarted" in result:
        rows.append(["failed at a router that was ended, or was not back", f"{result['failed_at_router_restart']:,}"])
        restarts = zip(result["restarted"], result["moves_after_restart"], strict=True)
        rows.append(["moves after each restart", ", ".join(f"{what}: {moves}" for what, moves in restarts)])
    if "cache_entries" in result:
        found = f"{result['cache_entries_wrong']:,} of {result['cache_entries']:,}"
        rows.append(["entries of prefix caches that differ from the oracle", found])
    if result["transfer_failure_share"]:
        rows.append(["share of dispatches whose KV transfer failed", f"{result['transfer_failure_share']:.1%}"])
    rows.append(["nothing left behind", yes_no(all(result[name] for name in CHAOS_CHECKS))])
    if paired := result.get("paired_s"):
        slowest_s = max(paired.values())
        text = f"slowest pairing with all others after a restart (at most {PAIRED_S:g} s)"
        rows.append([text, f"{slowest_s:.1f} s" + (": NO" if slowest_s > PAIRED_S else "")])
    for name, text in (("abort", "the prefill's abort"), ("order", "the order to abort")):
        if not result["abort_probes"]:
            break
        p50, p99 = (result[f"decode_free_after_{name}_{share}_s"] for share in ("p50", "p99"))
        rows.append([f"decode free after {text}, p50 / p99", f"{p50:.2f} / {p99:.2f} s"])
    fleet = f"{result['stateless']} stateless instances, " if result.get("stateless") else ""
    often: Counter[str] = Counter(result["killed"])
    killed = [f"`{name}`" + (f" ({times} times)" if times > 1 else "") for name, times in often.items()]
    named = " and ".join(filter(None, (", ".join(killed[:-1]), *killed[-1:])))
    work = f"{fleet}{result['rate']:g} requests/s, policy `{result['policy']}`, SIGKILL of {named}"
    return f"{markdown(['what', 'count'], rows)}\n\n{work} · {device_conditions(result)}"


PAGES = {"chaos": page, "chaos_stateless": page, "chaos_moves": page, "chaos_routers": page}
