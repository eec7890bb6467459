"""What a router costs: added TTFT, CPU time a request, a stream and an event, throughput, memory.

Ours and SGLang's two routers stand in front of the same mock prefill and decode instance, one at a time, in one run.
``ours_movable`` is ours with ``--migration on``, in front of two stateless ones: all streams say their token ids, which
it takes out and keeps. That it does is checked in every round. ``ours_tls`` speaks TLS to its clients; ``ours_limits``
has a file of keys and charges each request to its tenant's limit, which is never reached.
Mock and client are cheap: the arm ``direct`` shows how cheap. They share the machine with the router, so a throughput
is a lower bound, and CPU time is the steadier figure. Other work on the machine is measured; calm samples count.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from bench.cost.router_cost.client import Client, Plan, make_probes, running_client
from bench.cost.router_cost.figures import LIMITS, TLS, cpu_ratios, figures, missed, page, split_ms, table
from bench.cost.router_cost.movable import check_movable
from bench.harness.arms import Arm
from bench.harness.bench import BenchError, measuring
from bench.harness.cli import add_output, add_quick
from bench.harness.figures import COLOURS, STOCK_COLOUR, panels
from bench.harness.report import emit, environment, say, show
from bench.harness.servers import is_healthy, running_child, wait_until_paired, wait_until_ready
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.testing.mock_instance import Mocks, running_mocks

START_S, STOP_S = 40.0, 5.0  # of a router
MOCKS = ("prefill", "decode", "stateless", "stateless")
BOOTSTRAP_PORT = 8998
CLIENT_KEY, ADMIN_FILE, MANY_KEYS = "key-of-the-client-of-this-bench", "admin.key", 1000
SGLANG_ROUTER = "sglang_router.launch_router"
# Title, and the figures with their labels.
PANELS = {  # figure, title of its panel
    "added_ttft_p50_ms": "added TTFT at 200/s, p50, ms",
    "added_ttft_p99_ms": "the same, p99, ms",
    "cpu_ms_per_request": "CPU a request, ms",
    "cpu_ms_per_stream": "CPU a 16-token stream, ms",
    "requests_per_s": "requests/s",
    "events_per_s": "events/s",
    "long_body_rps": "60K-token bodies/s",
}
PANEL_COLUMNS = 4
Router: TypeAlias = psutil.Process | None  # the root of its processes; None for an arm without a router
Samples = dict[str, dict[str, list[dict[str, Any]]]]  # by arm, then by probe, one a round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="times every arm is measured")
    parser.add_argument("--duration-s", type=float, default=2.0, help="of one probe")
    parser.add_argument("--arms", default="", help="comma-separated; default: all")
    add_output(parser, seed=1)
    add_quick(parser)


@dataclasses.dataclass(frozen=True)
class RouterArm(Arm):
    """One way to reach the instances; without a module no router, straight to the decode instance."""

    port: int = 0  # where the client sends its requests
    quickack: bool = False  # whether the client asks for immediate ACKs
    movable: bool = False  # whether every stream is to be one that could go on elsewhere
    shares: str | None = None  # the arm whose process this one uses
    ca: str = ""  # with TLS: file with the authority, which is the certificate itself
    key: str = ""  # that clients send


def make_arms(mocks: Mocks, folder: Path) -> list[RouterArm]:
    """Every arm, in the order of the table. Ports are new: a router that has just ended may leave connections.

    ``folder``: where their files are written.
    """
    prefill, decode, *stateless = mocks.urls

    def ours(name: str, relays: int, *, movable: bool = False) -> RouterArm:
        port = free_port()
        flags = ["--port", str(port), "--relay-workers", str(relays), "--policy", "static-pd-round-robin"]
        flags += ["--migration", "on"] if movable else []
        workers = [part for url in (stateless if movable else (prefill, decode)) for part in ("--worker", url)]
        return RouterArm(name, (*flags, *workers), module="pla_sglang.launch_router", port=port, movable=movable)

    def sglang(name: str, *further: str) -> RouterArm:
        port = free_port()
        flags = ("--host", "127.0.0.1", "--port", str(port), "--pd-disaggregation")
        workers = ("--prefill", prefill, str(BOOTSTRAP_PORT), "--decode", decode)
        return RouterArm(name, (*flags, *workers, *further), module=SGLANG_ROUTER, port=port)

    def with_quickack(arm: RouterArm) -> RouterArm:
        return dataclasses.replace(arm, name=f"{arm.name}_quickack", quickack=True, shares=arm.name)

    def with_tls(arm: RouterArm) -> RouterArm:
        cert, key = make_certificate(folder)
        flags = ("--tls-cert-path", str(cert), "--tls-key-path", str(key))
        return dataclasses.replace(arm, flags=(*arm.flags, *flags), ca=str(cert))

    def with_limits(arm: RouterArm) -> RouterArm:
        flags = ("--keys-file", str(write_keys(folder)), "--admin-key-file", str(folder / ADMIN_FILE))
        return dataclasses.replace(arm, flags=(*arm.flags, *flags), key=CLIENT_KEY)

    two_processes = ours("ours", 1)
    rust_flags = ("--policy", "random", "--log-level", "warn", "--worker-startup-check-interval", "1")
    rust = sglang("rust", *rust_flags, "--prometheus-port", str(free_port()))
    return [
        RouterArm("direct", module="", port=int(decode.rpartition(":")[2])),
        two_processes,
        with_quickack(two_processes),
        ours("ours_one_process", 0),
        ours("ours_movable", 1, movable=True),
        with_tls(ours(TLS, 1)),
        with_limits(ours(LIMITS, 1)),
        sglang("mini_lb", "--mini-lb"),
        rust,
        with_quickack(rust),
    ]


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Paths of a certificate for 127.0.0.1 that vouches for itself, and of its key. Raises BenchError."""
    cert, key = folder / "router.crt", folder / "router.key"
    if not cert.exists():
        kind = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=router"
        command = ["openssl", "req", "-x509", *kind.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
        try:
            subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BenchError(f"openssl made no certificate: {error}") from None
    return cert, key


def write_keys(folder: Path) -> Path:
    """A file of many keys, and the operators' key beside it. The client's tenant has a limit that it does not reach."""
    names = [CLIENT_KEY, *(f"{CLIENT_KEY}-{number}" for number in range(MANY_KEYS))]
    keys = [{"id": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": "bench"} for name in names]
    limit = {"prefill_seconds_per_second": 1e6, "burst_seconds": 1e9}
    path = folder / "keys.json"
    path.write_text(json.dumps({"tenants": {"bench": limit}, "keys": keys}))
    (folder / ADMIN_FILE).write_text("operators-of-the-bench")
    (folder / ADMIN_FILE).chmod(0o600)
    return path


def select_arms(known: list[RouterArm], names: str) -> list[RouterArm]:
    """``direct`` is always there: the others are compared with it. Raises ConfigError for a name that is not known."""
    wanted = set(filter(None, names.split(","))) or {arm.name for arm in known}
    if unknown := wanted - {arm.name for arm in known}:
        allowed = ", ".join(arm.name for arm in known)
        raise ConfigError(f"--arms: {', '.join(sorted(unknown))} unknown; allowed: {allowed}")
    leaders = {arm.shares for arm in known if arm.name in wanted}
    return [arm for arm in known if arm.name in wanted | leaders | {"direct"}]


def list_processes(router: Router) -> list[psutil.Process]:
    return [] if router is None else [router, *router.children(recursive=True)]


def relay_bytes(router: Router) -> int:
    """Memory of its own (USS) of what holds the connections: the relay, or the whole router without one."""
    processes = list_processes(router)
    relays = [process for process in processes if "relay" in process.cmdline()[-1:]]
    return sum(process.memory_full_info().uss for process in relays or processes)


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """User and system time; of a process that has ended nothing."""
    total_s = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total_s += sum(process.cpu_times()[:2])
    return total_s


@contextlib.contextmanager
def running_router_arm(arm: RouterArm, folder: Path) -> Iterator[Router]:
    """Raises ServerError where it does not become healthy, with the end of its log."""
    if not arm.module:
        yield None
        return
    log, url = folder / f"{arm.name}.log", f"{'https' if arm.ca else 'http'}://127.0.0.1:{arm.port}"
    tls = ssl.create_default_context(cafile=arm.ca) if arm.ca else None
    with running_child([arm.python, "-m", arm.module, *arm.flags], log, stop_s=STOP_S) as process:
        wait_until_ready(process, lambda: is_healthy(url, tls=tls), log, name=arm.name, limit_s=START_S)
        if arm.movable:  # before, requests go to one instance alone
            wait_until_paired(url)
        yield psutil.Process(process.pid)


def measure(options: argparse.Namespace) -> Samples:
    """Mocks and client stay, each router lives for its turn in a round. A turn that was interrupted does not count."""
    samples: Samples = {}
    with (
        running_mocks(*MOCKS) as mocks,
        running_client() as client,
        tempfile.TemporaryDirectory(prefix="router_cost.") as folder,
        measuring(),
    ):
        bench = [mocks.process, psutil.Process(client.pid), psutil.Process()]
        for number in range(options.rounds):
            arms = select_arms(make_arms(mocks, Path(folder)), options.arms)
            leaders = [arm for arm in arms if arm.shares is None]
            for leader in leaders[number % len(leaders) :] + leaders[: number % len(leaders)]:
                with running_router_arm(leader, Path(folder)) as router:
                    for arm in [leader, *(arm for arm in arms if arm.shares == leader.name)]:
                        for probe, sample in measure_arm(arm, router, client, bench, options).items():
                            samples.setdefault(arm.name, {}).setdefault(probe, []).append(sample)
    return samples


def measure_arm(
    arm: RouterArm, router: Router, client: Client, bench: list[psutil.Process], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    plans = make_probes(
        arm.port, duration_s=options.duration_s, seed=options.seed, quickack=arm.quickack, ca=arm.ca, key=arm.key
    )
    warm_up = {**plans["stream_200"], "duration_s": min(1.0, options.duration_s)}
    take_sample(warm_up, client, router, bench)
    samples = {}
    for name, plan in plans.items():
        taken = samples[name] = take_sample(plan, client, router, bench)
        say(f"{arm.name} {name}: {taken['completed']} done, {taken['errors']} errors, others {taken['other_cores']}")
    if arm.movable:
        check_movable(arm.port, client)
    return samples


def take_sample(plan: Plan, client: Client, router: Router, bench: list[psutil.Process]) -> dict[str, Any]:
    """One probe of one arm. ``bench``: the processes of this bench, whose work is not that of others."""
    idle_bytes = open_bytes = relay_bytes(router)
    client.begin(plan)
    if plan["kind"] == "held":
        opened = client.read_line()
        if "open" not in opened:
            raise BenchError(f"streams did not open: {opened}")
        open_bytes = relay_bytes(router)
    before = read_clocks_s(router, bench)
    result = client.read_line()
    after = read_clocks_s(router, bench)
    wall_s, machine_s, bench_s, router_s = (late - early for early, late in zip(before, after, strict=True))
    other_cores = round(max(0.0, (machine_s - bench_s - router_s) / wall_s), 3)
    costs = {"cpu_s": router_s, "other_cores": other_cores, "idle_bytes": idle_bytes, "open_bytes": open_bytes}
    return result | costs


def read_clocks_s(router: Router, bench: list[psutil.Process]) -> tuple[float, float, float, float]:
    """Wall clock, and CPU seconds of the machine, of this bench and of the router."""
    times = psutil.cpu_times()
    busy_s = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    return time.monotonic(), float(busy_s), cpu_s(bench), cpu_s(list_processes(router))


def plot(by_arm: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """A panel a figure, a bar an arm; logarithmic, as the arms differ by orders of magnitude."""
    arms = list(by_arm)
    rows = -(-len(PANELS) // PANEL_COLUMNS)
    size = (14.0, rows * (0.9 + 0.24 * len(arms)))
    with panels(path, len(PANELS), size=size, columns=PANEL_COLUMNS) as axes:
        for place, (panel, (key, title)) in enumerate(zip(axes, PANELS.items(), strict=True)):
            draw_figure(panel, {arm: of_arm[key] for arm, of_arm in by_arm.items() if of_arm.get(key)}, arms)
            panel.set_title(title, fontsize=9)
            panel.tick_params(labelleft=place % PANEL_COLUMNS == 0, labelsize=8)


def draw_figure(panel: Any, values: Mapping[str, float], arms: Sequence[str]) -> None:
    """Bars from left to right, the first arm on top, each with its figure; "-" where an arm has none."""
    from matplotlib.ticker import NullFormatter

    least, most = min(values.values(), default=1.0), max(values.values(), default=1.0)
    beside = {"textcoords": "offset points", "xytext": (3, 0), "va": "center", "fontsize": 7}
    for place, arm in enumerate(arms):
        value = values.get(arm)
        if value is not None:
            panel.barh(place, value, color=COLOURS[0] if arm.startswith("ours") else STOCK_COLOUR)
        text = "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
        panel.annotate(text, (value or least / 2, place), **beside)
    panel.set(xscale="log", xlim=(least / 2, 2 * most * (most / least) ** 0.3))  # room for the figures
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_yticks(range(len(arms)), arms)
    panel.set_ylim(len(arms) - 0.5, -0.5)
    panel.grid(axis="x", alpha=0.3)


def run(options: argparse.Namespace) -> int:
    if options.rounds < 1 or options.duration_s <= 0:
        raise ConfigError("--rounds must be at least 1 and --duration-s above 0")
    if options.quick:
        options.rounds, options.duration_s = 1, 0.5
    if importlib.util.find_spec("sglang_router") is None:
        raise BenchError("sglang_router is not installed (the bench extra)")
    samples = measure(options)
    if "direct" not in samples:
        raise BenchError("the arm 'direct' was not measured, with which the others are compared")
    direct = samples["direct"]
    by_arm = {arm: figures(of_arm, direct) for arm, of_arm in samples.items() if arm != "direct"}
    result = {
        "bench": "router_cost",
        **by_arm,
        "split_added_ttft_p50_ms": split_ms(by_arm),
        "cpu_ratios": cpu_ratios(by_arm),
        "goals_missed": missed(by_arm),
        "direct": figures(direct, direct),
        "rounds": options.rounds,
        "duration_s": options.duration_s,
        "seed": options.seed,
        "other_cores": {
            arm: {probe: [taken["other_cores"] for taken in of_probe] for probe, of_probe in of_arm.items()}
            for arm, of_arm in samples.items()
        },
        **environment(),
    }
    errors = ", ".join(f"{arm} {of_arm['errors']}" for arm, of_arm in by_arm.items())
    show("cost of routers (medians over calm rounds)", *table(result, list(by_arm)), caption=f"errors: {errors}")
    plot(by_arm, options.out / "router_cost.png")
    emit(result, "router_cost", options.out)
    return 0


PAGES = {"router_cost": page}
