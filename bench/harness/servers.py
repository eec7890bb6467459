"""Processes that a bench starts and always stops: a server that can be frozen, an emulated cluster, a router."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.report import say
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.fleet.cluster.spec import KINDS, ROUTER_MODULES, ClusterConfig, EngineSpec, router_arguments
from pla_sglang.launch_router import BENCH_VARIABLE
from pla_sglang.testing.server import Server, ServerError, fetch, open_url

CLUSTER_START_S, CLUSTER_STOP_S = 300.0, 40.0
ROUTER_START_S, ROUTER_STOP_S = 120.0, 40.0
FIRST_TOKEN_S = 10.0
PAIRED_S = 60.0
IDLE_S = 20.0
LOG_TAIL_LINES = 25
POLL_S = 0.1


class PausableServer(Server):
    """An idle SGLang scheduler polls without pause and takes a whole core from the arm under test.

    Measured on two cores: beside an idle server a lone long took 1.10 s instead of 0.60 s. ``pause`` stops the whole
    process group (SIGSTOP), which gives 0.60 s. SGLang's ``--sleep-on-idle`` does too, but changes the arm that is
    measured. A frozen server keeps its sockets, its memory and its prefix cache.
    """

    def pause(self) -> None:
        self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_group(signal.SIGCONT)

    def stop(self) -> None:
        self.resume()  # a frozen process does not see the polite request to end
        super().stop()

    def _signal_group(self, number: signal.Signals) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


@contextlib.contextmanager
def running_child(command: Sequence[str], log: Path, *, stop_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own. In the end it gets SIGINT as from Ctrl-C, and SIGKILL after ``stop_s``."""
    environ = {**os.environ, BENCH_VARIABLE: "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environ
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(stop_s)
            except subprocess.TimeoutExpired:
                process.kill()  # a cluster's or a router's children end with it
                process.wait()


def wait_until_ready(
    process: subprocess.Popen[bytes], is_ready: Callable[[], bool], log: Path, *, name: str, limit_s: float
) -> None:
    """Raises ServerError, with the end of the log, when the process ends or the time is over before it is ready."""
    end_s = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < end_s:
        if is_ready():
            return
        time.sleep(POLL_S)
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])
    raise ServerError(f"{name} did not get ready; its last lines:\n{tail}")


def is_healthy(url: str, path: str = "/health", body: Any = None, *, tls: ssl.SSLContext | None = None) -> bool:
    """Tells whether a request is answered with success. ``tls``: for https."""
    try:
        with open_url(url + path, body, timeout_s=FIRST_TOKEN_S, tls=tls) as answer:
            answer.read()
    except (ServerError, OSError):
        return False
    return True


