"""What a router costs: added TTFT, CPU time a request, a stream and an event, throughput, memory.

Ours and SGLang's two routers stand in front of the same mock prefill and decode instance, one at a time, in one run.
Mock and client are cheap: the arm ``direct`` shows how cheap. They share the machine with the router, so a throughput
is a lower bound, and CPU time is the steadier figure. Other work on the machine is measured; calm samples count.

    python -m bench.router_cost --rounds 3
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from bench.lib.report import emit, environment, say, stdout
from bench.routing.arms import Arm, Instances, Router, arms, log_folder, mocks, why_not
from bench.routing.goals import missed, split_ms
from bench.routing.measure import Client, figures, probes, sample
from pla_sglang.testing.server import free_port

COLUMNS = (
    ("added_ttft_p50_ms", "added TTFT p50"),
    ("added_ttft_p99_ms", "p99 ms"),
    ("added_ttft_p50_ms_400_per_s", "400/s p50"),
    ("added_ttft_p99_ms_400_per_s", "p99 ms"),
    ("cpu_ms_per_request", "CPU ms/request"),
    ("cpu_ms_per_stream", "CPU ms/stream"),
    ("us_per_event", "us/event"),
    ("requests_per_s", "requests/s"),
    ("events_per_s", "events/s"),
    ("long_body_rps", "60K bodies/s"),
    ("mb_idle", "MB idle"),
    ("kb_per_stream", "KB/stream"),
    ("errors", "errors"),
)
PORT_NAMES = ("ours", "ours_one_process", "ours_zmq", "mini_lb", "rust", "rust_metrics")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.router_cost", description=__doc__.split("\n")[0])
    made.add_argument("--rounds", type=int, default=3, help="times every arm is measured")
    made.add_argument("--duration-s", type=float, default=2.0, help="of one probe")
    made.add_argument("--seed", type=int, default=1, help="of arrivals")
    made.add_argument("--arms", default="", help="comma-separated; default: all")
    made.add_argument("--probes", default="", help="comma-separated; default: all")
    made.add_argument("--quick", action="store_true", help="one short round: shows that everything works")
    made.add_argument("--out", type=Path, default=Path("bench_out"))
    return made


class Run:
    """One run: mocks and client stay, each arm's router lives for its turn in a round."""

    def __init__(self, options: argparse.Namespace, folder: Path, client: Client, mock: psutil.Process) -> None:
        self._options, self._folder, self._client = options, folder, client
        self._own = [mock, psutil.Process(client.process.pid), psutil.Process(os.getpid())]
        self.samples: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def turn(self, arm: Arm, followers: list[Arm], ports: dict[str, int], decode: int) -> None:
        """Measure ``arm``, and those that use the same process."""
        if arm.command is None:
            self._measure(arm, None, decode)
            return
        router = Router(arm, ports[arm.name], self._folder / f"{arm.name}.log")
        try:
            router.wait_ready()
            for one in (arm, *followers):
                self._measure(one, router, router.port)
        finally:
            router.stop()

    def _measure(self, arm: Arm, router: Router | None, port: int) -> None:
        options = self._options
        wanted = set(filter(None, options.probes.split(",")))
        plans = probes(arm, port, duration_s=options.duration_s, seed=options.seed)
        warm = plans["stream_200"] | {"duration_s": min(1.0, options.duration_s)}
        self._client.run(warm)
        for name, plan in plans.items():
            if wanted and name not in wanted and not name.startswith("stream"):
                continue
            found = sample(name, plan, self._client, router, self._own)
            self.samples.setdefault(arm.name, {}).setdefault(name, []).append(found)
            say(
                f"{arm.name} {name}: {found['completed']} done, {found['errors']} errors, others {found['other_cores']}"
            )


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Samples by arm and probe."""
    instances = Instances(free_port(), free_port())
    client = Client()
    try:
        with mocks(instances) as mock, log_folder() as folder:
            run = Run(options, folder, client, mock)
            for number in range(options.rounds):
                # new ports each round: a router that has just ended may leave connections on its own
                ports = {name: free_port() for name in PORT_NAMES}
                chosen = select(arms(instances, ports), options.arms)
                leaders = [arm for arm in chosen if arm.shares is None]
                for arm in leaders[number % len(leaders) :] + leaders[: number % len(leaders)]:
                    run.turn(arm, [one for one in chosen if one.shares == arm.name], ports, instances.decode)
            return run.samples
    finally:
        client.close()


def select(everything: list[Arm], names: str) -> list[Arm]:
    """Raises SystemExit for a name that is not known. ``direct`` is always there: the others are compared with it."""
    wanted = set(filter(None, names.split(","))) or {arm.name for arm in everything}
    unknown = wanted - {arm.name for arm in everything}
    if unknown:
        raise SystemExit(
            f"--arms: {', '.join(sorted(unknown))} unknown; allowed: {', '.join(a.name for a in everything)}"
        )
    leaders = {arm.shares for arm in everything if arm.name in wanted}
    return [arm for arm in everything if arm.name in wanted | leaders | {"direct"}]


def show(by_arm: dict[str, dict[str, Any]]) -> None:
    table = Table(title="cost of routers (medians over calm rounds)", title_justify="left")
    table.add_column("arm")
    for _, title in COLUMNS:
        table.add_column(title, justify="right")
    for arm, found in by_arm.items():
        cells = [found.get(key) for key, _ in COLUMNS]
        table.add_row(arm, *("-" if cell is None else f"{cell:,.4g}" for cell in cells))
    stdout.print(table)


def plot(by_arm: dict[str, dict[str, Any]], path: Path) -> None:
    """Three panels: added TTFT, CPU time, throughput; one bar an arm."""
    from bench.routing.picture import plot_costs

    path.parent.mkdir(parents=True, exist_ok=True)
    plot_costs(by_arm, path)


def main() -> int:
    options = parser().parse_args()
    if options.rounds < 1 or options.duration_s <= 0:
        raise SystemExit("--rounds must be at least 1 and --duration-s above 0")
    if options.quick:
        options.rounds, options.duration_s = 1, 0.5
    if why_not():
        raise SystemExit(f"error: {why_not()}")
    samples = measure(options)
    direct = samples["direct"]
    by_arm = {arm: figures(of_arm, direct) for arm, of_arm in samples.items() if arm != "direct"}
    show(by_arm)
    plot(by_arm, options.out / "router_cost.png")
    result = {
        "bench": "router_cost",
        **by_arm,
        "split_added_ttft_p50_ms": split_ms(by_arm),
        "goals_missed": missed(by_arm),
        "direct": figures(direct, direct),
        "rounds": options.rounds,
        "duration_s": options.duration_s,
        "seed": options.seed,
        "other_cores": {
            arm: {name: [one["other_cores"] for one in found] for name, found in of_arm.items()}
            for arm, of_arm in samples.items()
        },
        **environment(),
    }
    emit(result, options.out, "router_cost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
