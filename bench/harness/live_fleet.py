"""Emulated engines behind a router of ours: requests of a trace in device time, and whether the run can be trusted."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import cli, report, servers
from bench.harness.fidelity import Points
from bench.harness.replay import MAX_LAG_MS, Planned, Record, Sent, count_wrong, lag_s, plan, replay, require_answers
from bench.harness.steps import Row
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.sim.workload import Trace

SLOTS = 512
Devices = Mapping[str, Mapping[str, Any]]  # what engines say of their devices, by name


@dataclasses.dataclass(frozen=True)
class LiveFleet:
    """Running engines.

    Attributes:
        described: the cluster's state file.
        telemetry: address at which the engines report to a router.
        log: of the router.
        time_scale, seed, timeout_s: of the devices, of the prompts, of one request.
    """

    described: dict[str, Any]
    telemetry: str
    log: Path
    time_scale: float
    seed: int
    timeout_s: float

    def choose_engines(self, counts: Mapping[str, int]) -> LiveFleet:
        """The first so many of each kind, which must be there; the others are left alone."""
        instances = []
        for kind, count in counts.items():
            alike = [engine for engine in self.described["instances"] if engine["kind"] == kind]
            assert count <= len(alike), f"{len(alike)} {kind} engines run, not {count}"
            instances += alike[:count]
        return dataclasses.replace(self, described=self.described | {"instances": instances})

    @contextmanager
    def running_router(self, policy: str, flags: Sequence[str] = (), *, kind: str = "pla") -> Iterator[str]:
        """One of its own in front of the engines; stateless ones are connected when it is ready. Raises ServerError.

        ``kind``: as ``launch_cluster --router`` names it; only ours gets the load reports.
        """
        reports = ("--telemetry", self.telemetry) if kind == "pla" else ()
        router = servers.Router(kind, policy, (*reports, *flags))
        with servers.running_router(router, self.described, self.log) as url:
            if any(engine["kind"] == "stateless" for engine in self.described["instances"]):
                servers.wait_until_paired(url)
            yield url

    def send(self, policy: str, planned: list[Planned]) -> list[Record]:
        """Through a router of its own, from empty prefix caches on. Raises ServerError."""
        return self._send(policy, planned, (), "pla")[0]

    def _send(
        self, policy: str, planned: list[Planned], router_flags: Sequence[str], router: str
    ) -> tuple[list[Record], Row]:
        """The answers, and what the router says of itself afterwards."""
        for engine in self.described["instances"]:
            servers.flush_cache(engine["url"])
        with self.running_router(policy, router_flags, kind=router) as url:
            records = replay(url, planned, timeout_s=self.timeout_s)
            state = servers.fetch(f"{url}/pla/state") if router == "pla" else {}
            told = {name: state[name] for name in ("flips", "prefixes") if name in state}
        require_answers(records)
        return records, told

    def measure_trace(
        self, name: str, policy: str, trace: Trace, router_flags: Sequence[str] = (), *, router: str = "pla"
    ) -> Row:
        """``points``, what says whether hosts and client kept up, and how often our router changed roles (``flips``).

        Where prompts share prefixes, also what of them was cached (``describe_hits``). Raises ServerError.
        """
        planned = plan(trace, seed=self.seed, time_scale=self.time_scale)
        report.say(f"{name}: {len(planned)} requests at {trace.rate_per_s:.2f}/s, {planned[-1].at_s:.0f} s")
        before = servers.read_devices(self.described)
        records, told = self._send(policy, planned, router_flags, router)
        after = servers.read_devices(self.described)
        prefixes = told.pop("prefixes", {})
        row = {"points": points_of(records, self.time_scale), "rate_rps": trace.rate_per_s} | told
        row |= {} if trace.hash_ids is None else describe_hits(records, prefixes)
        return row | self.describe_hosts(before, after, records) | {"tokens_wrong": sum(map(count_wrong, records))}

    def describe_hosts(self, before: Devices, after: Devices, records: Sequence[Sent]) -> Row:
        """Tells whether the client and the engines' hosts kept up between two ``read_devices``, and with which
        commit."""
        gap_s, passes = (sum(after[at][of] - before[at][of] for at in after) for of in ("host_gap_s", "steps"))
        return {
            "host_gap_s": gap_s / passes / self.time_scale,
            "host_overhead_share": max(servers.host_overhead_share(before[name], after[name]) for name in after),
            "client_lag_p99_ms": float(np.percentile(lag_s(records), 99)) * 1e3,
            "plugin_commit": report.environment()["plugin_commit"],
        }


def describe_hits(records: Sequence[Record], prefixes: Mapping[str, Mapping[str, int]]) -> Row:
    """``hit_rate``: share of the prompts' tokens that were cached, by the answers.

    ``predicted_hit_error``: share of them by which our router was wrong about that. Its sums of an instance are all
    that it tells (``prefixes`` of /pla/state), so errors up and down within one cancel out.
    """
    cached = sum(int(record.meta.get("cached_tokens") or 0) for record in records)
    row: Row = {"hit_rate": cached / sum(len(record.prompt_ids) for record in records)}
    if judged := sum(sums["prompt_tokens"] for sums in prefixes.values()):
        wrong = sum(abs(sums["predicted_tokens"] - sums["hit_tokens"]) for sums in prefixes.values())
        row["predicted_hit_error"] = wrong / judged
    return row


def is_valid(row: Mapping[str, Any], max_overhead: float) -> bool:
    """Tells whether a row of ``measure_trace`` tells of the engines: client in time, host out of the way, tokens
    right."""
    return is_in_time(row, max_overhead) and not row["tokens_wrong"]


def is_in_time(row: Mapping[str, Any], max_overhead: float) -> bool:
    """Tells whether client and hosts kept up, by ``LiveFleet.describe_hosts``."""
    return bool(row["client_lag_p99_ms"] <= MAX_LAG_MS and row["host_overhead_share"] <= max_overhead)


@contextmanager
def running_fleet(
    name: str, flags: Sequence[str], options: argparse.Namespace, *, timeout_s: float | None = None
) -> Iterator[LiveFleet]:
    """``flags``: of ``launch_cluster``; ``timeout_s``: of a request, None: that of ``options``. Raises ServerError."""
    telemetry = f"tcp://127.0.0.1:{free_port()}"
    arguments = ["--router", "none", "--quiet", *cli.device_flags(options.profile, options.time_scale)]
    arguments += ["--pla-telemetry", telemetry, "--stream-interval", "8"]
    arguments += [*flags, "--max-running-requests", str(SLOTS)]
    log = options.out / f"{name.partition('-')[0]}-router.log"
    timeout_s = options.timeout_s if timeout_s is None else timeout_s
    with servers.running_cluster(arguments, options.out, name) as described:
        yield LiveFleet(described, telemetry, log, options.time_scale, options.seed, timeout_s)


def points_of(records: Sequence[Record], time_scale: float) -> Points:
    """The columns of what was sent and of the ``live`` times."""
    ordered = sorted(records, key=lambda record: record.sent_s or 0.0)
    return {
        "row": [record.planned.index for record in ordered],
        "sent_s": [(record.sent_s or 0.0) / time_scale for record in ordered],
        "input_tokens": [len(record.prompt_ids) for record in ordered],
        "output_tokens": [record.planned.output_tokens for record in ordered],
        "live_first_s": [record.token_s[0] / time_scale for record in ordered],
        "live_finish_s": [(record.done_s or math.nan) / time_scale for record in ordered],
    }