@contextlib.contextmanager
def running_cluster(arguments: Sequence[str], folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Start ``python -m pla_sglang.launch_cluster`` and yield its state file's content once everything is ready.

    Raises ServerError, with the end of the log, when it does not get ready.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state, log = folder / f"{name}.state.json", folder / f"{name}.log"
    state.unlink(missing_ok=True)
    described: dict[str, Any] = {}

    def is_described() -> bool:
        if state.exists():
            described.update(json.loads(state.read_text(encoding="utf-8")))
        return "pss_bytes" in described

    command = [sys.executable, "-m", "pla_sglang.launch_cluster", "--state-file", str(state), *arguments]
    with running_child(command, log, stop_s=CLUSTER_STOP_S) as process:
        wait_until_ready(process, is_described, log, name="the cluster", limit_s=CLUSTER_START_S)
        say(f"{name}: ready after {described['ready_s']:.0f} s, {described['pss_bytes'] / 2**30:.2f} GiB")
        yield described


def flush_cache(engine_url: str) -> None:
    """Empty the prefix cache; an engine refuses until it is idle. Raises ServerError when it does not get so."""
    end_s = time.monotonic() + IDLE_S
    while not is_healthy(engine_url, "/flush_cache", b""):
        if time.monotonic() > end_s:
            raise ServerError(f"{engine_url} does not flush its cache: something still runs in it")
        time.sleep(0.5)


@dataclass(frozen=True, slots=True)
class Router:
    """A router before running engines: ``kind`` and ``policy`` as ``launch_cluster`` names them, further arguments."""

    kind: str
    policy: str
    flags: tuple[str, ...] = ()


def router_command(router: Router, described: Mapping[str, Any], port: int) -> list[str]:
    """How the router of a cluster is started; ``described`` is the state file of one without. Raises ConfigError."""
    engines = []
    for engine in described["instances"]:
        port_of_engine = int(engine["url"].rpartition(":")[2])
        bootstrap_port = engine.get("bootstrap_port")
        engines.append(EngineSpec(engine["name"], engine["kind"], "127.0.0.1", port_of_engine, bootstrap_port, ()))
    counts = {kind: sum(engine.kind == kind for engine in engines) for kind in KINDS}
    config = ClusterConfig(counts=counts, router=router.kind, policy=router.policy, router_extra=router.flags)
    return [sys.executable, "-m", ROUTER_MODULES[router.kind], *router_arguments(config, engines, port, free_port())]


@contextlib.contextmanager
def running_router(
    router: Router, described: Mapping[str, Any], log: Path, *, first_request: bool = True
) -> Iterator[str]:
    """A router as a process of its own, so that arms share engines; yields its URL once it is ready.

    Healthy is not enough for SGLang's router, which says so before it knows its instances: with ``first_request`` a
    request has to go through. Raises ServerError, ConfigError.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    body = {"text": "ready?", "sampling_params": {"temperature": 0, "max_new_tokens": 1}}

    def is_ready() -> bool:
        return is_healthy(url, "/generate", body) if first_request else is_healthy(url)

    with running_child(router_command(router, described, port), log, stop_s=ROUTER_STOP_S) as process:
        wait_until_ready(process, is_ready, log, name="the router", limit_s=ROUTER_START_S)
        yield url


def wait_until_paired(router_url: str) -> None:
    """Until all stateless instances behind a router of ours are connected to those whose KV cache they may get.

    Raises ServerError, with what the instances say of their peers.
    """
    end_s = time.monotonic() + PAIRED_S
    while True:
        rows = fetch(f"{router_url}/workers")["workers"]
        senders = sum(row["kind"] in ("stateless", "prefill") for row in rows)
        peers = [row["peers"] or {} for row in rows if row["kind"] == "stateless"]
        if all(list(of_instance.values()) == ["ready"] * (senders - 1) for of_instance in peers):
            return
        if time.monotonic() > end_s:
            raise ServerError(f"stateless instances are not connected to each other after {PAIRED_S:.0f} s: {peers}")
        time.sleep(POLL_S)


def read_device(engine_url: str) -> dict[str, Any]:
    """What an engine says about its emulated devices, and its version; seconds are summed over its ranks.

    Raises ServerError when it has none.
    """
    info = fetch(f"{engine_url}/server_info")
    states = [state.get("pla_emulation") for state in info.get("internal_states") or [{}]]
    if None in states:
        raise ServerError(f"{engine_url} has no emulated device")
    sums = {name: sum(state[name] for state in states) for name in ("busy_s", "host_gap_s")}
    return {**states[0], **sums, "version": info.get("version")}


def read_devices(described: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """``read_device`` of each engine of a cluster, by name."""
    return {engine["name"]: read_device(engine["url"]) for engine in described["instances"]}


def count_passes(before: Mapping[str, Any], after: Mapping[str, Any], time_scale: float) -> dict[str, Any]:
    """Forward passes between two ``read_device``, and what one of them cost beside its tokens, in device time."""
    passes, gap_s = (after[name] - before[name] for name in ("steps", "pass_gap_s"))
    return {"passes": passes, "gap_ms_a_pass": 1e3 * gap_s / time_scale / max(1, passes)}


def read_boundary(engine_url: str) -> int | None:
    """As fitted, tokens; None for an engine without our scheduling."""
    pla = fetch(f"{engine_url}/server_info")["internal_states"][0].get("pla")
    return None if pla is None else pla["boundary_tokens"]


def host_overhead_share(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """Share of the time with work at hand in which a device waited for its host, between two ``read_device``."""
    busy_s, gap_s = (after[name] - before[name] for name in ("busy_s", "host_gap_s"))
    return float(gap_s / (busy_s + gap_s)) if busy_s + gap_s > 0 else 0.0
